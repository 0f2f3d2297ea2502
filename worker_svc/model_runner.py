"""One forward of the model over the units of a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from worker_svc.attention.base import AttentionBackend
from worker_svc.kv.store import KVStore
from worker_svc.models.base import BlockModel

if TYPE_CHECKING:
    from worker_svc.cuda_graphs import ForwardGraphs


class Segment(NamedTuple):
    """Consecutive blocks of one slot, known on the host: units [first_unit, first_unit + num_units) of the forward.

    A chunk of a prefix, or what denoises: a row's block, or two blocks fused into one input.
    """

    first_unit: int
    num_units: int
    first_block: int
    is_prefill: bool = False


@dataclass
class ForwardInput:
    """What one forward computes. A unit is one block of one slot; the segments cover all U units, each once.

    `ids` int64 [U, B]; `slots`, `block_index` int64 [U]; `logits_units` int64 [R], the units whose logits are wanted
    (may be empty); all on the model's device. Every unit's page is in the page table.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    block_index: torch.Tensor
    segments: tuple[Segment, ...]
    logits_units: torch.Tensor


def positions_of(inputs: ForwardInput) -> torch.Tensor:
    """int64 [U, B]: the position in its slot of each token."""
    block_size = inputs.ids.shape[1]
    return inputs.block_index[:, None] * block_size + torch.arange(block_size, device=inputs.ids.device)


class ModelRunner(Protocol):
    """What the executor needs of a model: its sizes, and a forward."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    is_asynchronous: bool  # `forward` returns before the device has ended, and the host can work meanwhile

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        """Write the units' keys and values into `kv`; return the logits of `logits_units`, [R, B, V] in `dtype`.

        Those of a position speak of that position. Of a model whose logits speak of the next position they are rolled
        by one: those at position 0 speak of the first position of the next block.
        """

    def finish(self) -> float:
        """Wait until the forward and what was computed from its logits have ended; the milliseconds the device was
        busy with them. Called once after each forward."""


class TorchModelRunner:
    """A model in PyTorch.

    `batch_invariant`: one unit at a time through all layers, the units of a segment in order. Every product then has
    the shape of one block, whatever else is in the batch, and its operands are freshly allocated and so aligned alike;
    the logits depend bit for bit on the request's own tokens. On the CPU this needs one thread: several threads cut a
    sum where their number says.
    """

    def __init__(
        self, model: BlockModel, attention: AttentionBackend, batch_invariant: bool = False, logit_shift: int = 0
    ) -> None:
        """Raises ValueError for batch-invariant mode on a CPU with more than one torch thread."""
        if batch_invariant and model.device.type == "cpu" and torch.get_num_threads() > 1:
            raise ValueError("batch-invariant mode on the CPU needs one thread: torch.set_num_threads(1)")
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
        self.device = model.device
        self.is_asynchronous = model.device.type == "cuda"
        self.model = model
        self.attention = attention
        self.graphs: ForwardGraphs | None = None  # for the forwards that one of them fits
        self._batch_invariant = batch_invariant
        self._logit_shift = logit_shift
        self._launched_at = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._end_event: torch.cuda.Event | None = None
        if self.is_asynchronous:
            self._start_event, self._end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @torch.inference_mode()
    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        """See `ModelRunner.forward`. What it returns may be changed in place only under `torch.inference_mode`."""
        self._launched_at = time.perf_counter()
        if self._start_event is not None:
            self._start_event.record(torch.cuda.current_stream(self.device))
        if not self._batch_invariant:
            return self._forward(inputs, kv)
        wanted = inputs.logits_units.tolist()
        logits: dict[int, torch.Tensor] = {}
        for segment in inputs.segments:
            for offset in range(segment.num_units):
                unit = segment.first_unit + offset
                logits[unit] = self._forward(_one_unit(inputs, unit, segment.first_block + offset, unit in wanted), kv)
        if not wanted:
            return torch.empty((0, inputs.ids.shape[1], self.vocab_size), dtype=self.dtype, device=self.device)
        return torch.cat([logits[unit] for unit in wanted])

    def finish(self) -> float:
        """See `ModelRunner.finish`; on the CPU from the launch on."""
        if self._start_event is None or self._end_event is None:
            return (time.perf_counter() - self._launched_at) * 1000
        self._end_event.record(torch.cuda.current_stream(self.device))
        self._end_event.synchronize()
        return float(self._start_event.elapsed_time(self._end_event))

    def _forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        hidden = self.graphs.run(inputs, kv) if self.graphs is not None else None
        if hidden is None:
            self.attention.prepare(inputs, kv)
            hidden = self.model(inputs.ids, positions_of(inputs), self.attention)
        wanted = hidden.index_select(0, inputs.logits_units)
        return self.model.logits(wanted.roll(self._logit_shift, dims=1) if self._logit_shift else wanted)


def _one_unit(inputs: ForwardInput, unit: int, block: int, wants_logits: bool) -> ForwardInput:
    """The forward of this unit alone."""
    this = slice(unit, unit + 1)
    logits_units = torch.zeros(int(wants_logits), dtype=torch.int64, device=inputs.ids.device)
    segments = (Segment(first_unit=0, num_units=1, first_block=block),)
    return ForwardInput(inputs.ids[this], inputs.slots[this], inputs.block_index[this], segments, logits_units)


def forget_pool(runner: ModelRunner) -> None:
    """After its last forward over a pool that is given up: nothing in the runner holds the pool any more."""
    if isinstance(runner, TorchModelRunner):
        runner.attention.forget()

"""Captured forwards: all that the model launches for a number of units, launched again as one CUDA graph.

    units of the forward    | row 0 | row 1 | commit of row 0 |
    a graph for 4 units     |   x   |   x   |        x        | padding |

A graph has addresses and sizes of its own: ids and positions are copied into its buffers, its attention backend keeps
the index arrays where they are, and units that fill it up write to the padding page, which no row reads. The model
computes each unit by itself, so padding changes no row. Chunks of several blocks, and forwards of more units than the
largest graph has, are launched kernel by kernel. So are the head and the step, while the graph runs: the logits of all
sizes would need more memory than the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from worker_svc.attention.base import AttentionBackend
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import SettingsError
from worker_svc.model_runner import ForwardInput, ModelRunner, TorchModelRunner, positions_of
from worker_svc.models.base import BlockModel
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()

# From what launches a forward: what launches it again, and where its result then stands.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


class CaptureError(SettingsError):
    """One line: why a forward could not be captured, and the flag to change."""


class _Graph(NamedTuple):
    """The buffers of one size, [N, B] each, and what launches it."""

    ids: Tensor
    positions: Tensor
    attention: AttentionBackend
    launch: Callable[[], object]
    hidden: Tensor  # [N, B, hidden_size]


class ForwardGraphs:
    """Graphs of the forwards of 1 to `max_units` single blocks over the pool `kv`, by size."""

    @torch.inference_mode()
    def __init__(
        self,
        model: BlockModel,
        attention: AttentionBackend,
        kv: KVStore,
        block_size: int,
        max_units: int,
        capture: Capture,
    ) -> None:
        """`attention` is one that can be captured. Raises CaptureError."""
        self._kv = kv
        self._graphs: dict[int, _Graph] = {}
        for size in reversed(graph_sizes(max_units)):  # the largest first: smaller ones fit into its memory
            own = attention.for_graph(size)
            assert own is not None
            attention = own
            self._graphs[size] = _captured(model, own, kv, block_size, size, capture)
        self._by_units = [min(size for size in self._graphs if size >= units) for units in range(1, max_units + 1)]

    @property
    def sizes(self) -> list[int]:
        """Units of each graph, rising."""
        return sorted(self._graphs)

    def run(self, inputs: ForwardInput, kv: KVStore) -> Tensor | None:
        """Hidden states [U, B, hidden_size] of the forward, to be used before the next one; None: none fits."""
        num_units = len(inputs.ids)
        # As many segments as units: all are single blocks.
        if kv is not self._kv or len(inputs.segments) != num_units or not 0 < num_units <= len(self._by_units):
            return None
        graph = self._graphs[self._by_units[num_units - 1]]
        graph.ids[:num_units] = inputs.ids
        graph.positions[:num_units] = positions_of(inputs)
        graph.attention.prepare(inputs, kv)
        graph.launch()
        return graph.hidden[:num_units]


def _captured(
    model: BlockModel, attention: AttentionBackend, kv: KVStore, block_size: int, size: int, capture: Capture
) -> _Graph:
    """A graph that has only padding units yet."""
    device = kv.k.device
    ids = torch.zeros((size, block_size), dtype=torch.int64, device=device)
    positions = torch.arange(block_size, device=device).repeat(size, 1)
    none = ids[:0, 0]
    attention.prepare(ForwardInput(ids[:0], none, none, (), none), kv)
    try:
        launch, hidden = capture(lambda: model(ids, positions, attention))
    except torch.OutOfMemoryError as error:
        raise CaptureError(
            f"no memory for the CUDA graph of {size} blocks; lower --cuda-graph-max-bs, --mem-fraction-static or "
            "--max-total-tokens"
        ) from error
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CaptureError(f"a forward of {size} blocks: {reason}; start with --disable-cuda-graph") from error
    return _Graph(ids, positions, attention, launch, hidden)


def graph_sizes(max_units: int) -> list[int]:
    """Numbers of units that have a graph: few enough to capture in seconds, and at most 15 units of padding."""
    sizes = [1, 2, 4, 8, *range(16, max_units, 16), max_units]
    return sorted({size for size in sizes if size <= max_units})


def cuda_capture(device: torch.device) -> Capture:
    """Captures in one memory pool for all graphs: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries set themselves up in the first forward, which cannot be captured
            launch()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = launch()
        return graph.replay, hidden

    return capture


def capture_forwards(
    runner: ModelRunner, kv: KVStore, block_size: int, settings: WorkerSettings, capture: Capture
) -> None:
    """The runner's graphs over its pool, where flags and attention backend allow them. Raises CaptureError."""
    if settings.disable_cuda_graph or settings.batch_invariant:
        return
    if not isinstance(runner, TorchModelRunner):
        log.info("cuda_graphs", graphs=0, hint="forwards of several processes are not captured")
        return
    if reason := why_not_captured(runner):
        log.info("cuda_graphs", graphs=0, hint=reason)
        return
    started_at, free_bytes = time.monotonic(), free_device_bytes(runner.device)
    max_units = settings.cuda_graph_max_bs or -(-settings.max_running_requests * 3 // 2)
    runner.graphs = ForwardGraphs(runner.model, runner.attention, kv, block_size, max_units, capture)
    log.info(
        "cuda_graphs",
        graphs=len(runner.graphs.sizes),
        largest=max_units,
        mib=(free_bytes - free_device_bytes(runner.device)) >> 20,
        capture_s=round(time.monotonic() - started_at, 2),
    )


def why_not_captured(runner: TorchModelRunner) -> str:
    """Empty where the runner's forwards can be captured."""
    if runner.attention.for_graph(1) is None:
        return "this --attention-backend cannot be captured; flashinfer can"
    if runner.model.forward_waits:
        return (
            "experts that run one after the other cannot be captured; all at once need bfloat16 and compute "
            "capability 9.0"
        )
    return ""


def free_device_bytes(device: torch.device) -> int:
    """What the device has free, 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

"""A device that only behaves like one: it takes the time of a cost model and writes made-up tokens.

Its logits make the real `step` of every algorithm take a drawn number of forwards for each block. The draw is a
function of the block before (whose hash lies in the KV pool, as keys would) and of the block's index, so a request has
the same draws whatever the batch, the mode or the worker; lost or mixed-up KV changes them.

The device has a time line of its own, as a stream on a GPU has: a forward starts when it is launched or when the one
before has ended, whichever is later, and `step` runs on the host while the forward's time passes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.architectures import CheckpointError
from common.model_folder import ModelFolder
from worker_svc.algorithms.sampling import mix64, unit_interval
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

NUM_HASHES = 1 << 24  # a block's hash is kept as float32, which holds these integers exactly
LONGEST_FORWARD_MS = 3_600_000
SURE, GUESSED = 20.0, 1.0  # logits; the others are 0


@dataclass(frozen=True)
class Profile:
    """What is simulated: `simulation` of the folder's config.json, by these names."""

    floor_ms: float  # of every forward
    denoise_row_ms: float  # for each block that denoises; a fused input is two
    prefill_token_ms: float
    # Forwards of a whole block, its commit included: a gamma distribution, rounded, drawn again outside min..max.
    forwards_shape: float
    forwards_mean: float
    forwards_min: int
    forwards_max: int

    def forward_ms(self, num_rows: int, num_prefill_tokens: int) -> float:
        """The device's time for one forward."""
        return self.floor_ms + self.denoise_row_ms * num_rows + self.prefill_token_ms * num_prefill_tokens

    def forwards_cdf(self) -> Tensor:
        """float64 [max - min + 1]: entry i is the probability of at most min + i forwards."""
        edges = torch.arange(self.forwards_min, self.forwards_max + 2, dtype=torch.float64) - 0.5
        scale = self.forwards_mean / self.forwards_shape
        below = torch.special.gammainc(torch.tensor(self.forwards_shape, dtype=torch.float64), edges / scale)
        probabilities: Tensor = (below[1:] - below[0]) / (below[-1] - below[0])
        return probabilities


def read_profile(folder: ModelFolder) -> Profile:
    """The profile of a simulated model's folder. Raises CheckpointError naming the key."""
    raw = folder.config.get("simulation")
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder.path}/config.json: simulation: must be an object")
    types = {name: int if name in ("forwards_min", "forwards_max") else float for name in Profile.__annotations__}
    if unknown := sorted(set(raw) ^ set(types)):
        raise CheckpointError(f"{folder.path}/config.json: simulation.{unknown[0]}: missing or unknown")
    values: dict[str, Any] = {}
    for name, type_ in types.items():
        value = raw[name]
        if isinstance(value, bool) or not isinstance(value, (int, type_)) or not 0 <= value < math.inf:
            raise CheckpointError(f"{folder.path}/config.json: simulation.{name}: must be a number, is {value!r}")
        values[name] = type_(value)
    profile = Profile(**values)
    if not 2 <= profile.forwards_min <= profile.forwards_max <= folder.block_size + 1:
        raise CheckpointError(
            f"{folder.path}/config.json: simulation.forwards_min, forwards_max: must rise within 2 to "
            f"{folder.block_size + 1} for blocks of {folder.block_size}"
        )
    if not (profile.forwards_shape > 0 and profile.forwards_mean > 0 and profile.forwards_cdf().isfinite().all()):
        raise CheckpointError(
            f"{folder.path}/config.json: simulation.forwards_shape, forwards_mean: must be above 0, and draws between "
            f"forwards_min and forwards_max possible"
        )
    if profile.forward_ms(1 << 16, 1 << 20) > LONGEST_FORWARD_MS:
        raise CheckpointError(
            f"{folder.path}/config.json: simulation.floor_ms, denoise_row_ms, prefill_token_ms: a forward would take "
            "longer than an hour"
        )
    return profile


class TimeLine:
    """When the device is busy. Times are seconds of `clock`.

    A sleep ends late, and a GPU would not: the lateness of the sleep that waited for a forward is taken off the launch
    of the next one, at most `overshoot_s`, what a sleep of this machine is usually late by. More than that is the
    host's own delay and stays.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], object], overshoot_s: float) -> None:
        self.end_s = 0.0
        self._clock = clock
        self._sleep = sleep
        self._overshoot_s = overshoot_s
        self._late_s = 0.0

    def launch(self, cost_s: float) -> None:
        """The next forward, which takes so long."""
        self.end_s = max(self._clock() - self._late_s, self.end_s) + cost_s

    def wait(self) -> None:
        """Return when the device has ended what was launched."""
        remaining_s = self.end_s - self._clock()
        self._late_s = 0.0
        if remaining_s > 0:
            self._sleep(remaining_s)
            self._late_s = min(max(self._clock() - self.end_s, 0.0), self._overshoot_s)


def usual_overshoot_s(
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
) -> float:
    """By how much a sleep of 1 ms ends late here, in seconds: the median of 31."""
    late = []
    for _ in range(31):
        started_at = clock()
        sleep(0.001)
        late.append(clock() - started_at - 0.001)
    return max(statistics.median(late), 0.0)


class SimulatedRunner:
    """A ModelRunner without a model. Prompts shorter than a block have equal draws in their first block."""

    num_layers, num_kv_heads, head_dim = 1, 1, 1
    dtype, device = torch.float32, torch.device("cpu")
    is_asynchronous = True

    def __init__(self, folder: ModelFolder, time_line: TimeLine) -> None:
        """Raises CheckpointError for a folder without a sound profile."""
        self.profile = read_profile(folder)
        self.vocab_size = folder.vocab_size
        self.time_line = time_line
        self._mask_token_id = folder.mask_token_id
        self._cdf = self.profile.forwards_cdf()
        specials = {folder.mask_token_id, *folder.stop_token_ids}
        self._texts = torch.tensor([token for token in range(folder.num_tokens) if token not in specials])
        self._busy_ms = 0.0

    @torch.inference_mode()
    def forward(self, inputs: ForwardInput, kv: KVStore) -> Tensor:
        """See `ModelRunner.forward`. Returns at once; the time passes in `finish`."""
        num_prefill_units = sum([segment.num_units for segment in inputs.segments if segment.is_prefill])
        num_units, block_size = inputs.ids.shape
        self._busy_ms = self.profile.forward_ms(num_units - num_prefill_units, num_prefill_units * block_size)
        self.time_line.launch(self._busy_ms / 1000)
        self._write_hashes(inputs, kv)
        rows = inputs.logits_units
        return self._logits(inputs.ids[rows], self._seeds(inputs.slots[rows], inputs.block_index[rows], block_size, kv))

    def finish(self) -> float:
        """See `ModelRunner.finish`."""
        self.time_line.wait()
        return self._busy_ms

    def forwards_of(self, seeds: Tensor) -> Tensor:
        """int64 [R]: the drawn forwards of whole blocks, their commit included."""
        return self.profile.forwards_min + torch.searchsorted(self._cdf, unit_interval(seeds), right=True)

    def _write_hashes(self, inputs: ForwardInput, kv: KVStore) -> None:
        block_size = inputs.ids.shape[1]
        hashes = (mix64(inputs.ids + (torch.arange(block_size) << 32)).sum(dim=1) >> 8) % NUM_HASHES
        pages, offsets = _places(inputs.slots, inputs.block_index, block_size, kv)
        kv.k[0, pages, offsets, 0, 0] = hashes.to(kv.k.dtype)

    def _seeds(self, slots: Tensor, block_index: Tensor, block_size: int, kv: KVStore) -> Tensor:
        """int64 [R]: random bits that belong to each row's block."""
        pages, offsets = _places(slots, (block_index - 1).clamp(min=0), block_size, kv)
        before = torch.where(block_index > 0, kv.k[0, pages, offsets, 0, 0].to(torch.int64), 0)
        return mix64(before * (1 << 24) + block_index + 1)

    def _logits(self, ids: Tensor, seeds: Tensor) -> Tensor:
        """float32 [R, B, V]: sure of what stands there, and of the masked positions whose turn is this step.

        Position p of a block of B is filled in step p * S // B of S = drawn forwards - 1.
        """
        num_rows, block_size = ids.shape
        positions = torch.arange(block_size)
        turn = positions * (self.forwards_of(seeds) - 1)[:, None] // block_size
        masked = ids == self._mask_token_id
        now = torch.where(masked, turn, block_size).amin(dim=1, keepdim=True)
        drawn = self._texts[(mix64(seeds[:, None] + positions) >> 8) % len(self._texts)]
        tokens = torch.where(masked, drawn, ids)
        logits = torch.zeros(num_rows, block_size, self.vocab_size)
        values = torch.where(masked & (turn > now), GUESSED, SURE)
        return logits.scatter_(2, tokens[:, :, None], values[:, :, None])


def _places(slots: Tensor, block_index: Tensor, block_size: int, kv: KVStore) -> tuple[Tensor, Tensor]:
    """Page and offset of the first position of each block, int64 [R] each."""
    first = block_index * block_size
    return kv.page_table[slots, first // kv.page_size], first % kv.page_size

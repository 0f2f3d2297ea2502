"""SDAR's remasking strategies with a schedule: step k of a block sets a number of positions that the schedule says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from worker_svc.algorithms.base import DllmAlgorithm, Param, StepBatch
from worker_svc.algorithms.sampling import candidates

# 0 = as many steps as the block has positions, one a step.
DENOISING_STEPS = Param("denoising_steps", default=0, min_value=0, max_value=1024, is_integer=True)


class ScheduledAlgorithm(DllmAlgorithm):
    """The positions of a block are split evenly over `denoising_steps`; the first steps take the remainder."""

    edits = False
    params: ClassVar[tuple[Param, ...]] = (DENOISING_STEPS,)

    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        done = ~batch.masked.any(dim=1)
        tokens, confidence = candidates(batch, logits)
        fill = self.positions_to_fill(batch, confidence, scheduled_count(batch))
        batch.ids.copy_(torch.where(fill, tokens, batch.ids))
        batch.masked &= ~fill
        return done

    def positions_to_fill(self, batch: StepBatch, confidence: Tensor, count: Tensor) -> Tensor:
        """bool [R, B], of masked positions; `confidence` float32 [R, B], `count` int64 [R]."""
        raise NotImplementedError

    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        return block_size + 1


class LowConfidenceStatic(ScheduledAlgorithm):
    """`low_confidence_static`: the most confident masked positions."""

    name = "LowConfidenceStatic"

    def positions_to_fill(self, batch: StepBatch, confidence: Tensor, count: Tensor) -> Tensor:
        return most_confident(batch.masked, confidence, count)


class LowConfidenceDynamic(ScheduledAlgorithm):
    """`low_confidence_dynamic`: all above the threshold if they are as many as scheduled, else the most confident."""

    name = "LowConfidenceDynamic"
    params = (Param("threshold", default=0.85, min_value=0, max_value=1), DENOISING_STEPS)

    def positions_to_fill(self, batch: StepBatch, confidence: Tensor, count: Tensor) -> Tensor:
        hits = batch.masked & (confidence > batch.params["threshold"][:, None])
        enough = hits.sum(dim=1) >= count
        return torch.where(enough[:, None], hits, most_confident(batch.masked, confidence, count))


class Sequential(ScheduledAlgorithm):
    """`sequential`: the first masked positions from the left."""

    name = "Sequential"

    def positions_to_fill(self, batch: StepBatch, confidence: Tensor, count: Tensor) -> Tensor:
        return batch.masked & (batch.masked.cumsum(dim=1) <= count[:, None])


def scheduled_count(batch: StepBatch) -> Tensor:
    """int64 [R], at least 1: what the schedule gives to this step of each row."""
    size = batch.ids.shape[1]
    steps = batch.params["denoising_steps"].to(torch.int64)
    steps = torch.where(steps > 0, steps, size)
    return (size // steps + (batch.step_index < size % steps)).clamp(min=1)


def most_confident(masked: Tensor, confidence: Tensor, count: Tensor) -> Tensor:
    """bool [R, B]: the `count` [R] masked positions of highest confidence, all where there are fewer; of equals the
    lower one."""
    order = torch.where(masked, confidence, -1.0).argsort(dim=1, descending=True, stable=True)
    return masked & (order.argsort(dim=1) < count[:, None])

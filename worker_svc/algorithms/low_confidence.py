"""LowConfidence: set what the model is sure of, else the one position it is surest of. Set tokens stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.algorithms.base import DllmAlgorithm, Param, StepBatch
from worker_svc.algorithms.sampling import candidates


class LowConfidence(DllmAlgorithm):
    """Decoding as published for LLaDA2.0, at least one token a step."""

    name = "LowConfidence"
    edits = False
    params = (Param("threshold", default=0.95, min_value=0, max_value=1),)

    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        done = ~batch.masked.any(dim=1)
        tokens, confidence = candidates(batch, logits)
        fill = positions_to_fill(batch.masked, confidence, batch.params["threshold"])
        batch.ids.copy_(torch.where(fill, tokens, batch.ids))
        batch.masked &= ~fill
        return done

    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        return block_size + 1


def positions_to_fill(masked: Tensor, confidence: Tensor, threshold: Tensor) -> Tensor:
    """bool [R, B]: the masked positions with confidence above threshold [R]; if a row has none, its most confident
    masked position, the lowest among equals."""
    hits = masked & (confidence > threshold[:, None])
    best = torch.where(masked, confidence, -1.0).argmax(dim=1, keepdim=True)
    is_best = torch.arange(masked.shape[1], device=masked.device) == best
    return hits | (masked & is_best & ~hits.any(dim=1, keepdim=True))

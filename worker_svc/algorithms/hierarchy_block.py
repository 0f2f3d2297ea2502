"""HierarchyBlock: sub-blocks from left to right, in each what the model is sure of, else the surest position."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.algorithms.base import DllmAlgorithm, Param, StepBatch
from worker_svc.algorithms.low_confidence import positions_to_fill
from worker_svc.algorithms.sampling import candidates


class HierarchyBlock(DllmAlgorithm):
    """Decoding as published for Fast-dLLM v2: only the first sub-block with a mask is written in a step."""

    name = "HierarchyBlock"
    edits = False
    params = (
        Param("threshold", default=0.9, min_value=0, max_value=1),
        Param("sub_block_size", default=8, min_value=1, max_value=1024, is_integer=True),
    )

    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        done = ~batch.masked.any(dim=1)
        tokens, confidence = candidates(batch, logits)
        size = batch.params["sub_block_size"].to(torch.int64)[:, None]
        sub_block = torch.arange(batch.ids.shape[1], device=batch.ids.device) // size
        first = batch.masked.to(torch.int8).argmax(dim=1, keepdim=True)  # the first masked position; 0 without one
        now = batch.masked & (sub_block == sub_block.gather(1, first))
        fill = positions_to_fill(now, confidence, batch.params["threshold"])
        batch.ids.copy_(torch.where(fill, tokens, batch.ids))
        batch.masked &= ~fill
        return done

    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        return block_size + 1

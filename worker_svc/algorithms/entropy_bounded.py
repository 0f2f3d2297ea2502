"""EntropyBounded: set what the model is least uncertain of, as long as the uncertainty together stays small."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.algorithms.base import DllmAlgorithm, Param, StepBatch
from worker_svc.algorithms.sampling import candidates, entropies


class EntropyBounded(DllmAlgorithm):
    """Masked positions in order of growing entropy while their sum stays below `entropy_bound` (nats), at least one.

    The entropy is that of the model's distribution without the mask token, before temperature and filters.
    """

    name = "EntropyBounded"
    edits = False
    params = (Param("entropy_bound", default=0.35, min_value=0, max_value=1000),)

    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        done = ~batch.masked.any(dim=1)
        entropy = torch.where(batch.masked, entropies(logits, batch.mask_token_id), torch.inf)
        tokens, _ = candidates(batch, logits)
        ordered, order = entropy.sort(dim=1, stable=True)
        within = ordered.cumsum(dim=1) < batch.params["entropy_bound"][:, None]
        within[:, 0] = True
        fill = batch.masked & torch.zeros_like(batch.masked).scatter_(1, order, within)
        batch.ids.copy_(torch.where(fill, tokens, batch.ids))
        batch.masked &= ~fill
        return done

    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        return block_size + 1

"""What is kept of each token of a block, on request: the step that unmasked its position, and its log probability.

The log probability is the log-softmax of the logits as the model gave them, without the algorithm's suppressions,
penalties, temperature and filters, in the step that last set the token: it cleared the mask, or an edit changed it.

The values live in slot-indexed tensors beside the rest of a row (`SlotColumns`). They mean something at positions that
a step has set, for rows that ask; a batch without such a row computes and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.algorithms.base import StepBatch
from worker_svc.rows import Row, SlotColumns


@dataclass(frozen=True)
class Recorder:
    """Keeps the records of a group of rows, for as long as the batch stands."""

    logprob_places: Tensor | None  # int64 [L], the rows of the group that ask for log probabilities, if any
    wants_steps: bool  # some row does

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> Recorder:
        places = [place for place, row in enumerate(rows) if row.wants_logprobs]
        return cls(
            logprob_places=torch.tensor(places, device=device) if places else None,
            wants_steps=any(row.wants_first_unmask_steps for row in rows),
        )

    def raw_logits(self, logits: Tensor) -> Tensor | None:
        """float32 [L, B, V], before a step overwrites `logits` [R', B, V]: those of the rows that ask."""
        return None if self.logprob_places is None else logits[self.logprob_places]

    def record(self, columns: SlotColumns, slots: Tensor, block: StepBatch, raw: Tensor | None, kept: Tensor) -> None:
        """After a step and before `columns` has its result: `block` against what still stands in its `slots` [R'].

        `kept` bool [R'] are the rows whose step counts; `raw` is what `raw_logits` gave, overwritten here. A block
        begins with zeros.
        """
        if self.wants_steps:
            steps, was_masked = columns.first_unmask_steps, columns.masked[slots]
            is_new = was_masked & ~block.masked & kept[:, None]
            step_index = block.step_index[:, None]
            steps[slots] = torch.where(is_new, step_index, torch.where(step_index > 0, steps[slots], 0))
        if raw is not None:
            places = self.logprob_places
            own, ids, masked = slots[places], block.ids[places], block.masked[places]
            is_set = ~masked & (columns.masked[own] | (ids != columns.ids[own])) & kept[places, None]
            last = torch.where(block.step_index[places, None] > 0, columns.logprobs[own], 0.0)
            columns.logprobs[own] = torch.where(is_set, log_probabilities(raw, ids), last)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """float32 [L, B]: the log-softmax of `logits` float32 [L, B, V], which are overwritten, at `ids` int64 [L, B].

    The sum is float64 so that its order, which changes with the batch, does not show in the result.
    """
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    chosen = logits.gather(-1, ids[:, :, None]).squeeze(-1)
    return (chosen - logits.exp_().sum(dim=-1, dtype=torch.float64).log()).to(torch.float32)


@dataclass(frozen=True)
class RecordCopies:
    """The records of a round's resident rows as they were at its end."""

    first_unmask_steps: Tensor | None  # int64 [resident rows, B]; None if no row asks
    logprobs: Tensor | None  # float32, likewise
    wants_steps: list[bool]
    wants_logprobs: list[bool]

    @classmethod
    def of(cls, rows: list[Row], slots: Tensor, columns: SlotColumns) -> RecordCopies:
        """One gather by `slots` int64 [resident rows] for each kind that a row asks for."""
        wants_steps = [row.wants_first_unmask_steps for row in rows]
        wants_logprobs = [row.wants_logprobs for row in rows]
        return cls(
            first_unmask_steps=columns.first_unmask_steps.index_select(0, slots) if any(wants_steps) else None,
            logprobs=columns.logprobs.index_select(0, slots) if any(wants_logprobs) else None,
            wants_steps=wants_steps,
            wants_logprobs=wants_logprobs,
        )

    def on_host(self, masked: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Steps and log probabilities, little-endian [resident rows, B]; without columns where no row asks.

        0 for rows that do not ask, and where `masked` bool [resident rows, B] is set.
        """
        steps = _where_asked(self.first_unmask_steps, self.wants_steps, masked)
        return steps.astype("<i4"), _where_asked(self.logprobs, self.wants_logprobs, masked).astype("<f4")


def _where_asked(values: Tensor | None, wants: list[bool], masked: npt.NDArray[np.bool_]) -> npt.NDArray[np.generic]:
    if values is None:
        return np.zeros((len(wants), 0))
    return np.where(np.array(wants)[:, None] & ~masked, values.cpu().numpy(), 0)

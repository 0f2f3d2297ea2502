"""What is kept of each token of a block, on request: the step that unmasked its position, and its log probability.

The log probability is the log-softmax of the logits as the model gave them, without the algorithm's suppressions,
penalties, temperature and filters, in the step that last set the token: it cleared the mask, or an edit changed it.

The values live in slot-indexed tensors beside the rest of a row (`SlotColumns`). They mean something at positions that
a step has set, for rows that ask; a batch without such a row computes and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.algorithms.base import StepBatch
from worker_svc.algorithms.sampling import row_groups
from worker_svc.host_copies import upload
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
            logprob_places=upload(places, device) if places else None,
            wants_steps=any(row.wants_first_unmask_steps for row in rows),
        )

    def raw_logits(self, logits: Tensor) -> Tensor | None:
        """[L, B, V], before a step overwrites `logits` [R', B, V]: those of the rows that ask."""
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
    """float32 [L, B]: the log-softmax of `logits` [L, B, V], which may be overwritten, at `ids` int64 [L, B].

    The sum is float64 so that its order, which changes with the batch, does not show in the result.
    """
    result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for rows, group in row_groups(logits):
        group.sub_(group.amax(dim=-1, keepdim=True))
        chosen = group.gather(-1, ids[rows, :, None]).squeeze(-1)
        result[rows] = (chosen - group.exp_().sum(dim=-1, dtype=torch.float64).log()).to(torch.float32)
    return result


def keep_committed(rows: list[Row], columns: SlotColumns) -> None:
    """Before the next blocks of `rows` begin in the forward that commits these: put aside what will be reported."""
    asking = [row.slot for row in rows if row.wants_first_unmask_steps or row.wants_logprobs]
    if asking:
        slots = upload(asking, columns.device)
        columns.committed_first_unmask_steps[slots] = columns.first_unmask_steps[slots]
        columns.committed_logprobs[slots] = columns.logprobs[slots]


class RecordCopies(NamedTuple):
    """The records of all slots as they were at a round's end; None where none of its rows wants the kind."""

    first_unmask_steps: tuple[Tensor, Tensor] | None  # int64 [slots, B]: of the blocks, and of those before
    logprobs: tuple[Tensor, Tensor] | None  # float32, likewise

    def columns(
        self, done: Sequence[Row], was_committed: NDArray[np.bool_], open_: Sequence[Row], masked: NDArray[np.int64]
    ) -> dict[str, bytes]:
        """The columns of a reply by name, for its done and open rows; 0 for rows that do not want them and where the
        mask is (`masked` [slots, B]). `was_committed`: the done block is the one before. Waits for the device."""
        result: dict[str, bytes] = {}
        for kind, dtype, values in (
            ("first_unmask_steps", "<i4", self.first_unmask_steps),
            ("logprobs", "<f4", self.logprobs),
        ):
            for part, rows, is_before in (
                ("done", done, was_committed),
                ("block", open_, np.zeros(len(open_), dtype=bool)),
            ):
                wants = np.array([getattr(row, f"wants_{kind}") for row in rows], dtype=bool)
                if values is None or not wants.any():
                    continue
                now, before = (value.cpu().numpy() for value in values)
                slots = np.array([row.slot for row in rows])
                own = np.where(is_before[:, None], before[slots], np.where(masked[slots] != 0, 0, now[slots]))
                result[f"{part}_{kind}"] = np.where(wants[:, None], own, 0).astype(dtype).tobytes()
        return result


def copy_records(rows: Sequence[Row], columns: SlotColumns) -> RecordCopies:
    """The records of a round's rows as they are now."""
    steps = (columns.first_unmask_steps, columns.committed_first_unmask_steps)
    logprobs = (columns.logprobs, columns.committed_logprobs)
    return RecordCopies(
        (steps[0].clone(), steps[1].clone()) if any(row.wants_first_unmask_steps for row in rows) else None,
        (logprobs[0].clone(), logprobs[1].clone()) if any(row.wants_logprobs for row in rows) else None,
    )

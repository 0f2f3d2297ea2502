"""The rows of a reply: copied when their round is over, made into columns when there is time.

`copy_rows` is all that must happen before the next round changes the rows: one gather by slot, on the device. The rest,
`RowCopies.build`, is host work that may run while the device computes the next forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import ALGORITHMS
from worker_svc.rounds import Round, RoundRow
from worker_svc.rows import Phase, Row, SlotColumns


@dataclass(frozen=True)
class RowCopies:
    """The rows of a round as they were at its end; lists have an entry a row, also for one without a place here."""

    entries: list[RoundRow]
    phases: list[Phase | None]
    block_indexes: list[int]
    prefilled_tokens: list[int]
    forwards: list[int]
    algorithms: list[str]  # of the resident rows only, as the tensors
    table: Tensor  # int64 [resident rows, 2B + 1]: ids, mask bits, step count
    states: dict[str, dict[str, Tensor]]  # by algorithm, each [resident rows, ...]

    def build(self) -> pb.RowReplies:
        """The columns of the reply."""
        size = self.table.shape[1] // 2
        host = self.table.cpu().numpy()
        all_ids = host[:, :size].astype("<i4")
        all_masks = np.packbits(host[:, size : 2 * size].astype(bool), axis=1, bitorder="little")
        resident = [(phase, index) for phase, index in zip(self.phases, self.block_indexes, strict=True) if phase]
        done = [place for place, (phase, _) in enumerate(resident) if phase is Phase.DONE]
        open_ = [place for place, (phase, _) in enumerate(resident) if phase is Phase.DENOISE]
        return pb.RowReplies(
            statuses=[entry.status for entry in self.entries],
            accept_lengths=[size * (phase is Phase.DONE) for phase in self.phases],
            done_block_indexes=[resident[place][1] for place in done],
            done_ids=all_ids[done].tobytes(),
            has_block=[phase is Phase.DENOISE for phase in self.phases],
            block_indexes=[resident[place][1] for place in open_],
            block_ids=all_ids[open_].tobytes(),
            block_masks=all_masks[open_].tobytes(),
            step_counts=host[open_, -1].tolist(),
            algo_states=[self._state(place) for place in open_] if any(self.states.values()) else [b""] * len(open_),
            forwards=self.forwards,
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=[entry.cached_tokens for entry in self.entries],
            end_reasons=[entry.end_reason for entry in self.entries],
            end_positions=[entry.end_position for entry in self.entries],
            errors={number: entry.error for number, entry in enumerate(self.entries) if entry.error},
        )

    def _state(self, place: int) -> bytes:
        """The state of a row's algorithm as it travels."""
        name = self.algorithms[place]
        state = {key: column[place, None] for key, column in self.states[name].items()}
        return ALGORITHMS[name].encode_state(state) if state else b""


def copy_rows(round_: Round, columns: SlotColumns) -> RowCopies:
    """The rows as they are now. Sets the status of those that prefill, and the end of those whose request ends."""
    size = columns.block_size
    rows = [entry.row for entry in round_.rows]
    for entry in round_.rows:
        if entry.row is None:
            continue
        if entry.row.phase is Phase.PREFILL:
            entry.status = pb.ROW_STATUS_PREFILLING
        elif entry.ends:
            _end(entry, entry.row, columns.ids[entry.row.slot].tolist())
    resident = [row for row in rows if row is not None]
    slots = torch.tensor([row.slot for row in resident], dtype=torch.int64).to(columns.device)
    algorithms = [row.algorithm for row in resident]
    return RowCopies(
        entries=round_.rows,
        phases=[row.phase if row is not None else None for row in rows],
        block_indexes=[row.block_index if row is not None else 0 for row in rows],
        prefilled_tokens=[row.prefilled_blocks * size if row is not None else 0 for row in rows],
        forwards=[_forwards(entry, round_) for entry in round_.rows],
        algorithms=algorithms,
        table=torch.cat(
            [
                columns.ids.index_select(0, slots),
                columns.masked.index_select(0, slots),
                columns.step_index.index_select(0, slots)[:, None],
            ],
            dim=1,
        ),
        states={
            name: {key: column.index_select(0, slots) for key, column in columns.states[name].items()}
            for name in set(algorithms)
        },
    )


def _forwards(entry: RoundRow, round_: Round) -> int:
    """Denoise forwards of the row in this round; waiting and prefill not counted."""
    if entry.forwards is not None:
        return entry.forwards
    if entry.row is None or entry.row.phase is Phase.PREFILL:
        return 0
    return round_.work.forwards - entry.joined_after


def _end(entry: RoundRow, row: Row, ids: list[int]) -> None:
    """Where the request ends inside its done block: at the first stop token, or with the last allowed token."""
    size = len(ids)
    first = row.block_index * size
    entry.status = pb.ROW_STATUS_ENDED
    entry.end_reason, entry.end_position = pb.END_REASON_LIMIT, row.limit_position - 1
    for position in range(max(first, row.prompt_length), min(first + size, row.limit_position)):
        if ids[position - first] in row.stop_token_ids:
            entry.end_reason, entry.end_position = pb.END_REASON_STOP_TOKEN, position
            return

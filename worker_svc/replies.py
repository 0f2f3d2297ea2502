"""The rows of a reply: copied when their round is over, made into columns when there is time.

`copy_rows` is all that must happen before the next round changes the rows: the columns of all slots, copied on the
device, and what the host knows of each row. The rest, `RowCopies.build`, is host work that may run while the device
computes the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import ALGORITHMS
from worker_svc.host_copies import ForwardBypass
from worker_svc.records import RecordCopies, copy_records
from worker_svc.rounds import Round, RoundRow
from worker_svc.rows import Phase, Row, SlotColumns


class RowCopy(NamedTuple):
    """A line of the round that has a row, and what that was at the round's end."""

    entry: RoundRow
    row: Row
    phase: Phase
    block_index: int
    prefilled_blocks: int


@dataclass(frozen=True)
class RowCopies:
    """The rows of a round as they were at its end. A row has a done block, an open one (not done), both or none."""

    round_: Round
    rows: list[tuple[RoundRow, Row, Phase, int, int]]  # a RowCopy each; it costs less as a tuple
    untold: frozenset[Row]  # rows of whose open block nothing is said
    table: Tensor  # int64 [slots, 3B + 1]: ids, ids of the block before, mask bits, step count
    states: dict[str, dict[str, Tensor]]  # by algorithm, each [slots, ...]; only of algorithms with a state
    records: RecordCopies
    bypass: ForwardBypass

    def build(self) -> pb.RowReplies:
        """The columns of the reply; waits for no forward."""
        with self.bypass.copies():
            return self._build()

    def _build(self) -> pb.RowReplies:
        entries, size = self.round_.rows, self.table.shape[1] // 3
        with_row = list(map(RowCopy._make, self.rows))
        of_line = {id(row.entry): row for row in with_row}
        rows = [of_line.get(id(entry)) for entry in entries]
        done = [row for row in with_row if row.entry.committed_block is not None or row.phase is Phase.DONE]
        open_ = [
            row
            for row in with_row
            if row.row not in self.untold and (row.entry.committed_block is not None or row.phase is Phase.DENOISE)
        ]
        is_done, is_open = {id(row.entry) for row in done}, {id(row.entry) for row in open_}
        was_committed = np.array([row.entry.committed_block is not None for row in done], dtype=bool)
        done_slots = np.array([row.row.slot for row in done], dtype=np.int64)
        open_slots = np.array([row.row.slot for row in open_], dtype=np.int64)
        host = self.table.cpu().numpy()
        ids, before, masked = host[:, :size], host[:, size : 2 * size], host[:, 2 * size : 3 * size]
        done_ids = np.where(was_committed[:, None], before[done_slots], ids[done_slots])
        return pb.RowReplies(
            statuses=[self._status(entry, row) for entry, row in zip(entries, rows, strict=True)],
            accept_lengths=[size if id(entry) in is_done else 0 for entry in entries],
            done_block_indexes=[
                row.block_index if row.entry.committed_block is None else row.entry.committed_block for row in done
            ],
            done_ids=done_ids.astype("<i4").tobytes(),
            has_block=[id(entry) in is_open for entry in entries],
            block_indexes=[row.block_index for row in open_],
            block_ids=ids[open_slots].astype("<i4").tobytes(),
            block_masks=np.packbits(masked[open_slots].astype(bool), axis=1, bitorder="little").tobytes(),
            step_counts=host[open_slots, -1].tolist(),
            algo_states=[self._state(row.row) for row in open_],
            forwards=[self._forwards(entry, row) for entry, row in zip(entries, rows, strict=True)],
            prefilled_tokens=[0 if row is None else row.prefilled_blocks * size for row in rows],
            cached_tokens=[entry.cached_tokens for entry in entries],
            forwards_before=[entry.joined_after for entry in entries] if self.round_.request.want_forward_times else (),
            end_reasons=[entry.end_reason for entry in entries],
            end_positions=[entry.end_position for entry in entries],
            errors={number: entry.error for number, entry in enumerate(entries) if entry.error},
            **self.records.columns([row.row for row in done], was_committed, [row.row for row in open_], masked),
        )

    @staticmethod
    def _status(entry: RoundRow, row: RowCopy | None) -> pb.RowStatus:
        prefills = row is not None and row.phase is Phase.PREFILL
        return pb.ROW_STATUS_PREFILLING if prefills else entry.status

    def _forwards(self, entry: RoundRow, row: RowCopy | None) -> int:
        """Denoise forwards of the row in this round; waiting and prefill not counted."""
        if entry.forwards is not None:
            return entry.forwards
        if row is None or row.phase is Phase.PREFILL:
            return 0
        return self.round_.work.forwards - entry.joined_after

    def _state(self, row: Row) -> bytes:
        """The state of a row's algorithm as it travels."""
        if row.algorithm not in self.states:
            return b""
        state = {key: column[row.slot, None] for key, column in self.states[row.algorithm].items()}
        return ALGORITHMS[row.algorithm].encode_state(state)


def copy_rows(round_: Round, columns: SlotColumns, untold: Iterable[Row] = ()) -> RowCopies:
    """The rows as they are now; nothing of the blocks of `untold`, which began after the round's end."""
    rows = [
        (entry, row, row.phase, row.block_index, row.prefilled_blocks)
        for entry in round_.rows
        if (row := entry.row) is not None
    ]
    own = [row for _, row, _, _, _ in rows]
    with columns.bypass.copies():
        return RowCopies(
            round_=round_,
            rows=rows,
            untold=frozenset(untold),
            table=torch.cat((columns.ids, columns.committed_ids, columns.masked, columns.step_index[:, None]), dim=1),
            states={
                name: {key: column.clone() for key, column in columns.states[name].items()}
                for name in {row.algorithm for row in own}
                if columns.states[name]
            },
            records=copy_records(own, columns),
            bypass=columns.bypass,
        )

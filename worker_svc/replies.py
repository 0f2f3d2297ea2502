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
from worker_svc.records import RecordCopies, copy_records, pack_records
from worker_svc.rounds import Round, RoundRow
from worker_svc.rows import Phase, Row, SlotColumns


@dataclass(frozen=True)
class RowCopies:
    """The rows of a round as they were at its end. A row has a done block, an open one (not done), both or none."""

    entries: list[RoundRow]
    prefilled_tokens: list[int]  # for each entry, as the next three
    forwards: list[int]
    is_done: list[bool]
    is_open: list[bool]
    done_blocks: list[int]  # index of each done block
    done_ids: Tensor  # int64 [done blocks, B]
    open_rows: list[tuple[str, int]]  # algorithm and block index of each open block
    table: Tensor  # int64 [open blocks, 2B + 1]: ids, mask bits, step count
    states: dict[str, dict[str, Tensor]]  # by algorithm, each [open blocks, ...]; only of algorithms with a state
    records: RecordCopies

    def build(self) -> pb.RowReplies:
        """The columns of the reply."""
        size = self.done_ids.shape[1]
        host = self.table.cpu().numpy()
        masks = np.packbits(host[:, size : 2 * size].astype(bool), axis=1, bitorder="little")
        return pb.RowReplies(
            statuses=[entry.status for entry in self.entries],
            accept_lengths=[size * is_done for is_done in self.is_done],
            done_block_indexes=self.done_blocks,
            done_ids=self.done_ids.cpu().numpy().astype("<i4").tobytes(),
            has_block=self.is_open,
            block_indexes=[block_index for _, block_index in self.open_rows],
            block_ids=host[:, :size].astype("<i4").tobytes(),
            block_masks=masks.tobytes(),
            step_counts=host[:, -1].tolist(),
            algo_states=[self._state(place, name) for place, (name, _) in enumerate(self.open_rows)],
            forwards=self.forwards,
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=[0] * len(self.entries),
            end_reasons=[entry.end_reason for entry in self.entries],
            end_positions=[entry.end_position for entry in self.entries],
            done_first_unmask_steps=pack_records(self.records.done_first_unmask_steps, "<i4"),
            done_logprobs=pack_records(self.records.done_logprobs, "<f4"),
            block_first_unmask_steps=pack_records(self.records.open_first_unmask_steps, "<i4"),
            block_logprobs=pack_records(self.records.open_logprobs, "<f4"),
            errors={number: entry.error for number, entry in enumerate(self.entries) if entry.error},
        )

    def _state(self, place: int, name: str) -> bytes:
        """The state of a row's algorithm as it travels."""
        if name not in self.states:
            return b""
        state = {key: column[place, None] for key, column in self.states[name].items()}
        return ALGORITHMS[name].encode_state(state)


def copy_rows(round_: Round, columns: SlotColumns) -> RowCopies:
    """The rows as they are now. Sets the status of those that prefill, and the end of those whose request ends."""
    size, device = columns.block_size, columns.device
    is_done, is_open, prefilled_tokens, done_blocks, was_committed = [], [], [], [], []
    done_rows: list[Row] = []
    open_rows: list[Row] = []
    for entry in round_.rows:
        row = entry.row
        has_commit = row is not None and entry.committed_block is not None
        is_done.append(row is not None and (has_commit or row.phase is Phase.DONE))
        is_open.append(row is not None and (has_commit or row.phase is Phase.DENOISE))
        prefilled_tokens.append(row.prefilled_blocks * size if row is not None else 0)
        if row is None:
            continue
        if row.phase is Phase.PREFILL:
            entry.status = pb.ROW_STATUS_PREFILLING
        elif entry.ends:
            _end(entry, row, columns.ids[row.slot].tolist())
        if is_done[-1]:
            done_blocks.append(row.block_index if entry.committed_block is None else entry.committed_block)
            done_rows.append(row)
            was_committed.append(has_commit)
        if is_open[-1]:
            open_rows.append(row)
    done = torch.tensor([row.slot for row in done_rows], dtype=torch.int64, device=device)
    done_ids = columns.ids.index_select(0, done)
    if any(was_committed):
        committed_ids = columns.committed_ids.index_select(0, done)
        done_ids = torch.where(torch.tensor(was_committed, device=device)[:, None], committed_ids, done_ids)
    slots = torch.tensor([row.slot for row in open_rows], dtype=torch.int64, device=device)
    block = (columns.ids, columns.masked, columns.step_index[:, None])
    return RowCopies(
        entries=round_.rows,
        prefilled_tokens=prefilled_tokens,
        forwards=[_forwards(entry, round_) for entry in round_.rows],
        is_done=is_done,
        is_open=is_open,
        done_blocks=done_blocks,
        done_ids=done_ids,
        open_rows=[(row.algorithm, row.block_index) for row in open_rows],
        table=torch.cat([column.index_select(0, slots) for column in block], dim=1),
        states={
            name: {key: column.index_select(0, slots) for key, column in columns.states[name].items()}
            for name in {row.algorithm for row in open_rows}
            if columns.states[name]
        },
        records=copy_records(done_rows, was_committed, open_rows, columns),
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

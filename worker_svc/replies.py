"""The rows of a reply, as columns: one gather by slot and one copy to the host for all of them."""

from __future__ import annotations

import numpy as np
import torch

from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import ALGORITHMS
from worker_svc.rounds import Round, RoundRow
from worker_svc.rows import Phase, Row, SlotColumns


def build_rows(round_: Round, columns: SlotColumns) -> pb.RowReplies:
    """What each row of the round has become. Sets the end reason of rows whose done block ends the request."""
    size = columns.block_size
    slots = torch.tensor([entry.row.slot for entry in round_.rows if entry.row is not None], dtype=torch.int64)
    slots = slots.to(columns.device)
    table = torch.cat([columns.ids[slots], columns.masked[slots], columns.step_index[slots, None]], dim=1)
    host = table.cpu().numpy()
    all_ids = host[:, :size].astype("<i4")
    all_masks = np.packbits(host[:, size : 2 * size].astype(bool), axis=1, bitorder="little")
    replies = pb.RowReplies()
    done_ids, block_ids, block_masks = [], [], []
    place = -1
    for number, entry in enumerate(round_.rows):
        row = entry.row
        accept_length = prefilled_tokens = 0
        has_block = False
        if row is not None:
            place += 1
            prefilled_tokens = row.prefilled_blocks * size
            if row.phase is Phase.DONE:
                accept_length = size
                replies.done_block_indexes.append(row.block_index)
                done_ids.append(all_ids[place].tobytes())
                if entry.ends:
                    _end(entry, row, all_ids[place], size)
            elif row.phase is Phase.PREFILL:
                entry.status = pb.ROW_STATUS_PREFILLING
            else:
                has_block = True
                replies.block_indexes.append(row.block_index)
                block_ids.append(all_ids[place].tobytes())
                block_masks.append(all_masks[place].tobytes())
                replies.step_counts.append(int(host[place, -1]))
                state = {key: column[row.slot, None] for key, column in columns.states[row.algorithm].items()}
                replies.algo_states.append(ALGORITHMS[row.algorithm].encode_state(state) if state else b"")
        replies.statuses.append(entry.status)
        replies.accept_lengths.append(accept_length)
        replies.has_block.append(has_block)
        replies.forwards.append(_forwards(entry, round_))
        replies.prefilled_tokens.append(prefilled_tokens)
        replies.cached_tokens.append(0)
        replies.end_reasons.append(entry.end_reason)
        replies.end_positions.append(entry.end_position)
        if entry.error:
            replies.errors[number] = entry.error
    replies.done_ids = b"".join(done_ids)
    replies.block_ids = b"".join(block_ids)
    replies.block_masks = b"".join(block_masks)
    return replies


def _forwards(entry: RoundRow, round_: Round) -> int:
    """Denoise forwards of the row in this round; waiting and prefill not counted."""
    if entry.forwards is not None:
        return entry.forwards
    if entry.row is None or entry.row.phase is Phase.PREFILL:
        return 0
    return round_.work.forwards - entry.joined_after


def _end(entry: RoundRow, row: Row, ids: np.ndarray, size: int) -> None:
    """Where the request ends inside its done block: at the first stop token, or with the last allowed token."""
    first = row.block_index * size
    entry.status = pb.ROW_STATUS_ENDED
    entry.end_reason, entry.end_position = pb.END_REASON_LIMIT, row.limit_position - 1
    for position in range(max(first, row.prompt_length), min(first + size, row.limit_position)):
        if int(ids[position - first]) in row.stop_token_ids:
            entry.end_reason, entry.end_position = pb.END_REASON_STOP_TOKEN, position
            return

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
    done_places, block_places = [], []
    place = -1
    for entry in round_.rows:
        row = entry.row
        if row is None:
            continue
        place += 1
        if row.phase is Phase.DONE:
            done_places.append(place)
            if entry.ends:
                _end(entry, row, all_ids[place], size)
        elif row.phase is Phase.PREFILL:
            entry.status = pb.ROW_STATUS_PREFILLING
        else:
            block_places.append(place)
    rows = [entry.row for entry in round_.rows]
    phases = [row.phase if row is not None else None for row in rows]
    resident = [row for row in rows if row is not None]
    return pb.RowReplies(
        statuses=[entry.status for entry in round_.rows],
        accept_lengths=[size * (phase is Phase.DONE) for phase in phases],
        done_block_indexes=[resident[place].block_index for place in done_places],
        done_ids=all_ids[done_places].tobytes(),
        has_block=[phase is Phase.DENOISE for phase in phases],
        block_indexes=[resident[place].block_index for place in block_places],
        block_ids=all_ids[block_places].tobytes(),
        block_masks=all_masks[block_places].tobytes(),
        step_counts=host[block_places, -1].tolist(),
        algo_states=[_state_of(resident[place], columns) for place in block_places],
        forwards=[_forwards(entry, round_) for entry in round_.rows],
        prefilled_tokens=[row.prefilled_blocks * size if row is not None else 0 for row in rows],
        cached_tokens=[0] * len(rows),
        end_reasons=[entry.end_reason for entry in round_.rows],
        end_positions=[entry.end_position for entry in round_.rows],
        errors={number: entry.error for number, entry in enumerate(round_.rows) if entry.error},
    )


def _state_of(row: Row, columns: SlotColumns) -> bytes:
    """The state of the row's algorithm as it travels."""
    state = {key: column[row.slot, None] for key, column in columns.states[row.algorithm].items()}
    return ALGORITHMS[row.algorithm].encode_state(state) if state else b""


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

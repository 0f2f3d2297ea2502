"""The columns of a RunRound reply, read row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.packing import packed_bits_size, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb


class Snapshot(NamedTuple):
    """An incomplete block as the worker left it; ids and mask bits packed."""

    block_index: int
    ids: bytes
    mask: bytes
    step_count: int
    algo_state: bytes


class RowReply(NamedTuple):
    """What a reply says of one row. `done`: the index and the ids of the block that became done."""

    status: pb.RowStatus
    forwards: int
    cached_tokens: int
    done: tuple[int, list[int]] | None
    snapshot: Snapshot | None
    error: str


def read_rows(rows: pb.RowReplies, block_size: int) -> Iterator[RowReply]:
    """The rows in the order of the request: starts, then continues."""
    ids_size, mask_size = 4 * block_size, packed_bits_size(block_size)
    block_ids, block_masks, done_ids = rows.block_ids, rows.block_masks, rows.done_ids
    num_done = num_blocks = 0
    columns = (rows.statuses, rows.accept_lengths, rows.has_block, rows.forwards, rows.cached_tokens)
    for number, (status, accept_length, has_block, forwards, cached_tokens) in enumerate(zip(*columns, strict=True)):
        done = snapshot = None
        if accept_length:
            ids = unpack_ids(done_ids[num_done * ids_size : (num_done + 1) * ids_size])
            done = (rows.done_block_indexes[num_done], ids)
            num_done += 1
        if has_block:
            snapshot = Snapshot(
                rows.block_indexes[num_blocks],
                block_ids[num_blocks * ids_size : (num_blocks + 1) * ids_size],
                block_masks[num_blocks * mask_size : (num_blocks + 1) * mask_size],
                rows.step_counts[num_blocks],
                rows.algo_states[num_blocks],
            )
            num_blocks += 1
        yield RowReply(status, forwards, cached_tokens, done, snapshot, rows.errors.get(number, ""))

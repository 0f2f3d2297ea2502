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
    """What a reply says of one row.

    `done`: the index and the ids of the block that became done. `snapshot`: the place of the row's incomplete block in
    the reply, for `read_snapshot`; most are never read, since only a request that starts again needs its own.
    """

    status: pb.RowStatus
    forwards: int
    cached_tokens: int
    done: tuple[int, list[int]] | None
    snapshot: int | None
    error: str


def read_rows(rows: pb.RowReplies, block_size: int) -> Iterator[RowReply]:
    """The rows in the order of the request: starts, then continues."""
    ids_size, done_ids = 4 * block_size, rows.done_ids
    num_done = num_blocks = 0
    columns = (rows.statuses, rows.accept_lengths, rows.has_block, rows.forwards, rows.cached_tokens)
    for number, (status, accept_length, has_block, forwards, cached_tokens) in enumerate(zip(*columns, strict=True)):
        done = snapshot = None
        if accept_length:
            ids = unpack_ids(done_ids[num_done * ids_size : (num_done + 1) * ids_size])
            done = (rows.done_block_indexes[num_done], ids)
            num_done += 1
        if has_block:
            snapshot = num_blocks
            num_blocks += 1
        yield RowReply(status, forwards, cached_tokens, done, snapshot, rows.errors.get(number, ""))


def read_snapshot(rows: pb.RowReplies, place: int, block_size: int) -> Snapshot:
    """The incomplete block at a place that `read_rows` gave."""
    ids_size, mask_size = 4 * block_size, packed_bits_size(block_size)
    return Snapshot(
        rows.block_indexes[place],
        rows.block_ids[place * ids_size : (place + 1) * ids_size],
        rows.block_masks[place * mask_size : (place + 1) * mask_size],
        rows.step_counts[place],
        rows.algo_states[place],
    )

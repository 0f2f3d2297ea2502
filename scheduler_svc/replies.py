"""The columns of a RunRound reply, read row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.packing import packed_bits_size, unpack_floats, unpack_ids
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb


class Snapshot(NamedTuple):
    """An incomplete block as the worker left it; ids and mask bits packed."""

    block_index: int
    ids: bytes
    mask: bytes
    step_count: int
    algo_state: bytes
    first_unmask_steps: bytes = b""  # packed int32; may be empty when not asked for
    logprobs: bytes = b""  # packed float32, likewise


class DoneBlock(NamedTuple):
    """A block that became done; the records have an entry a position, or may have none when not asked for."""

    block_index: int
    ids: list[int]
    first_unmask_steps: list[int]
    logprobs: list[float]


class RowReply(NamedTuple):
    """What a reply says of one row.

    `done`: the block that became done. `snapshot`: the place of the row's incomplete block in
    the reply, for `read_snapshot`; most are never read, since only a request that starts again needs its own.
    """

    status: pb.RowStatus
    forwards: int
    cached_tokens: int
    done: DoneBlock | None
    snapshot: int | None
    error: str


def read_rows(rows: pb.RowReplies, block_size: int) -> Iterator[RowReply]:
    """The rows in the order of the request: starts, then continues."""
    done_ids, done_steps, done_logprobs = rows.done_ids, rows.done_first_unmask_steps, rows.done_logprobs
    num_done = num_blocks = 0
    columns = (rows.statuses, rows.accept_lengths, rows.has_block, rows.forwards, rows.cached_tokens)
    for number, (status, accept_length, has_block, forwards, cached_tokens) in enumerate(zip(*columns, strict=True)):
        done = snapshot = None
        if accept_length:
            part = slice(4 * num_done * block_size, 4 * (num_done + 1) * block_size)
            done = DoneBlock(
                rows.done_block_indexes[num_done],
                unpack_ids(done_ids[part]),
                unpack_ids(done_steps[part]),
                unpack_floats(done_logprobs[part]),
            )
            num_done += 1
        if has_block:
            snapshot = num_blocks
            num_blocks += 1
        yield RowReply(status, forwards, cached_tokens, done, snapshot, rows.errors.get(number, ""))


def read_snapshot(rows: pb.RowReplies, place: int, block_size: int) -> Snapshot:
    """The incomplete block at a place that `read_rows` gave."""
    mask_size = packed_bits_size(block_size)
    part = slice(4 * place * block_size, 4 * (place + 1) * block_size)
    return Snapshot(
        rows.block_indexes[place],
        rows.block_ids[part],
        rows.block_masks[place * mask_size : (place + 1) * mask_size],
        rows.step_counts[place],
        rows.algo_states[place],
        rows.block_first_unmask_steps[part],
        rows.block_logprobs[part],
    )


def count_work(counters: api.SchedulerCounters, work: pb.RoundWork) -> None:
    """Add what a round took to the scheduler's totals."""
    counters.rounds += 1
    counters.forwards += work.forwards
    counters.device_ms += work.device_ms
    counters.denoise_row_forwards += work.denoise_row_forwards
    counters.waiting_row_forwards += work.waiting_row_forwards
    counters.prefill_tokens += work.prefill_tokens
    counters.allocator_calls += work.allocator_calls

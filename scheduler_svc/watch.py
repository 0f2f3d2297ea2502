"""Who watches the rounds (`WatchRounds`): a message a round to each, as long as somebody does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc

from common.errors import ServiceError
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.replies import read_rows

if TYPE_CHECKING:
    from scheduler_svc.request import Request
    from scheduler_svc.round_loop import SentRound

MAX_WATCHERS = 8
MAX_UNREAD_ROUNDS = 4096
STATUSES = {
    pb.ROW_STATUS_RUNNING: api.WATCHED_STATUS_RUNNING,
    pb.ROW_STATUS_PREFILLING: api.WATCHED_STATUS_PREFILLING,
    pb.ROW_STATUS_ENDED: api.WATCHED_STATUS_ENDED,
    pb.ROW_STATUS_RELEASED: api.WATCHED_STATUS_RELEASED,
    pb.ROW_STATUS_NO_KV_SPACE: api.WATCHED_STATUS_NO_PLACE,
    pb.ROW_STATUS_SLOT_MISSING: api.WATCHED_STATUS_NO_PLACE,
    pb.ROW_STATUS_BAD_STATE: api.WATCHED_STATUS_FAILED,
    pb.ROW_STATUS_BAD_NUMERICS: api.WATCHED_STATUS_FAILED,
}


class TooManyWatchers(ServiceError):
    """No more calls are served that watch."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Watcher:
    """One call that watches, of the client whose rows it may see."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._unread: asyncio.Queue[api.WatchRoundsResponse | None] = asyncio.Queue(MAX_UNREAD_ROUNDS)
        self._num_missed = 0
        self._is_closed = False

    def put(self, message: api.WatchRoundsResponse) -> None:
        """One more to read; dropped and counted when too many wait."""
        try:
            self._unread.put_nowait(message)
        except asyncio.QueueFull:
            self._num_missed += 1

    def close(self) -> None:
        """Reading ends with what waits."""
        self._is_closed = True
        if self._unread.empty():
            self._unread.put_nowait(None)

    async def read(self) -> AsyncIterator[api.WatchRoundsResponse]:
        """The rounds in order, until the watcher is closed."""
        while not (self._is_closed and self._unread.empty()):
            message = await self._unread.get()
            if message is not None:
                message.missed_rounds = self._num_missed
                yield message


class Watches:
    """All that watch. While nobody does, a round costs a look at an empty set."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def __bool__(self) -> bool:
        return bool(self._watchers)

    @contextlib.contextmanager
    def watch(self, client: str) -> Iterator[Watcher]:
        """A watcher for the time of a call. Raises TooManyWatchers."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} calls watch the rounds already; try again when one has ended")
        watcher = Watcher(client)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End all calls that watch."""
        for watcher in self._watchers:
            watcher.close()

    def tell(
        self, worker: str, generation: int, sent: SentRound, reply: pb.RunRoundResponse, replied_at: float, size: int
    ) -> None:
        """A round's reply is there, of rows with blocks of `size`."""
        if not self._watchers:
            return
        rows = _watched_rows([request for request, _ in sent.rows], reply.rows, size)
        common = api.WatchRoundsResponse(
            worker=worker,
            generation=generation,
            round_id=sent.round_id,
            sent_at_us=round(sent.sent_at * 1e6),
            replied_at_us=round(replied_at * 1e6),
            forward_begins_us=reply.work.forward_begins_us,
            forward_ends_us=reply.work.forward_ends_us,
            forwards=reply.work.forwards,
            device_ms=reply.work.device_ms,
            denoise_row_forwards=reply.work.denoise_row_forwards,
            waiting_row_forwards=reply.work.waiting_row_forwards,
            prefill_tokens=reply.work.prefill_tokens,
        )
        for watcher in self._watchers:
            message = api.WatchRoundsResponse()
            message.CopyFrom(common)
            message.rows.extend(row for client, row in rows if client == watcher.client)
            message.other_rows = len(rows) - len(message.rows)
            watcher.put(message)


def _watched_rows(
    requests: Sequence[Request], replies: pb.RowReplies, block_size: int
) -> list[tuple[str, api.WatchedRow]]:
    """Each row with the client whose it is."""
    rows = []
    for number, (request, row) in enumerate(zip(requests, read_rows(replies, block_size), strict=True)):
        open_block = None if row.snapshot is None else replies.block_indexes[row.snapshot]
        watched = api.WatchedRow(
            request_id=request.stream.request_id,
            sample_index=request.sample_index,
            status=STATUSES[row.status],
            block_index=open_block if row.done is None else row.done.block_index,
            accept_length=0 if row.done is None else block_size,
            forwards_before=replies.forwards_before[number] if replies.forwards_before else 0,
            forwards=row.forwards,
            began_next=row.done is not None and row.snapshot is not None,
        )
        rows.append((request.client, watched))
    return rows

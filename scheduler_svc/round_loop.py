"""One loop per worker: plan a round, send it, apply its reply.

Up to `rounds_in_flight` continuing rounds are on their way at a time, and one more that starts or releases rows.
Replies are applied in the order of their rounds. When the worker is lost, its requests go to the front of the queue
with their incomplete blocks, under a new generation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from common.errors import Internal
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.planner import Room, admit
from scheduler_svc.queue import RequestQueue
from scheduler_svc.replies import read_rows
from scheduler_svc.request import Request
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers import RECONNECT_EVERY_S, Link, WorkerLost

HEARTBEAT_EVERY_S = 10.0
FULL_POLL_S = 0.25  # while requests wait for space that another scheduler may free

log = structlog.get_logger()


@dataclass
class SentRound:
    """A round on its way; `rows` are its requests with the attempt they had, in the order of the reply."""

    round_id: int
    rows: list[tuple[Request, int]]
    num_start_pages: int
    reply: asyncio.Task[pb.RunRoundResponse]


@dataclass
class RoundLoop:
    """Drives one worker. `on_info` hears the worker's facts at every connect; it raises ValueError to refuse them."""

    link: Link
    queue: RequestQueue
    settings: SchedulerSettings
    fingerprint: str
    counters: api.SchedulerCounters
    on_info: Callable[[pb.GetWorkerInfoResponse], None]
    attempts: Iterator[int]  # of the whole scheduler, so that no two starts of a request id are ever alike
    generation: int = 0
    epoch: str = ""
    is_ready: bool = False
    info: pb.GetWorkerInfoResponse | None = None
    pages: pb.PageUsage = field(default_factory=pb.PageUsage)
    running: dict[str, Request] = field(default_factory=dict)
    _room: Room = field(default_factory=lambda: Room(0, 0, 1))
    _releases: list[tuple[str, int]] = field(default_factory=list)
    _in_flight: deque[SentRound] = field(default_factory=deque)
    _last_round_id: int = 0
    _acked_round_id: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Connect and serve, for ever; a lost worker is connected again."""
        while True:
            await self._connect()
            try:
                await self._serve()
            except WorkerLost as lost:
                log.warning("worker_lost", target=self.link.target, worker_epoch=self.epoch, reason=str(lost))
                await self._requeue_all()
                await asyncio.sleep(RECONNECT_EVERY_S)

    def wake(self) -> None:
        """Something may have changed: a request came, or one is to be released."""
        self._wake.set()

    def release(self, request: Request) -> None:
        """Free the request's row with the next round, which ends the running one at its next boundary."""
        if self.running.pop(request.spec.request_id, None) is not None:
            self._releases.append((request.spec.request_id, request.attempt))
            self.wake()

    async def _connect(self) -> None:
        while True:
            info = await self.link.get_info()
            try:
                self.on_info(info)
            except ValueError as error:
                self.link.last_error = str(error)
                log.error("worker_refused", target=self.link.target, reason=str(error))
            else:
                if not info.draining:
                    break
                self.link.last_error = "the worker is draining"
            await asyncio.sleep(RECONNECT_EVERY_S)
        self.info, self.epoch, self.pages = info, info.worker_epoch, info.pages
        self.generation += 1
        self._last_round_id = self._acked_round_id = 0
        self._releases.clear()
        self._room = Room(info.max_running_requests, info.pages.free, info.page_size)
        self.is_ready, self.link.last_error = True, ""
        log.info("worker_connected", target=self.link.target, worker_epoch=self.epoch, generation=self.generation)

    async def _serve(self) -> None:
        await self._heartbeat()  # drops what an older generation left there
        while True:
            self._wake.clear()
            with self._own_time():
                while self._send_next():
                    pass
            if self._in_flight:
                woken = asyncio.create_task(self._wake.wait())
                await asyncio.wait({woken, self._in_flight[0].reply}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if self._in_flight[0].reply.done():
                    sent = self._in_flight.popleft()
                    with self._own_time():
                        self._apply(sent, sent.reply.result())
            else:
                await self._idle()

    async def _idle(self) -> None:
        """Wait for work; keep the lease, and look for space while requests wait for it."""
        try:
            await asyncio.wait_for(self._wake.wait(), FULL_POLL_S if len(self.queue) else HEARTBEAT_EVERY_S)
        except TimeoutError:
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        """Renew the lease and learn what is free. Raises WorkerLost for a worker that restarted or drains."""
        heartbeat = await self.link.heartbeat(self.generation)
        if heartbeat.worker_epoch != self.epoch:
            raise WorkerLost(f"restarted: its epoch is {heartbeat.worker_epoch}")
        if heartbeat.draining:
            raise WorkerLost("the worker is draining")
        self._update_room(heartbeat.pages, heartbeat.allowance)

    # Plan and send ----------------------------------------------------------------------------------------------

    def _send_next(self) -> bool:
        """Send a round if one is due."""
        is_fdfo, num_in_flight = self.settings.dllm_fdfo, len(self._in_flight)
        # A round that waits at the worker is next at a boundary in FDFO. In SYNC it would wait for a whole round, and
        # keep out what arrives meanwhile.
        limit = self.settings.rounds_in_flight if is_fdfo else 1
        if num_in_flight >= limit + is_fdfo:
            return False
        free_before = self._room.pages
        starting = admit(self.queue, self._room, len(self.running))
        changes = bool(starting or self._releases)
        if not changes and (num_in_flight == limit or not self.running):
            return False
        continuing = list(self.running.values())
        request = self._round_message(starting, continuing)
        self._last_round_id += 1
        self._releases.clear()
        self.running.update((row.spec.request_id, row) for row in starting)
        rows = [(row, row.attempt) for row in starting + continuing]
        reply = asyncio.create_task(self._run_round(request))
        self._in_flight.append(SentRound(self._last_round_id, rows, free_before - self._room.pages, reply))
        log.debug("round_sent", round_id=request.round_id, starts=len(starting), continues=len(continuing))
        return True

    async def _run_round(self, request: pb.RunRoundRequest) -> pb.RunRoundResponse:
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        reply = await self.link.run_round(request, self._timeout_s())
        self.counters.round_trip_ms += (clock() - sent_at) * 1000
        return reply

    def _round_message(self, starting: list[Request], continuing: list[Request]) -> pb.RunRoundRequest:
        return pb.RunRoundRequest(
            scheduler_id=self.link.scheduler_id,
            generation=self.generation,
            worker_epoch=self.epoch,
            fingerprint=self.fingerprint,
            round_id=self._last_round_id + 1,
            acked_round_id=self._acked_round_id,
            mode=pb.MODE_FDFO if self.settings.dllm_fdfo else pb.MODE_SYNC,
            max_forwards=self.settings.max_forwards,
            max_round_ms=self.settings.max_round_ms,
            releases=row_names(self._releases),
            starts=[request.start_row(next(self.attempts)) for request in starting],
            continues=row_names([(row.spec.request_id, row.attempt) for row in continuing]),
        )

    def _timeout_s(self) -> float:
        if not self.settings.dllm_fdfo:
            return self.settings.sync_round_timeout_s
        in_flight_s = (self.settings.rounds_in_flight + 1) * self.settings.max_round_ms / 1000
        return in_flight_s + self.settings.hang_timeout_s

    # Apply ------------------------------------------------------------------------------------------------------

    def _apply(self, sent: SentRound, reply: pb.RunRoundResponse) -> None:
        """Everything a reply says, in the order of its rows."""
        self._acked_round_id = sent.round_id
        self._count(reply)
        assert self.info is not None
        back: list[Request] = []
        rows = read_rows(reply.rows, self.info.block_size)
        for (request, attempt), row in zip(sent.rows, rows, strict=True):
            if request.is_finished or request.attempt != attempt or request.spec.request_id not in self.running:
                continue
            request.rounds += 1
            request.forwards += row.forwards
            request.cached_tokens = request.cached_tokens or row.cached_tokens
            if row.done is not None:
                self.counters.blocks_done += request.commit_block(row.done)
            if row.snapshot is not None:
                request.keep_snapshot(reply.rows, row.snapshot)
            if self._settle(request, row.status, row.done is not None, row.error):
                back.append(request)
        self.queue.push_front(back)
        self._update_room(reply.pages, reply.allowance)
        if reply.draining:
            raise WorkerLost("the worker is draining")

    def _settle(self, request: Request, status: pb.RowStatus, was_held: bool, error: str) -> bool:
        """What the row's status asks for beyond its block; True if the request goes back to the queue.

        `was_held` tells a row that found no page for its next block from a start that found no place.
        """
        name = request.spec.request_id
        if status == pb.ROW_STATUS_ENDED:
            del self.running[name]
            if not request.is_finished:
                request.fail(Internal("the worker ended the request where the scheduler sees no end"))
        elif request.is_finished:
            self.release(request)
        elif status == pb.ROW_STATUS_NO_KV_SPACE:
            self.counters.preemptions += was_held
            if was_held:
                self.release(request)
            else:
                del self.running[name]
            return True
        elif status == pb.ROW_STATUS_SLOT_MISSING:
            self.counters.restarts += 1
            del self.running[name]
            return True
        elif status in (pb.ROW_STATUS_BAD_STATE, pb.ROW_STATUS_BAD_NUMERICS):
            del self.running[name]
            log.error("row_failed", request_id=name, status=pb.RowStatus.Name(status), error=error)
            request.fail(Internal(f"{pb.RowStatus.Name(status)}: {error}"))
        return False

    def _update_room(self, pages: pb.PageUsage, allowance: pb.Allowance) -> None:
        """What is free for us now, less what the starts in flight will take."""
        self.pages = pages
        self._room = Room(
            rows=allowance.rows - len(self.running),
            pages=pages.free + pages.cached - sum(sent.num_start_pages for sent in self._in_flight),
            page_size=self._room.page_size,
        )

    @contextlib.contextmanager
    def _own_time(self) -> Iterator[None]:
        """Count what is done inside as the scheduler's host time."""
        clock = asyncio.get_running_loop().time
        started_at = clock()
        try:
            yield
        finally:
            self.counters.host_ms += (clock() - started_at) * 1000

    def _count(self, reply: pb.RunRoundResponse) -> None:
        counters, work = self.counters, reply.work
        counters.rounds += 1
        counters.forwards += work.forwards
        counters.device_ms += work.device_ms
        counters.denoise_row_forwards += work.denoise_row_forwards
        counters.waiting_row_forwards += work.waiting_row_forwards
        counters.prefill_tokens += work.prefill_tokens
        counters.allocator_calls += work.allocator_calls

    async def _requeue_all(self) -> None:
        """The worker is lost: everything it ran starts anew from what we hold."""
        self.is_ready = False
        for sent in self._in_flight:
            sent.reply.cancel()
        await asyncio.gather(*(sent.reply for sent in self._in_flight), return_exceptions=True)
        self._in_flight.clear()
        self.counters.restarts += len(self.running)
        self.queue.push_front(list(self.running.values()))
        self.running.clear()


def row_names(rows: list[tuple[str, int]]) -> pb.RowNames:
    """Columns for (request id, attempt) pairs; sample 0."""
    return pb.RowNames(
        request_ids=[request_id for request_id, _ in rows],
        sample_indexes=[0] * len(rows),
        attempts=[attempt for _, attempt in rows],
    )

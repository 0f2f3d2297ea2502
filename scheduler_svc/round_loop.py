"""One loop per worker: plan a round, send it, apply its reply.

Up to `rounds_in_flight` continuing rounds are on their way at a time, and one more that starts or releases rows.
Replies are applied in the order of their rounds. When the worker is lost, its requests go to the front of their class
with their incomplete blocks, under a new generation. So does a request that is preempted: for a row that finds no page
for its next block, for a request of a higher class, or because this scheduler is above its allowance.
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
from scheduler_svc.planner import Room, admit, choose_victim, make_way
from scheduler_svc.queue import RequestQueue
from scheduler_svc.replies import RowReply, read_rows
from scheduler_svc.request import Request, RowName
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
    num_taken_pages: int  # by its starts, less those that were given back for them
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
    loops: list[RoundLoop] = field(default_factory=list)  # of the whole scheduler
    generation: int = 0
    epoch: str = ""
    is_ready: bool = False
    info: pb.GetWorkerInfoResponse | None = None
    pages: pb.PageUsage = field(default_factory=pb.PageUsage)
    running: dict[RowName, Request] = field(default_factory=dict)
    _room: Room = field(default_factory=lambda: Room(0, 0, 1))
    _releases: list[tuple[RowName, int]] = field(default_factory=list)
    _in_flight: deque[SentRound] = field(default_factory=deque)
    _last_round_id: int = 0
    _acked_round_id: int = 0
    _preempting_round_id: int = 0  # the last one that releases a preempted row
    _heard_at: float = 0.0
    _asks: bool = False  # a start is due that does not fit, so that the worker shares evenly
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
        if self.running.get(request.name) is request:  # not a later one of the same name
            del self.running[request.name]
            self._releases.append((request.name, request.attempt))
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
        self._last_round_id = self._acked_round_id = self._preempting_round_id = 0
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
        period_s = FULL_POLL_S if len(self.queue) else HEARTBEAT_EVERY_S
        try:
            async with asyncio.timeout_at(self._heard_at + period_s):
                await self._wake.wait()
        except TimeoutError:
            await self._heartbeat()
            self._asks = bool(len(self.queue))

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
        starting = self._starts()
        continuing = [row for row in self.running.values() if not row.is_parked]
        changes = bool(starting or self._releases)
        if not changes and (num_in_flight == limit or not continuing):
            return False
        request = self._round_message(starting, continuing)
        self._last_round_id += 1
        self._releases.clear()
        self.running.update((row.name, row) for row in starting)
        rows = [(row, row.attempt) for row in starting + continuing]
        reply = asyncio.create_task(self._run_round(request))
        self._in_flight.append(SentRound(self._last_round_id, rows, free_before - self._room.pages, reply))
        log.debug("round_sent", round_id=request.round_id, starts=len(starting), continues=len(continuing))
        return True

    def _starts(self) -> list[Request]:
        """Who starts now. A request that does not fit, here or at another worker, takes the place of lower classes."""
        starting = admit(self.queue, self._room, len(self.running))
        while (first := self.queue.first()) is not None and not self._fits_elsewhere(first):
            victims = make_way(first, self._room, self.running.values(), len(self.running) + len(starting))
            if not victims:
                break
            for victim in victims:
                self._room.give_back(victim)
                self._preempt(victim)
            starting += admit(self.queue, self._room, len(self.running) + len(starting))
        if self._asks and self.queue.first() is not None and not (self.running or starting):
            starting = [self.queue.pop()]
            self._room.take(starting[0])
        self._asks = False
        return starting

    def _fits_elsewhere(self, request: Request) -> bool:
        others = (loop for loop in self.loops if loop is not self and loop.is_ready)
        return any(loop._room.fits(request, len(loop.running)) for loop in others)

    def _preempt(self, request: Request) -> None:
        """Release a running row with the next round; it goes on later, from its last snapshot."""
        self.release(request)
        self._preempting_round_id = self._last_round_id + 1
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push_front([request])
        log.debug("request_preempted", request_id=request.name[0], sample_index=request.name[1])

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
            continues=row_names([(row.name, row.attempt) for row in continuing]),
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
        stuck: list[Request] = []
        rows = read_rows(reply.rows, self.info.block_size)
        for (request, attempt), row in zip(sent.rows, rows, strict=True):
            if request.attempt != attempt or not self._is_running(request):
                continue
            request.rounds += 1
            request.forwards += row.forwards
            request.cached_tokens = request.cached_tokens or row.cached_tokens
            if row.done is not None:
                self.counters.blocks_done += request.commit_block(row.done)
            if row.snapshot is not None:
                request.keep_snapshot(reply.rows, row.snapshot)
            self._settle(request, row, back, stuck)
        self.queue.push_front(back)
        self._update_room(reply.pages, reply.allowance)
        if reply.draining:
            raise WorkerLost("the worker is draining")
        self._find_pages(stuck, sent.round_id)
        self._keep_to(reply.allowance)

    def _is_running(self, request: Request) -> bool:
        """Whether the request runs here and is wanted; one that ended elsewhere, with its stream, is released."""
        if request.is_finished:
            self.release(request)
        return self.running.get(request.name) is request

    def _settle(self, request: Request, row: RowReply, back: list[Request], stuck: list[Request]) -> None:
        """What the row's status asks for beyond its block. `back` gets a request that lost its place, `stuck` one that
        found no page for its next block; it keeps its slot and its pages."""
        status = row.status
        if status in (pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_ENDED):  # its prefix is there
            self.queue.push_held(request.stream.take_held())
        if status == pb.ROW_STATUS_ENDED:
            del self.running[request.name]
            if not request.is_finished:
                self._fail(request, Internal("the worker ended the request where the scheduler sees no end"))
        elif request.is_finished:
            self.release(request)
        elif status == pb.ROW_STATUS_NO_KV_SPACE and row.done is not None:
            stuck.append(request)
        elif status in (pb.ROW_STATUS_NO_KV_SPACE, pb.ROW_STATUS_SLOT_MISSING):
            self.counters.restarts += status == pb.ROW_STATUS_SLOT_MISSING
            del self.running[request.name]
            back.append(request)
        elif status in (pb.ROW_STATUS_BAD_STATE, pb.ROW_STATUS_BAD_NUMERICS):
            del self.running[request.name]
            log.error("row_failed", request_id=request.name[0], status=pb.RowStatus.Name(status), error=row.error)
            self._fail(request, Internal(f"{pb.RowStatus.Name(status)}: {row.error}"))

    def _fail(self, request: Request, error: Internal) -> None:
        """End the whole stream; its samples at other workers are released with their next reply."""
        stream = request.stream
        stream.fail(error)
        stream.held.clear()
        for sample in stream.samples:
            self.queue.remove(sample)
            self.release(sample)

    def _find_pages(self, stuck: list[Request], round_id: int) -> None:
        """For each row that found no page for its next block, and for which none became free: a row of its class or a
        lower one is preempted, perhaps itself. Where it stays, the next round tries again.

        What a round says that was sent before the last preempted row was released is no longer so.
        """
        if round_id < self._preempting_round_id:
            return
        free = self._free_pages()
        for row in sorted(stuck, key=lambda row: -row.priority):
            if row.name not in self.running:
                continue
            if free < 1:
                victim = choose_victim(other for other in self.running.values() if other.priority <= row.priority)
                self._preempt(victim)
                if victim is row:
                    continue
                free += self._room.pages_for(victim)
            free -= 1

    def _keep_to(self, allowance: pb.Allowance) -> None:
        """Preempt down to the allowance, but for one row. Each may be without the last page that we count for it."""
        while (num_rows := len(self.running)) > 1 and (
            num_rows > allowance.rows or self._own_pages() - num_rows > allowance.pages
        ):
            self._preempt(choose_victim(self.running.values()))

    def _update_room(self, pages: pb.PageUsage, allowance: pb.Allowance) -> None:
        """What is free for us now, less what the starts in flight will take."""
        self.pages = pages
        self._heard_at = asyncio.get_running_loop().time()
        self._room = Room(
            rows=allowance.rows - len(self.running),
            pages=min(self._free_pages(), allowance.pages - self._own_pages()),
            page_size=self._room.page_size,
        )

    def _free_pages(self) -> int:
        return self.pages.free + self.pages.cached - sum(sent.num_taken_pages for sent in self._in_flight)

    def _own_pages(self) -> int:
        """Pages that our rows hold; a page that several share is counted for each, but never more than are held."""
        return min(self.pages.held, sum(map(self._room.pages_for, self.running.values())))

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


def row_names(rows: list[tuple[RowName, int]]) -> pb.RowNames:
    """Columns for rows with their attempts."""
    return pb.RowNames(
        request_ids=[request_id for (request_id, _), _ in rows],
        sample_indexes=[sample_index for (_, sample_index), _ in rows],
        attempts=[attempt for _, attempt in rows],
    )

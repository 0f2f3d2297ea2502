"""One loop per worker: plan a round, send it, apply its reply.

Up to `rounds_in_flight` continuing rounds are on their way at a time, and one more that starts or releases rows.
Replies are applied in the order of their rounds. When the worker is lost, its requests go to the front of their class
with their incomplete blocks, under a new generation. So does a request that is preempted: for a row that finds no page
for its next block, for a request of a higher class, or because this scheduler is above its allowance.

A death of the worker counts against the requests of which no step was heard since they started on it. Who has two since
its last block runs alone (placement.py), and fails when a third worker dies under it. Moves for drain, preemption, a
hang or a partition never count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog

from common.errors import Internal
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.placement import PrefixMemory, place
from scheduler_svc.queue import RequestQueue
from scheduler_svc.replies import RowReply, count_work, read_rows
from scheduler_svc.request import DEATHS_BEFORE_SUSPICION, Request, RowName
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.watch import Watches
from scheduler_svc.worker_rows import WorkerRows, row_names
from scheduler_svc.worker_watch import watch_worker
from scheduler_svc.workers import RECONNECT_EVERY_S, Link, WorkerLost

HEARTBEAT_EVERY_S = 10.0
FULL_POLL_S = 0.25  # while requests wait for space that another scheduler may free
ASK_EVERY_S = 1.0  # for a start that does not fit
HAS_STARTED = (pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_PREFILLING, pb.ROW_STATUS_ENDED)
SILENT_S = 0.5  # with all its rounds on their way: nothing more is placed there

log = structlog.get_logger()


@dataclass
class SentRound:
    """A round on its way; `rows` are its requests with the attempt they had, in the order of the reply."""

    round_id: int
    rows: list[tuple[Request, int]]
    num_taken_pages: int  # by its starts, less those that were given back for them
    reply: asyncio.Task[pb.RunRoundResponse]
    sent_at: float


@dataclass(eq=False)
class RoundLoop:
    """Drives one worker. `on_info` hears the worker's facts at every connect; it raises ValueError to refuse them."""

    link: Link
    queue: RequestQueue
    settings: SchedulerSettings
    counters: api.SchedulerCounters
    metrics: SchedulerMetrics
    on_info: Callable[[pb.GetWorkerInfoResponse], None]
    attempts: Iterator[int]  # of the whole scheduler, so that no two starts of a request id are ever alike
    generations: Iterator[int]  # likewise: one worker may be met by several loops, one after the other
    watches: Watches
    loops: list[RoundLoop] = field(default_factory=list)  # of the whole scheduler
    generation: int = 0
    epoch: str = ""
    is_ready: bool = False
    is_leaving: bool = False  # the address is no worker's any more: start nothing there, end with the last row
    info: pb.GetWorkerInfoResponse | None = None
    rows: WorkerRows = field(init=False)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)  # of its present life
    _in_flight: deque[SentRound] = field(default_factory=deque)
    _acked_round_id: int = 0
    _heard_at: float = 0.0
    _telling: set[asyncio.Task[None]] = field(default_factory=set)  # releases on their way beside the rounds
    _asked_at: float = float("-inf")
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rows = WorkerRows(self.queue, self.counters)

    @property
    def running(self) -> dict[RowName, Request]:
        """Our rows there, by name."""
        return self.rows.running

    async def run(self) -> None:
        """Connect and serve until the address is left; a lost worker is connected again."""
        while not self.is_leaving:
            await self._connect()
            try:
                await self._serve()
            except WorkerLost as lost:
                log.warning(
                    "worker_lost",
                    target=self.link.target,
                    worker_epoch=self.epoch,
                    reason=str(lost),
                    is_death=lost.is_death,
                )
                self.metrics.worker_lost(lost)
                await self._requeue_all(lost.is_death)
                await asyncio.sleep(RECONNECT_EVERY_S)
        self.is_ready = False

    def wake(self) -> None:
        """Something may have changed: a request came, or one is to be released."""
        self._wake.set()

    def release(self, request: Request) -> None:
        """Free the request's row with the next round, which ends the running one at its next boundary; a lockstep round
        goes on without the row."""
        if self.rows.release(request):
            self.wake()
            if self._in_flight and not self.settings.dllm_fdfo:
                telling = asyncio.create_task(self._tell([(request.name, request.attempt)]))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)

    async def _tell(self, rows: list[tuple[RowName, int]]) -> None:
        """Release rows at the next boundary, beside the rounds; the next round does so again."""
        try:
            await self.link.release(self.generation, row_names(rows))
        except WorkerLost as lost:
            log.warning("release_not_told", target=self.link.target, reason=str(lost))

    # What placement asks ----------------------------------------------------------------------------------------

    @property
    def takes_new(self) -> bool:
        return self.is_ready and not self.is_leaving and not self.rows.is_isolating

    def has_room_for(self, request: Request) -> bool:
        """Whether it could start here, with a round that is not far: in FDFO the next boundary, unless the worker has
        not said anything for long; in SYNC now."""
        return self.takes_new and self.rows.fits(request) and (not self._in_flight or self._is_quick())

    def _is_quick(self) -> bool:
        can_send = len(self._in_flight) <= self.settings.rounds_in_flight
        return self.settings.dllm_fdfo and (can_send or self._now() - self._heard_at < SILENT_S)

    def start(self, request: Request) -> None:
        """Start it with the next round."""
        self.rows.place(request)
        self.wake()

    def isolate(self, suspect: Request) -> None:
        """Start it with the next round, alone: all our other rows here make way."""
        log.warning("request_isolated", request_id=suspect.name[0], target=self.link.target, deaths=suspect.num_deaths)
        self.rows.isolate(suspect)
        self.wake()

    # Connect and serve ------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        while True:
            info = await self.link.get_info()
            reason = self._why_not(info)
            if not reason:
                break
            if reason != self.link.last_error:
                log.error("worker_refused", target=self.link.target, reason=reason)
            self.link.last_error = reason
            await asyncio.sleep(RECONNECT_EVERY_S)
        if info.worker_epoch != self.epoch:
            self.prefixes = PrefixMemory(info.pages.total * info.page_size // info.block_size)
        self.info, self.epoch = info, info.worker_epoch
        self.generation = next(self.generations)
        self._acked_round_id = 0
        self.rows.connect(info)
        self.is_ready, self.link.last_error = True, ""
        log.info("worker_connected", target=self.link.target, worker_epoch=self.epoch, generation=self.generation)

    def _why_not(self, info: pb.GetWorkerInfoResponse) -> str:
        """Why this worker is not to be used; empty if it is."""
        if info.draining:
            return "the worker is draining"
        for loop in self.loops:
            if loop is not self and loop.is_ready and loop.epoch == info.worker_epoch:
                return f"the same worker as {loop.link.target}"  # two generations at once would end each other
        try:
            self.on_info(info)
        except ValueError as error:
            return str(error)
        return ""

    async def _serve(self) -> None:
        """Rounds until the address is left and the last row has ended."""
        await self._heartbeat()  # drops what an older generation left there
        watch = asyncio.create_task(
            watch_worker(
                self.link,
                self.epoch,
                owes_reply=lambda: bool(self._in_flight),
                on_pages=self.rows.see_pages,
                patience_s=self.settings.hang_timeout_s / 2,
            )
        )
        try:
            while not self._has_left():
                self._wake.clear()
                with self._own_time():
                    while self._send_next():
                        pass
                await self._next_event(watch)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _has_left(self) -> bool:
        return self.is_leaving and not (self.rows.num_rows or self.rows.releases or self._in_flight)

    async def _next_event(self, watch: asyncio.Task[None]) -> None:
        """Wait until woken or for the oldest reply, and apply it. An idle loop keeps its lease, and looks for space
        while requests wait for it."""
        reply = self._in_flight[0].reply if self._in_flight else None
        idle_s = None
        if reply is None:
            idle_s = max(0.0, self._heard_at + (FULL_POLL_S if len(self.queue) else HEARTBEAT_EVERY_S) - self._now())
        woken = asyncio.create_task(self._wake.wait())
        waits: set[asyncio.Task[Any]] = {woken, watch} if reply is None else {woken, watch, reply}
        done, _ = await asyncio.wait(waits, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        if reply in done:
            sent = self._in_flight.popleft()
            with self._own_time():
                self._tell_watchers(sent, sent.reply.result())
                self._apply(sent, sent.reply.result())
        if watch in done:
            watch.result()
        if not done:
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        """Renew the lease and learn what is free. Raises WorkerLost for a worker that restarted or drains."""
        heartbeat = await self.link.heartbeat(self.generation)
        if heartbeat.worker_epoch != self.epoch:
            raise WorkerLost(f"restarted: its epoch is {heartbeat.worker_epoch}", is_death=True)
        if heartbeat.draining:
            raise WorkerLost("the worker is draining", refusal="DRAINING")
        self._update_room(heartbeat.pages, heartbeat.allowance)

    # Plan and send ----------------------------------------------------------------------------------------------

    def _send_next(self) -> bool:
        """Send a round if one is due."""
        is_fdfo, num_in_flight, rows = self.settings.dllm_fdfo, len(self._in_flight), self.rows
        # A round that waits at the worker is next at a boundary in FDFO. In SYNC it would wait for a whole round, and
        # keep out what arrives meanwhile.
        limit = self.settings.rounds_in_flight if is_fdfo else 1
        if num_in_flight >= limit + is_fdfo:
            return False
        self._start_more()
        starting = list(rows.placed)
        continuing = [row for row in rows.running.values() if not row.is_parked]
        changes = bool(starting or rows.releases)
        if not changes and (num_in_flight == limit or not continuing):
            return False
        request = self._round_message(starting, continuing)
        num_taken_pages = rows.send()
        sent_rows = [(row, row.attempt) for row in starting + continuing]
        reply = asyncio.create_task(self._run_round(request))
        self._in_flight.append(SentRound(request.round_id, sent_rows, num_taken_pages, reply, self._now()))
        log.debug("round_sent", round_id=request.round_id, starts=len(starting), continues=len(continuing))
        return True

    def _start_more(self) -> None:
        """Place what fits, here and elsewhere. A request that fits nowhere takes the place of lower classes here."""
        place(self.queue, self.loops)
        if not self.takes_new:
            return
        while (first := self.queue.first()) is not None and not self._fits_elsewhere(first):
            if not self.rows.make_way(first):
                break
            place(self.queue, self.loops)
        self._ask()

    def _ask(self) -> None:
        """While a request waits and other schedulers hold more here than we do, send a start that does not fit, now and
        then: the refusal is what makes the worker share evenly."""
        request = self.queue.first() or (self.queue.first_suspect() if not self.running else None)
        if request is None or self.rows.placed or not self.rows.others_hold_more:
            return
        if self._now() - self._asked_at >= ASK_EVERY_S:
            self._asked_at = self._now()
            self.queue.take(request)
            self.rows.place(request)

    def _fits_elsewhere(self, request: Request) -> bool:
        return any(loop is not self and loop.takes_new and loop.rows.fits(request) for loop in self.loops)

    async def _run_round(self, request: pb.RunRoundRequest) -> pb.RunRoundResponse:
        sent_at = self._now()
        reply = await self.link.run_round(request, self._timeout_s())
        seconds = self._now() - sent_at
        self.counters.round_trip_ms += seconds * 1000
        self.metrics.round_replied(seconds, reply.work)
        return reply

    def _round_message(self, starting: list[Request], continuing: list[Request]) -> pb.RunRoundRequest:
        for request in starting:
            self.metrics.started(request, self._now())
        assert self.info is not None
        return pb.RunRoundRequest(
            scheduler_id=self.link.scheduler_id,
            generation=self.generation,
            worker_epoch=self.epoch,
            fingerprint=self.info.fingerprint,
            round_id=self.rows.last_round_id + 1,
            acked_round_id=self._acked_round_id,
            mode=pb.MODE_FDFO if self.settings.dllm_fdfo else pb.MODE_SYNC,
            max_forwards=self._max_forwards(starting + continuing),
            max_round_ms=self.settings.max_round_ms,
            releases=row_names(self.rows.releases),
            starts=[request.start_row(next(self.attempts)) for request in starting],
            continues=row_names([(row.name, row.attempt) for row in continuing]),
            want_forward_times=bool(self.watches),
        )

    def _max_forwards(self, rows: list[Request]) -> int:
        """As the flag says, or fewer where a client wants to see its block more often; 0 = no limit."""
        wanted = {row.spec.provisional_every_forwards for row in rows}
        return min((wanted | {self.settings.max_forwards}) - {0}, default=0)

    def _timeout_s(self) -> float:
        if not self.settings.dllm_fdfo:
            return self.settings.sync_round_timeout_s
        in_flight_s = (self.settings.rounds_in_flight + 1) * self.settings.max_round_ms / 1000
        return in_flight_s + self.settings.hang_timeout_s

    # Apply ------------------------------------------------------------------------------------------------------

    def _apply(self, sent: SentRound, reply: pb.RunRoundResponse) -> None:
        """Everything a reply says, in the order of its rows."""
        self._acked_round_id = sent.round_id
        self.rows.num_sent_pages -= sent.num_taken_pages
        count_work(self.counters, reply.work)
        assert self.info is not None
        back: list[Request] = []
        stuck: list[Request] = []
        rows = read_rows(reply.rows, self.info.block_size)
        for (request, attempt), row in zip(sent.rows, rows, strict=True):
            if request.attempt != attempt or not self._is_running(request):
                continue
            request.rounds += 1
            request.forwards += row.forwards
            if request.cached_tokens is None and row.status in HAS_STARTED:
                request.cached_tokens = row.cached_tokens  # a later start finds its own pages too
                self.metrics.prefix_known(request)
            if row.done is not None and request.commit_block(row.done):
                self.counters.blocks_done += 1
                self.metrics.block_done(request, self._now())
            if row.snapshot is not None:
                request.keep_snapshot(reply.rows, row.snapshot, row.forwards)
            self._settle(request, row, back, stuck)
        self.queue.push_front(back)
        self._update_room(reply.pages, reply.allowance)
        if reply.draining:
            raise WorkerLost("the worker is draining", refusal="DRAINING")
        self.rows.find_pages(stuck, sent.round_id)
        self.rows.keep_to_allowance()

    def _tell_watchers(self, sent: SentRound, reply: pb.RunRoundResponse) -> None:
        assert self.info is not None
        self.watches.tell(self.link.target, self.generation, sent, reply, self._now(), self.info.block_size)

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
        """End the whole stream, wherever its samples are."""
        stream = request.stream
        stream.fail(error)
        stream.held.clear()
        for sample in stream.samples:
            self.queue.remove(sample)
            for loop in self.loops:
                loop.release(sample)

    def _update_room(self, pages: pb.PageUsage, allowance: pb.Allowance) -> None:
        self._heard_at = self._now()
        self.rows.update(pages, allowance)

    @contextlib.contextmanager
    def _own_time(self) -> Iterator[None]:
        """Count what is done inside as the scheduler's host time."""
        started_at = self._now()
        try:
            yield
        finally:
            self.counters.host_ms += (self._now() - started_at) * 1000

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _requeue_all(self, is_death: bool) -> None:
        """The worker is lost: everything it ran starts anew from what we hold."""
        self.is_ready = False
        in_flight, self._in_flight = [sent.reply for sent in self._in_flight], deque()
        self.counters.restarts += len(self.running)
        started = list(self.running.values())
        requests = self.rows.take_all()
        if is_death:
            for request in started:
                self._count_death(request)
        self.queue.push_front([request for request in requests if not request.is_finished])
        for loop in self.loops:  # what we had room for may have to go elsewhere
            loop.wake()
        for reply in in_flight:
            reply.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)

    def _count_death(self, request: Request) -> None:
        """The worker died under the request."""
        if request.has_advanced_there or request.is_finished:
            return
        request.num_deaths += 1
        if request.num_deaths > DEATHS_BEFORE_SUSPICION:
            log.error("request_ends_workers", request_id=request.name[0], deaths=request.num_deaths)
            message = f"{request.num_deaths} workers died under the request before its next block, the last time alone"
            self._fail(request, Internal(message))

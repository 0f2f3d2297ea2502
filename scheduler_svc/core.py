"""The scheduler: live requests, their queue, and one round loop per worker. No gRPC server in here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from common.errors import AlreadyLive, DeadlineOver, ServiceError, TakenOver, Unavailable
from common.fingerprint import check_fingerprint
from common.model_folder import ModelFolder
from common.resolving import Resolve
from fdfo.scheduler.v1 import resume_pb2
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc import discovery, offers
from scheduler_svc.commit import OutputCommitter
from scheduler_svc.config_files import ServedModel
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.outbox import HOLD_S, Outbox
from scheduler_svc.queue import RequestQueue
from scheduler_svc.request import Request
from scheduler_svc.resume import request_part
from scheduler_svc.round_loop import RoundLoop
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.stream import Stream, live_name
from scheduler_svc.text import TextCodec
from scheduler_svc.validation import GenerateSpec, Rules, parse_generate
from scheduler_svc.watch import Watches
from scheduler_svc.workers import Link, WorkerLink, WorkerLost

CLOSE_POLL_S = 0.05
FREE_ROWS_S = 1.0
# So much before the client's deadline a stream ends by itself, that its last messages still arrive; half of what is
# left when that is less.
DEADLINE_MARGIN_S = 0.05

log = structlog.get_logger()


class BadDefaults(Exception):
    """One line: the default algorithm or its parameters are not what the worker serves."""


class Scheduler:
    """Takes requests, gives back their streams. Everything runs on one event loop."""

    def __init__(
        self,
        folder: ModelFolder,
        settings: SchedulerSettings,
        algorithm_params: Mapping[str, float],
        connect: Callable[[str, str], Link] = WorkerLink,
        hold_events_s: float = HOLD_S,
        resolve: Resolve = discovery.resolve,
        served_models: Sequence[ServedModel] = (),
        metrics: SchedulerMetrics | None = None,
    ) -> None:
        """`connect` makes the link to a worker from its target and our scheduler id; `hold_events_s`: see Outbox;
        `resolve` gives the targets of a name; `served_models`: names for what must be served too."""
        self.folder = folder
        self.settings = settings
        self.scheduler_id = secrets.token_hex(8)
        self.counters = api.SchedulerCounters()
        self.metrics = metrics or SchedulerMetrics()
        self._started_at = time.monotonic()
        self.live: dict[str, Stream] = {}  # by their name
        self.watches = Watches()
        self.is_closing = False
        self.queue = RequestQueue(
            settings.max_queued_requests,
            self._wake_loops,
            max_queued_per_client=settings.max_queued_requests_per_client,
            max_running_per_client=settings.max_running_requests_per_client,
        )
        self._codec = TextCodec(folder.path, special_ids=(folder.mask_token_id, *folder.stop_token_ids))
        self._outbox = Outbox(hold_events_s)
        self._algorithm = settings.dllm_algorithm or folder.algorithms[0]
        self._algorithm_params = algorithm_params
        self._served_models = served_models
        self._rules: Rules | None = None
        self._doubtful: dict[str, str] = {}  # algorithms that may not fit and are not warned of yet, and why
        self._rules_known = asyncio.Event()
        self._connect, self._resolve = connect, resolve
        self._attempts, self._generations = itertools.count(1), itertools.count(1)
        self.loops: list[RoundLoop] = []
        self._driving: dict[RoundLoop, asyncio.Task[None]] = {}
        for target in settings.worker_targets:
            self._add_loop(target)

    async def run(self) -> None:
        """Drive all workers; returns only by an exception, which is a bug."""
        async with asyncio.TaskGroup() as group:

            def start(loop: RoundLoop) -> None:
                self._driving[loop] = group.create_task(self._drive(loop))

            for loop in self.loops:
                start(loop)
            if names := self.settings.worker_names:
                fixed = set(self.settings.worker_targets)
                await discovery.follow(
                    names,
                    self.settings.resolve_interval_s,
                    self._resolve,
                    lambda targets: self._set_targets(fixed | targets, start),
                )

    async def _drive(self, loop: RoundLoop) -> None:
        """A loop's life; it ends when its address was left."""
        try:
            await loop.run()
        finally:
            self.loops.remove(loop)
            del self._driving[loop]
            await self._free_rows(loop)
            await loop.link.close()

    async def _free_rows(self, loop: RoundLoop) -> None:
        """At a loop's end let the worker free what it holds of ours, and not wait for the lease to run out. One that
        does not answer in time is left to do that."""
        if loop.is_ready:
            with contextlib.suppress(WorkerLost, TimeoutError):
                async with asyncio.timeout(FREE_ROWS_S):
                    await loop.link.heartbeat(next(self._generations))

    def _set_targets(self, targets: set[str], start: Callable[[RoundLoop], None]) -> None:
        """Workers are at these addresses now. One whose address is gone is left: with its last row while it answers,
        else at once. One that is back before that stays."""
        for loop in self.loops:
            is_leaving = loop.link.target not in targets
            if is_leaving != loop.is_leaving:
                log.info("worker_leaves" if is_leaving else "worker_stays", target=loop.link.target)
            loop.is_leaving = is_leaving
            if is_leaving and not loop.is_ready:
                self._driving[loop].cancel()
            loop.wake()
        for target in sorted(targets - {loop.link.target for loop in self.loops}):
            log.info("worker_joins", target=target)
            start(self._add_loop(target))

    def _add_loop(self, target: str) -> RoundLoop:
        loop = RoundLoop(
            link=self._connect(target, self.scheduler_id),
            queue=self.queue,
            settings=self.settings,
            counters=self.counters,
            metrics=self.metrics,
            on_info=self._check_worker,
            attempts=self._attempts,
            generations=self._generations,
            watches=self.watches,
            loops=self.loops,
        )
        self.loops.append(loop)
        return loop

    @property
    def has_worker(self) -> bool:
        return any(loop.is_ready and not loop.is_leaving for loop in self.loops)

    async def submit(self, message: api.GenerateRequest, client: str = "") -> Stream:
        """Check a client's request and queue its samples; its first event is Started. Raises a ServiceError. Until a
        first worker has told what it can do, this waits. One that resumes the live one of its id takes its place."""
        called_at = asyncio.get_running_loop().time()
        with self.queue.place(client):
            await self._rules_known.wait()
        if self.is_closing:
            raise Unavailable("the scheduler is shutting down; send the request again")
        assert self._rules is not None
        spec = parse_generate(message, self._rules)
        if not spec.request_id:
            spec = dataclasses.replace(spec, request_id=f"fdfo-{secrets.token_hex(8)}")
        name = live_name(client, spec.request_id)
        stream = self._new_stream(spec, client, name)
        older = self.live.get(name)
        if older is not None and not (spec.past and older.request_part == stream.request_part):
            raise AlreadyLive(spec.request_id)
        self._warn_of_misfit(spec.algorithm)
        queue_position = self._enqueue(stream)
        self.metrics.submitted(stream, called_at)
        if older is not None:
            self.interrupt(older, TakenOver("another call resumed this request"))
        self.live[name] = stream
        stream.start(queue_position)
        return stream

    def _enqueue(self, stream: Stream) -> int:
        """Queue the samples that are not over; returns how many requests are before them. A request that ran elsewhere
        goes to the front of its class. Raises QueueFull.

        A prompt with a whole block is computed once: the samples after the first are held until it is in the cache.
        """
        waiting = [sample for sample in stream.samples if sample.committer.finish is None]
        if waiting and len(waiting[0].spec.prompt_ids) >= self.folder.block_size:
            waiting, stream.held = waiting[:1], waiting[1:]
        ran_elsewhere = any(sample.committed_ids for sample in stream.samples)
        return self.queue.push(waiting, at_front=ran_elsewhere) if waiting else 0

    def _wake_loops(self) -> None:
        for loop in self.loops:
            loop.wake()

    def _on_park(self, stream: Stream) -> None:
        """A stream was parked or goes on."""
        if stream.is_parked:
            self.counters.times_parked += 1
            log.info("request_parked", request_id=stream.request_id, unread_bytes=stream.buffered_bytes)
        else:
            self._wake_loops()

    def _warn_of_misfit(self, algorithm: str) -> None:
        """Say once that an algorithm may not fit the checkpoint: no configuration tells for sure."""
        if hint := self._doubtful.pop(algorithm, None):
            log.warning("algorithm_may_not_fit", algorithm=algorithm, hint=hint)

    def _new_stream(self, spec: GenerateSpec, client: str, name: str) -> Stream:
        """The samples of a request, as new or where another call left them. They differ in their index only, which
        every draw depends on beside the seed. Raises InvalidField."""
        seed = secrets.randbits(63) if spec.sampling.seed is None else spec.sampling.seed
        state = resume_pb2.ResumeState(request=request_part(spec, seed, self.folder.fingerprint))
        stream = Stream(
            spec.request_id,
            self._outbox,
            name,
            state.SerializeToString(deterministic=True),
            client=client,
            max_buffer_bytes=self.settings.max_stream_buffer_bytes,
            on_park=self._on_park,
            counters=self.counters,
        )
        stream.samples = [self._new_request(spec, seed, stream, index) for index in range(spec.num_samples)]
        for index, past in spec.past.items():
            stream.samples[index].resume(past)
        return stream

    def _new_request(self, spec: GenerateSpec, seed: int, stream: Stream, sample_index: int) -> Request:
        stop_ids = () if spec.ignore_eos else self.folder.stop_token_ids
        return Request(
            spec=spec,
            seed=seed,
            block_size=self.folder.block_size,
            mask_token_id=self.folder.mask_token_id,
            committer=OutputCommitter(
                self._codec,
                model_stop_ids=self.folder.stop_token_ids,
                request_stop_ids=spec.request_stop_ids,
                stop_strings=spec.stop_strings,
                ignore_eos=spec.ignore_eos,
                max_new_tokens=spec.max_new_tokens,
            ),
            worker_stop_ids=sorted({*stop_ids, *spec.request_stop_ids}),
            stream=stream,
            sample_index=sample_index,
        )

    def abort(self, request_id: str, client: str = "") -> bool:
        """End a client's own request with reason ABORT, in whatever phase; False if it has none of this id live."""
        stream = self.live.get(live_name(client, request_id))
        return stream is not None and self._abort(stream)

    def _abort(self, stream: Stream) -> bool:
        if stream.is_finished:
            return False
        for sample in stream.samples:
            sample.finish(api.Finished(reason=api.FINISH_REASON_ABORT))
        self.counters.requests_aborted += 1
        self._drop(stream)
        return True

    def leave(self, stream: Stream) -> None:
        """The stream's reader is gone or has read the last event."""
        self._abort(stream)
        self.metrics.left(stream, asyncio.get_running_loop().time())
        if stream.timer is not None:
            stream.timer.cancel()
        for sample in stream.samples:
            self.queue.remove(sample)
        self.counters.requests_finished += 1
        if self.live.get(stream.name) is stream:  # not one that took its place
            del self.live[stream.name]

    def interrupt(self, stream: Stream, error: ServiceError) -> None:
        """End it with an error that its client may go on from, with all work for it."""
        stream.interrupt(error)
        self._drop(stream)

    def end_within(self, stream: Stream, seconds: float | None) -> None:
        """End the stream with DeadlineOver before so many seconds have passed, if it has not ended by then."""
        if seconds is not None:
            delay_s = max(seconds - DEADLINE_MARGIN_S, seconds / 2)
            stream.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        self.counters.requests_expired += not stream.is_finished
        self.interrupt(stream, DeadlineOver("the deadline is here; what was done is in the messages before"))

    async def close(self, grace_s: float) -> None:
        """Take no new request; let the live ones finish within the grace time, then end the rest with an error."""
        self.is_closing = True
        self._rules_known.set()
        deadline = asyncio.get_running_loop().time() + grace_s
        while self.live and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(CLOSE_POLL_S)
        for stream in self.live.values():
            self.interrupt(stream, Unavailable("the scheduler is shutting down; go on at another with `resumes`"))
        self.watches.close()

    def _drop(self, stream: Stream) -> None:
        stream.held.clear()
        for sample in stream.samples:
            self.queue.remove(sample)
            for loop in self.loops:
                loop.release(sample)

    def _check_worker(self, info: pb.GetWorkerInfoResponse) -> None:
        """Learn what a worker can do; raises ValueError for one that does not serve our model,
        and BadDefaults when it serves the model but not what we were started with."""
        check_fingerprint(info.fingerprint, self.folder.fingerprint)
        folder = dataclasses.replace(self.folder, fingerprint=info.fingerprint)  # with its weights, if we have none
        others = [loop.info for loop in self.loops if loop.is_ready and loop.info is not None]
        if self._rules is None:
            self._doubtful = offers.doubtful(info, self.folder.algorithms)
        rules = Rules(
            codec=self._codec,
            folder=folder,
            default_algorithm=self._algorithm,
            default_params=self._algorithm_params,
            algorithms=offers.algorithms(info),
            max_tokens_in_pool=min(pool.pages.total * pool.page_size for pool in (info, *others)),
            fdfo=self.settings.dllm_fdfo,
        )
        if fault := offers.bad_defaults(rules, self._served_models):
            raise (BadDefaults if self._rules is None else ValueError)(fault)  # ValueError: others serve them
        if self._rules is None:
            self._warn_of_misfit(self._algorithm)
        self._rules, self.folder = rules, folder
        self._rules_known.set()

    def info(self) -> api.GetServerInfoResponse:
        self.counters.requests_rejected = self.queue.num_refused
        return api.GetServerInfoResponse(
            scheduler_id=self.scheduler_id,
            served_model_name=self.settings.model_name,
            fingerprint=self.folder.fingerprint,
            block_size=self.folder.block_size,
            context_length=self.folder.context_length,
            num_tokens=self.folder.num_tokens,
            algorithm=self._algorithm,
            fdfo=self.settings.dllm_fdfo,
            queued=len(self.queue),
            running=sum(len(loop.running) for loop in self.loops),
            max_queued_requests=self.settings.max_queued_requests,
            workers=[_worker_state(loop) for loop in self.loops],
            counters=self.counters,
            rounds_in_flight=self.settings.rounds_in_flight,
            uptime_s=time.monotonic() - self._started_at,
            unix_time_s=time.time(),
        )


def _worker_state(loop: RoundLoop) -> api.WorkerState:
    info = loop.info or pb.GetWorkerInfoResponse()
    return api.WorkerState(
        target=loop.link.target,
        worker_epoch=loop.epoch,
        ready=loop.is_ready and not loop.is_leaving,
        rows=len(loop.running),
        max_rows=info.max_running_requests,
        pages_free=loop.rows.pages.free,
        pages_cached=loop.rows.pages.cached,
        pages_held=loop.rows.pages.held,
        pages_total=loop.rows.pages.total,
        last_error=loop.link.last_error,
        version=info.version,
        device=info.device,
        dtype=info.dtype,
        page_size=info.page_size,
    )

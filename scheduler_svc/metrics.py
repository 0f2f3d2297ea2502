"""The scheduler's Prometheus series; docs/metrics.md says what each means.

What is counted anyway is read at a scrape. Observed in place are only times, and a few counts that nothing else needs.
All times are of the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from common import __version__
from common.call_metrics import CallMetrics
from common.metrics import OnEventLoop, counter, counters, gauge, gauges, info, new_registry
from fdfo.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from scheduler_svc.core import Scheduler
    from scheduler_svc.request import Request
    from scheduler_svc.stream import Stream
    from scheduler_svc.workers import WorkerLost

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
BLOCK_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50)
ROUND_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 100)
FORWARDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
LOSSES = ("death", "draining", "stale_generation", "refused", "silence")


class SchedulerMetrics:
    """One for the process. `calls` is for the gRPC servers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or new_registry()
        self.calls = CallMetrics(self.registry)

        def seconds(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fdfo_scheduler_{name}_seconds", meaning, buckets=buckets, registry=self.registry)

        self._admission_wait = seconds("admission_wait", "From a call to its first sample's start.", REQUEST_BUCKETS_S)
        self._first_token = seconds("time_to_first_token", "From a call to its first done text.", REQUEST_BUCKETS_S)
        self._request = seconds("request", "From a call to the end of its answer.", REQUEST_BUCKETS_S)
        self._block = seconds("block", "From a sample's start or last block to its next block.", BLOCK_BUCKETS_S)
        self._round_trip = seconds("round_trip", "From sending a round to its reply.", ROUND_BUCKETS_S)
        self._block_forwards = Histogram(
            "fdfo_scheduler_block_forwards", "Forwards of a block.", buckets=FORWARDS, registry=self.registry
        )
        self._round_forwards = Histogram(
            "fdfo_scheduler_round_forwards", "Forwards of a round.", buckets=FORWARDS, registry=self.registry
        )
        self._losses = Counter(
            "fdfo_scheduler_worker_losses_total", "Workers lost, by cause.", ["cause"], registry=self.registry
        )
        for cause in LOSSES:
            self._losses.labels(cause)
        self._resumed = Counter(
            "fdfo_scheduler_requests_resumed_total", "Requests that began elsewhere.", registry=self.registry
        )
        self._prompt_tokens = Counter(
            "fdfo_scheduler_prompt_tokens_total", "Prompt tokens of started samples.", registry=self.registry
        )
        self._cached_tokens = Counter(
            "fdfo_scheduler_cached_tokens_total", "Of these, found in a prefix cache.", registry=self.registry
        )

    # A request's life -------------------------------------------------------------------------------------------

    def submitted(self, stream: Stream, called_at: float) -> None:
        """The call came at this time, and was taken."""
        stream.called_at = called_at
        if stream.samples[0].spec.past:
            self._resumed.inc()

    def started(self, sample: Request, now: float) -> None:
        """A worker gets the sample; counts only the first time."""
        if sample.block_began_at is None:
            sample.block_began_at, sample.block_began_forwards = now, sample.forwards
        if not sample.stream.has_started:
            sample.stream.has_started = True
            self._admission_wait.observe(now - sample.stream.called_at)

    def prefix_known(self, sample: Request) -> None:
        """How much of its prompt was cached at its first start."""
        self._prompt_tokens.inc(len(sample.spec.prompt_ids))
        self._cached_tokens.inc(sample.cached_tokens or 0)

    def block_done(self, sample: Request, now: float) -> None:
        """One more block is committed."""
        assert sample.block_began_at is not None, "it was started"
        self._block.observe(now - sample.block_began_at)
        self._block_forwards.observe(sample.forwards - sample.block_began_forwards)
        sample.block_began_at, sample.block_began_forwards = now, sample.forwards
        stream = sample.stream
        if not stream.has_published and sample.published_tokens > sample.published_before:
            stream.has_published = True
            self._first_token.observe(now - stream.called_at)

    def left(self, stream: Stream, now: float) -> None:
        """The call is over. Only whole answers are timed."""
        if all(sample.committer.finish is not None for sample in stream.samples):
            self._request.observe(now - stream.called_at)

    # Workers ----------------------------------------------------------------------------------------------------

    def round_replied(self, seconds: float, work: pb.RoundWork) -> None:
        """A round took so long, from the sending to the reply."""
        self._round_trip.observe(seconds)
        self._round_forwards.observe(work.forwards)

    def worker_lost(self, lost: WorkerLost) -> None:
        """What a worker held of ours is void."""
        cause = "silence" if lost.refusal is None else lost.refusal.lower()
        cause = "death" if lost.is_death else cause if cause in LOSSES else "refused"
        self._losses.labels(cause).inc()

    # At a scrape ------------------------------------------------------------------------------------------------

    def read_from(self, scheduler: Scheduler) -> None:
        """From now on read these at every scrape; in their event loop."""
        self.registry.register(OnEventLoop(lambda: _read(scheduler)))


def _read(scheduler: Scheduler) -> Iterator[Metric]:
    state = scheduler.info()
    totals = state.counters
    facts = {"version": __version__, "fingerprint": state.fingerprint, "model": state.served_model_name}
    ready = [worker for worker in state.workers if worker.ready]
    held, pages = sum(worker.pages_held for worker in ready), sum(worker.pages_total for worker in ready)
    rows = {"denoise": totals.denoise_row_forwards, "waiting": totals.waiting_row_forwards}
    parked = sum(stream.is_parked for stream in scheduler.live.values())
    by_ready = {"ready": len(ready), "not_ready": len(state.workers) - len(ready)}

    def total(name: str, meaning: str, value: float) -> Metric:
        return counter(f"fdfo_scheduler_{name}_total", meaning, value)

    yield info("fdfo_scheduler_info", "What this scheduler serves.", facts)
    yield gauge("fdfo_scheduler_queued_requests", "Samples that wait for a row.", state.queued)
    yield gauge("fdfo_scheduler_queued_blocks", "Blocks they still need at most.", sum(map(_blocks, scheduler.queue)))
    yield gauge("fdfo_scheduler_running_requests", "Samples that have a row.", state.running)
    yield gauge("fdfo_scheduler_live_requests", "Calls that are open.", len(scheduler.live))
    yield gauge("fdfo_scheduler_parked_requests", "Calls whose client must read first.", parked)
    yield gauges("fdfo_scheduler_workers", "Addresses of workers.", "state", by_ready)
    yield gauge(
        "fdfo_scheduler_kv_usage_ratio", "Share of the ready workers' pages held.", held / pages if pages else 0
    )
    yield total("requests_left", "Calls that ended, however.", totals.requests_finished)
    yield total("requests_aborted", "Of these, aborted.", totals.requests_aborted)
    yield total("requests_expired", "Calls that reached their deadline.", totals.requests_expired)
    yield total("requests_rejected", "Calls refused by a full queue.", totals.requests_rejected)
    yield total("requests_parked", "How often a call was parked.", totals.times_parked)
    yield total("restarts", "Samples started again after a lost worker.", totals.restarts)
    yield total("preemptions", "Rows released to go on later.", totals.preemptions)
    yield total("blocks", "Blocks done.", totals.blocks_done)
    yield total("published_tokens", "Tokens sent to clients.", totals.published_tokens)
    yield total("prefill_tokens", "Prompt tokens computed.", totals.prefill_tokens)
    yield total("rounds", "Rounds that replied.", totals.rounds)
    yield total("forwards", "Forwards of these rounds.", totals.forwards)
    yield counters("fdfo_scheduler_row_forwards_total", "Rows times forwards by kind.", "kind", rows)
    yield total("device_seconds", "Time of the devices in these rounds.", totals.device_ms / 1000)
    yield total("host_seconds", "Time spent in planning and applying rounds.", totals.host_ms / 1000)


def _blocks(sample: Request) -> int:
    """Blocks that the sample still needs at most."""
    num_tokens = len(sample.spec.prompt_ids) + sample.spec.max_new_tokens
    return -(-num_tokens // sample.block_size) - sample.block_index

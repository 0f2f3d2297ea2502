"""The worker's Prometheus series; docs/metrics.md says what each means.

What the loop and the executor count is read at a scrape. Histograms are observed on the gRPC side, a round at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from common import __version__
from common.call_metrics import CallMetrics
from common.metrics import OnEventLoop, counter, counters, gauge, gauges, info, new_registry
from common.model_folder import ModelFolder
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor

FORWARDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
WAIT_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


class WorkerMetrics:
    """One for the process, made before the model loads. `calls` is for the gRPC server."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or new_registry()
        self.calls = CallMetrics(self.registry)
        self.is_stalled = False
        self._round_forwards = Histogram(
            "fdfo_worker_round_forwards", "Forwards of a round.", buckets=FORWARDS, registry=self.registry
        )
        self._round_wait = Histogram(
            "fdfo_worker_round_wait_seconds",
            "Time from the arrival of a round to its begin.",
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )

    def round_replied(self, work: pb.RoundWork) -> None:
        """A round ended with a reply."""
        self._round_forwards.observe(work.forwards)
        self._round_wait.observe(work.queued_ms / 1000)

    def loaded(self, executor: Executor, loop: DenoiseLoop, folder: ModelFolder) -> None:
        """From now on read these at every scrape; in their event loop."""
        self.registry.register(OnEventLoop(lambda: self._read(executor, loop, folder)))

    def _read(self, executor: Executor, loop: DenoiseLoop, folder: ModelFolder) -> Iterator[Metric]:
        state, config = executor.state, loop.config
        pages, totals = state.pages, state.counters
        facts = {"version": __version__, "fingerprint": folder.fingerprint, "architecture": folder.architecture}
        facts |= {"device": str(loop.runner.device), "dtype": str(loop.runner.dtype).removeprefix("torch.")}
        by_state = {"free": pages.free, "cached": pages.cached, "held": pages.held}
        by_kind = {
            "denoise": totals.denoise_row_forwards,
            "prefill": state.prefill_row_forwards,
            "waiting": totals.waiting_row_forwards,
        }
        yield info("fdfo_worker_info", "What this worker is.", facts)
        yield gauge("fdfo_worker_slots_used", "Rows that have a slot.", state.slots_used)
        yield gauge("fdfo_worker_slots_max", "Rows that can have a slot.", config.num_slots)
        yield gauges("fdfo_worker_kv_pages", "Pages of the KV pool by state.", "state", by_state)
        yield gauge("fdfo_worker_kv_pages_max", "Pages of the KV pool.", pages.total)
        yield gauge("fdfo_worker_kv_usage_ratio", "Share of the KV pool that rows hold.", pages.held / pages.total)
        yield gauge("fdfo_worker_rounds_waiting", "Rounds behind those that run.", state.rounds_waiting)
        yield gauge("fdfo_worker_schedulers", "Schedulers that have a lease.", state.schedulers)
        yield gauge("fdfo_worker_draining", "1 while the worker drains.", state.draining)
        yield gauge("fdfo_worker_stalled", "1 while the device thread makes no progress.", self.is_stalled)
        yield counter("fdfo_worker_rounds_total", "Rounds that ended.", totals.rounds)
        yield counter("fdfo_worker_forwards_total", "Forwards of the model.", totals.forwards)
        yield counters("fdfo_worker_row_forwards_total", "Rows times forwards by kind.", "kind", by_kind)
        yield counter("fdfo_worker_blocks_total", "Blocks that became done.", totals.blocks_done)
        yield counter(
            "fdfo_worker_block_tokens_total", "Positions of done blocks.", totals.blocks_done * config.block_size
        )
        yield counter("fdfo_worker_prefill_tokens_total", "Prompt tokens computed.", totals.prefill_tokens)
        yield counter("fdfo_worker_device_busy_seconds_total", "Time of the device.", totals.device_ms / 1000)
        yield counter("fdfo_worker_host_seconds_total", "Time beside the device's, while rows run.", executor.host_s)
        yield counter("fdfo_worker_expired_leases_total", "Schedulers given up for silence.", totals.expired_leases)
        yield counter(
            "fdfo_worker_refused_generations_total", "Calls of an old generation refused.", totals.refused_generations
        )

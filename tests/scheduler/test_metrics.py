"""What the scheduler's Prometheus series say of requests and workers whose times are known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import QueueFull
from scheduler_svc.metrics import LOSSES, SchedulerMetrics, _read
from scheduler_svc.workers import WorkerLost
from tests.scheduler.in_memory import FORWARD_S, Bench, TimedLink, play, play_timed
from tests.scheduler.test_resume import Reader, generate, new_bench
from tests.worker.scripted import BLOCK, effort, make_loop


def series(bench: Bench) -> dict[tuple[str, ...], float]:
    """All values by name, without the prefix, and values of labels; to be called in the event loop."""
    registered = bench.scheduler.metrics.registry.collect()
    return {
        (sample.name.removeprefix("fdfo_scheduler_"), *sample.labels.values()): sample.value
        for family in [*_read(bench.scheduler), *registered]
        for sample in family.samples
    }


def timed_bench(**settings: Any) -> Bench:
    return Bench(make_loop(num_slots=1), link_type=TimedLink, **settings)


def test_times_of_a_request() -> None:
    """Two requests on one row: the second one's admission waits for the whole first one, a block takes its forwards,
    and text comes with the first block."""
    bench = timed_bench()

    async def scene() -> None:
        first = await bench.submit("a", [7] * BLOCK + effort(4), 2 * BLOCK - 1)
        second = await bench.submit("b", effort(4), 10)
        await bench.read(first)
        took_s = asyncio.get_running_loop().time()
        await bench.read(second)
        now = series(bench)
        assert now["admission_wait_seconds_count",] == 2
        assert took_s - 1 < now["admission_wait_seconds_sum",] < took_s + 1
        assert now["admission_wait_seconds_bucket", "0.1"] == 1, "the first one started at once"
        assert now["block_seconds_count",] == now["block_forwards_count",] == now["blocks_total",] == 3
        assert now["block_forwards_sum",] == now["row_forwards_total", "denoise"]
        assert now["block_seconds_sum",] >= now["block_forwards_sum",] * FORWARD_S
        assert now["time_to_first_token_seconds_count",] == now["request_seconds_count",] == 2
        assert now["time_to_first_token_seconds_sum",] < now["request_seconds_sum",]
        assert now["round_trip_seconds_count",] == now["rounds_total",] == now["round_forwards_count",]
        assert now["round_forwards_sum",] == now["forwards_total",]
        assert (now["prompt_tokens_total",], now["cached_tokens_total",]) == (BLOCK + 2, 0)
        assert now["published_tokens_total",] == 2 * BLOCK - 1 + 10
        assert (now["requests_left_total",], now["requests_aborted_total",]) == (2, 0)

    play_timed(bench, scene)


def test_gauges_of_a_queue() -> None:
    """While one runs and others wait: how many, how many blocks they may still need, what is refused, parked and held;
    and nothing of it is left afterwards."""
    bench = timed_bench(max_queued_requests=2, max_stream_buffer_bytes=200)

    async def scene() -> None:
        running = await bench.submit("a", effort(9), 300)
        while not bench.scheduler.loops[0].running:
            await asyncio.sleep(0.01)
        waiting = [await bench.submit(name, [7] * BLOCK, 3 * BLOCK + 1) for name in "bc"]
        with pytest.raises(QueueFull):
            await bench.submit("d", effort(2))
        await asyncio.sleep(20 * FORWARD_S)
        wanted = {
            ("queued_requests",): 2,
            ("queued_blocks",): 2 * 4,
            ("running_requests",): 1,
            ("live_requests",): 3,
            ("parked_requests",): 1,
            ("workers", "ready"): 1,
            ("workers", "not_ready"): 0,
            ("requests_rejected_total",): 1,
            ("requests_parked_total",): 1,
        }
        now = series(bench)
        assert {name: now[name] for name in wanted} == wanted
        assert 0 < now["kv_usage_ratio",] < 1
        for stream in (running, *waiting):
            bench.scheduler.leave(stream)
        await asyncio.sleep(20 * FORWARD_S)
        now = series(bench)
        gone = ("queued_requests", "queued_blocks", "running_requests", "live_requests", "parked_requests")
        assert [now[name,] for name in gone] == [0] * 5
        assert now["requests_aborted_total",] == 3
        assert now["request_seconds_count",] == 0, "none came to its end"

    play_timed(bench, scene)


def test_a_prefix_that_was_cached_is_counted() -> None:
    """The second of two equal prompts finds its whole block, and says so once."""
    bench = timed_bench()

    async def scene() -> None:
        for name in "ab":
            await bench.read(await bench.submit(name, [7] * BLOCK + effort(3), 5))
        now = series(bench)
        assert (now["prompt_tokens_total",], now["cached_tokens_total",]) == (2 * (BLOCK + 1), BLOCK)

    play_timed(bench, scene)


def test_what_goes_on_from_elsewhere_is_counted() -> None:
    """A request that another scheduler began counts as resumed; a new one does not."""
    reader = Reader(generate())
    benches = new_bench(max_forwards=1), new_bench()

    async def begin() -> None:
        await reader.read(benches[0], 2)
        assert series(benches[0])["requests_resumed_total",] == 0

    async def go_on() -> None:
        await reader.read(benches[1])
        assert series(benches[1])["requests_resumed_total",] == 1

    play(benches[0], begin)
    play(benches[1], go_on)


def test_a_lost_worker_is_counted_with_its_rows() -> None:
    """Its death, and each sample that starts again; the block's time goes on over the loss."""
    bench = timed_bench()

    async def scene() -> None:
        stream = await bench.submit("a", effort(20), 10)
        await asyncio.sleep(10 * FORWARD_S)
        link = bench.links[0]
        link.is_dead = True
        await asyncio.sleep(5.0)
        assert series(bench)["workers", "ready"] == 0
        link.is_dead = False
        await bench.read(stream)
        now = series(bench)
        assert (now["worker_losses_total", "death"], now["restarts_total",]) == (1, 1)
        assert now["block_seconds_sum",] > 5.0
        assert now["admission_wait_seconds_count",] == 1, "a second start is no admission"

    play_timed(bench, scene)


def test_causes_of_losses() -> None:
    """Each way to lose a worker has its label, and all labels are there from the start."""
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    for lost in (
        WorkerLost("restarted", is_death=True),
        WorkerLost("refused", is_death=True, refusal="EPOCH_CHANGED"),
        WorkerLost("drains", refusal="DRAINING"),
        WorkerLost("an old generation", refusal="STALE_GENERATION"),
        WorkerLost("a gap", refusal="ROUND_GAP"),
        WorkerLost("no answer"),
    ):
        metrics.worker_lost(lost)
    counts = {
        cause: registry.get_sample_value("fdfo_scheduler_worker_losses_total", {"cause": cause}) for cause in LOSSES
    }
    assert counts == {"death": 2, "draining": 1, "stale_generation": 1, "refused": 1, "silence": 1}

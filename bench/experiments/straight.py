"""Rounds sent straight to a worker."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import BLOCK, Case, Figures, Progress, Scale, Target, derived, interleaved, ratios
from bench.rounds import measure_rounds, medians
from bench.services import SIMULATED, WITH_CACHE, Services


def in_place(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Rows that keep slot and pages from round to round, against rows that are released and started again, with and
    without a prefix cache that has their KV."""
    num_rows = 16
    (worker,) = services.workers(SIMULATED, num_rows)
    (cached_worker,) = services.workers(SIMULATED, num_rows, 1, WITH_CACHE)

    def measure(worker: str, restarts: bool) -> Figures:
        trips = asyncio.run(measure_rounds(worker, num_rows, scale.rounds, num_blocks=4, restarts=restarts))
        continuing = [trip for trip in trips if trip.num_new_blocks == 0]
        return {
            "allocator calls/round": statistics.mean(trip.allocator_calls for trip in continuing),
            "host ms/round": statistics.median(trip.overhead_ms + trip.build_ms for trip in trips),
            "device ms/round": statistics.median(trip.device_ms for trip in trips),
            "tokens/s": BLOCK * sum(trip.num_done for trip in trips) / sum(trip.wall_ms for trip in trips) * 1000,
        }

    kept, restarted, restarted_with_cache = interleaved(
        scale,
        progress,
        {
            "in place, 16 rows": partial(measure, worker, False),
            "started again, 16 rows": partial(measure, worker, True),
            "started again with prefix cache": partial(measure, cached_worker, True),
        },
    ).values()
    yield derived(kept.name, kept.runs, Target("allocator calls/round", 0.0, at_least=False))
    yield from (restarted, restarted_with_cache)
    yield derived("in place / started again", {"ratio": ratios(kept, restarted, "tokens/s")})
    yield derived("in place / started again with cache", {"ratio": ratios(kept, restarted_with_cache, "tokens/s")})


def round_trip(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """What a RunRound of one forward over 64 rows takes beyond the device, and where that goes; p50 of each run."""
    (worker,) = services.workers(SIMULATED, 64)

    def measure() -> Figures:
        trips = asyncio.run(measure_rounds(worker, 64, scale.rounds, num_blocks=16))
        return {name.replace("_", " "): value for name, value in medians(trips).items()}

    (case,) = interleaved(scale, progress, {"RunRound, 64 rows": measure}).values()
    yield derived(case.name, case.runs, Target("overhead ms", 2.0, at_least=False))

"""What the prefix cache saves, and what it costs."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import OUTPUT_TOKENS, Case, Figures, Progress, Scale, Target, derived, interleaved, ratios
from bench.loads import random_prompts, run_shared
from bench.rounds import NUM_WARM_ROUNDS, measure_rounds
from bench.services import PLAIN_COMMIT, SIMULATED, WITH_CACHE, Services

NUM_ROWS = 64
SHARED_TOKENS, OWN_TOKENS, NUM_REQUESTS = 512, 16, 16


def prefix_cache(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """512 prompt tokens that 17 requests share, 16 requests sent after the first one's first block; and 64 rows that
    share nothing, in rounds sent straight to a worker."""
    cold_worker, caching_worker = (
        services.workers(SIMULATED, NUM_ROWS, 1, flags)[0] for flags in (PLAIN_COMMIT, WITH_CACHE)
    )
    # A cache has what a run before had, so every run has other prompts; those of both sides are the same.
    seeds = {name: itertools.count(1) for name in ("cold", "cached", "off", "on")}

    def sharing(name: str, target: str) -> Figures:
        seed = next(seeds[name])
        (shared,) = random_prompts(1, SHARED_TOKENS, seed)
        first, *rest = (shared + own for own in random_prompts(1 + NUM_REQUESTS, OWN_TOKENS, seed))
        run = run_shared(target, first, rest, OUTPUT_TOKENS)
        return {"prefill tokens": float(run.prefill_tokens), "TTFT p50 ms": statistics.median(run.ttft_ms)}

    with services.schedulers(SIMULATED, [([cold_worker], []), ([caching_worker], [])]) as (cold, caching):
        without, with_cache = interleaved(
            scale,
            progress,
            {
                "512 shared tokens, cache off": partial(sharing, "cold", cold),
                "512 shared tokens, cache on": partial(sharing, "cached", caching),
            },
        ).values()
    yield from (without, with_cache)
    yield derived(
        "512 shared tokens, on / off",
        {
            "prefill ratio": ratios(with_cache, without, "prefill tokens"),
            "TTFT ratio": ratios(with_cache, without, "TTFT p50 ms"),
        },
        Target("prefill ratio", 1 / 8, at_least=False),
    )

    def unshared(name: str, worker: str) -> Figures:
        cpu_before = services.cpu_ms(worker)
        trips = asyncio.run(measure_rounds(worker, NUM_ROWS, scale.rounds, num_blocks=16, seed=next(seeds[name])))
        cpu_ms = services.cpu_ms(worker) - cpu_before
        return {
            "host ms/round": statistics.median(trip.overhead_ms + trip.build_ms for trip in trips),
            "CPU ms/round": cpu_ms / (len(trips) + NUM_WARM_ROUNDS),
        }

    off, on = interleaved(
        scale,
        progress,
        {
            "nothing shared, cache off": partial(unshared, "off", cold_worker),
            "nothing shared, cache on": partial(unshared, "on", caching_worker),
        },
    ).values()
    yield from (off, on)
    yield derived(
        "nothing shared, on / off",
        {"host ratio": ratios(on, off, "host ms/round"), "CPU ratio": ratios(on, off, "CPU ms/round")},
        Target("CPU ratio", 1.1, at_least=False),
    )

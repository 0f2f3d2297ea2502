"""Closed loops against running services, and what one run of them gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fdfo_client._types import Committed, Event, ServerCounters
from fdfo_client.bench.load import Load, Stream
from fdfo_client.bench.measure import World, connect
from fdfo_client.bench.metrics import ServerFigures, block_steps, server_figures, summarize, ttft_ms
from fdfo_client.bench.workload import closed_items

RANDOM_IDS = range(3, 62)  # text of the simulated models
HOLDING_SEED = 27  # a prompt whose first block draws 33 forwards, the most there are


@dataclass(frozen=True)
class Run:
    """One closed loop: its speed, the servers' figures, and the forwards of each request's blocks."""

    tokens_per_s: float
    server: ServerFigures
    draws: list[list[int]]


@dataclass(frozen=True)
class Steady:
    """What happened while all places were taken: the servers' figures, and what a probe grew by."""

    wall_s: float
    server: ServerFigures
    probed: float


@dataclass(frozen=True)
class Shared:
    """Requests that came after another's first block: prompt tokens computed for all, the other's too, and the times
    to their first tokens in milliseconds."""

    prefill_tokens: int
    ttft_ms: list[float]


def random_prompts(number: int, num_tokens: int, seed: int = 1) -> list[list[int]]:
    """The same prompts for the same arguments."""
    generator = random.Random(seed)
    return [generator.choices(RANDOM_IDS, k=num_tokens) for _ in range(number)]


def run_closed(
    target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int, *, together: bool = False
) -> Run:
    """Send all prompts, so many at a time, each answered in full. Raises RuntimeError if a request fails.

    together: they start together. In lockstep the first request to arrive would run a round alone while the others
    wait; one before it, which is not measured, keeps them all waiting, and the time begins when it has ended.
    """
    return asyncio.run(_run_closed(target, prompts, output_tokens, concurrency, together))


async def _run_closed(
    target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int, together: bool
) -> Run:
    options = _options(prompts, output_tokens)
    clock = asyncio.get_running_loop().time
    async with connect([target]) as world:
        start = asyncio.create_task(_start_of(world, await _held_back(world.stream) if together else None))
        load = Load(world.stream)
        await load.run(closed_items(options), concurrency=concurrency)
        ended_at = clock()
        started_at, before = await start
        wall_s = ended_at - started_at
        block_size = world.server.block_size
        summary = summarize(load.records, before, await world.counters(), wall_s, world.num_workers, block_size)
    if summary.errors or summary.server is None or summary.output_tokens_per_s is None:
        raise RuntimeError(f"the load against {target} failed: {summary.errors}")
    order = {id(option): number for number, option in enumerate(options)}
    records = sorted(load.records, key=lambda record: order[id(record.options)])
    draws = [[step.forwards for step in block_steps(record, block_size)] for record in records]
    return Run(summary.output_tokens_per_s, summary.server, draws)


async def _held_back(stream: Stream) -> AsyncIterator[Event]:
    """The rest of a request that has just started."""
    options = {"prompt_ids": random_prompts(1, 32, HOLDING_SEED)[0], "max_new_tokens": 32, "ignore_eos": True}
    events = stream(options)
    await anext(events)
    return events


async def _start_of(world: World, held_back: AsyncIterator[Event] | None) -> tuple[float, ServerCounters]:
    """When what is measured starts, by the event loop's clock, and the counters then."""
    if held_back is not None:
        await _read(held_back)
    return asyncio.get_running_loop().time(), await world.counters()


def run_steady(
    target: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    num_places: int,
    probe: Callable[[], float] = lambda: 0.0,
) -> Steady:
    """A closed loop with twice as many requests under way as there are places, looked at from when `num_places` of the
    requests have ended until as many are left: all places are taken, and there is no beginning and no end in it.

    `probe` gives a number that is looked at with the servers' counters. Raises RuntimeError if a request fails.
    """
    if len(prompts) <= 2 * num_places:
        raise ValueError(f"{len(prompts)} requests never leave {num_places} places to a steady load")
    return asyncio.run(_run_steady(target, prompts, output_tokens, num_places, probe))


async def _run_steady(
    target: str, prompts: Sequence[Sequence[int]], output_tokens: int, num_places: int, probe: Callable[[], float]
) -> Steady:
    clock = asyncio.get_running_loop().time
    look_at = [num_places, len(prompts) - num_places]  # requests that have ended
    looks: list[asyncio.Task[tuple[float, ServerCounters, float]]] = []
    async with connect([target]) as world:

        async def look() -> tuple[float, ServerCounters, float]:
            asked_at = clock()
            counters = await world.counters()
            return (asked_at + clock()) / 2, counters, probe()

        def on_progress(load: Load) -> None:
            if len(looks) < len(look_at) and load.num_ended >= look_at[len(looks)]:
                looks.append(asyncio.create_task(look()))

        load = Load(world.stream, on_progress)
        await load.run(closed_items(_options(prompts, output_tokens)), concurrency=2 * num_places)
        (began_at, before, probed_before), (ended_at, after, probed_after) = await asyncio.gather(*looks)
        wall_s = ended_at - began_at
        server = server_figures(before, after, wall_s, world.num_workers)
    if load.num_failed or server is None:
        raise RuntimeError(f"the load against {target} failed: {[record.error for record in load.records]}")
    return Steady(wall_s, server, probed_after - probed_before)


def run_shared(target: str, first: Sequence[int], rest: Sequence[Sequence[int]], output_tokens: int) -> Shared:
    """Send `first`, and the rest together when its first block is there. Raises RuntimeError if a request fails."""
    return asyncio.run(_run_shared(target, first, rest, output_tokens))


async def _run_shared(target: str, first: Sequence[int], rest: Sequence[Sequence[int]], output_tokens: int) -> Shared:
    first_options, *rest_options = _options([first, *rest], output_tokens)
    async with connect([target]) as world:
        before = await world.counters()
        events = world.stream(first_options)
        while not isinstance(await anext(events), Committed):
            pass
        reading = asyncio.create_task(_read(events))
        load = Load(world.stream)
        await load.run(closed_items(rest_options), concurrency=len(rest))
        await reading
        after = await world.counters()
    if load.num_failed:
        raise RuntimeError(f"the load against {target} failed: {[record.error for record in load.records]}")
    return Shared(after.prefill_tokens - before.prefill_tokens, list(ttft_ms(load.records)))


def _options(prompts: Sequence[Sequence[int]], output_tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt_ids": list(prompt), "max_new_tokens": output_tokens, "ignore_eos": True, "seed": 0}
        for prompt in prompts
    ]


async def _read(events: AsyncIterator[Event]) -> None:
    async for _ in events:
        pass

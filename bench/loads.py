"""Closed loops against running services, and what one run of them gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from fdfo_client._types import Event, ServerCounters
from fdfo_client.bench.load import Load, Stream
from fdfo_client.bench.measure import World, connect
from fdfo_client.bench.metrics import ServerFigures, block_steps, summarize
from fdfo_client.bench.workload import closed_items

RANDOM_IDS = range(3, 62)  # text of the simulated models
HOLDING_SEED = 27  # a prompt whose first block draws 33 forwards, the most there are


@dataclass(frozen=True)
class Run:
    """One closed loop: its speed, the servers' figures, and the forwards of each request's blocks."""

    tokens_per_s: float
    server: ServerFigures
    draws: list[list[int]]


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
    options = [
        {"prompt_ids": list(prompt), "max_new_tokens": output_tokens, "ignore_eos": True, "seed": 0}
        for prompt in prompts
    ]
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
        async for _ in held_back:
            pass
    return asyncio.get_running_loop().time(), await world.counters()

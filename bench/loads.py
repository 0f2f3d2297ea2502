"""Closed loops against running services, and what one run of them gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import connect, measure
from fdfo_client.bench.metrics import ServerFigures, block_steps, summarize
from fdfo_client.bench.workload import closed_items

RANDOM_IDS = range(3, 62)  # text of the simulated models


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


def run_closed(target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Run:
    """Send all prompts, so many at a time, each answered in full. Raises RuntimeError if a request fails."""
    return asyncio.run(_run_closed(target, prompts, output_tokens, concurrency))


async def _run_closed(target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Run:
    options = [
        {"prompt_ids": list(prompt), "max_new_tokens": output_tokens, "ignore_eos": True, "seed": 0}
        for prompt in prompts
    ]
    async with connect([target]) as world:
        measured = await measure(world, Load(world.stream), closed_items(options), concurrency=concurrency)
        block_size = world.server.block_size
        summary = summarize(
            measured.records, measured.before, measured.after, measured.wall_s, world.num_workers, block_size
        )
    if summary.errors or summary.server is None or summary.output_tokens_per_s is None:
        raise RuntimeError(f"the load against {target} failed: {summary.errors or measured.counters_error}")
    order = {id(option): number for number, option in enumerate(options)}
    records = sorted(measured.records, key=lambda record: order[id(record.options)])
    draws = [[step.forwards for step in block_steps(record, block_size)] for record in records]
    return Run(summary.output_tokens_per_s, summary.server, draws)

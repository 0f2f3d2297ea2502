"""A measurement in a world of its own: a stream and counters in this process, under a clock that jumps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from fdfo_client import Committed, Event, Finished, ServerCounters, ServerInfo, ServerUnavailable, Started, Usage
from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import Measurement, World, measure
from fdfo_client.bench.page import render
from fdfo_client.bench.report import Report, make_report, table
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import Item

ZERO = ServerCounters(*[0] * len(dataclasses.fields(ServerCounters)))


class Simulation:
    """Every request takes 10 s of this world for one block; counters can be asked for `answers` times."""

    def __init__(self, answers: int = 2) -> None:
        self.num_forwards = 0
        self.answers = answers
        server = ServerInfo(
            "s", "1", "simulated", "f", 4, 10, 64, "LowConfidence", True, 1, 0, 0, 9, 0.0, 0.0, (), ZERO
        )
        self.world = World(self.stream, self.counters, {"simulated": server})

    async def stream(self, options: dict[str, Any]) -> AsyncIterator[Event]:
        yield Started("r", 1, 0, prompt_tokens=4)
        await asyncio.sleep(10)
        self.num_forwards += 1
        yield Committed("abcd", (1, 2, 3, 4), forwards=1)
        yield Finished("length", Usage(4, 4, 0, 1, 1))

    async def counters(self) -> ServerCounters:
        self.answers -= 1
        if self.answers < 0:
            raise ServerUnavailable("gone")
        return dataclasses.replace(ZERO, forwards=self.num_forwards)

    def run(self, num_items: int) -> Measurement:
        """One item a second."""
        items = [Item(float(i), {}) for i in range(num_items)]
        return run_virtually(measure(self.world, Load(self.world.stream), items, concurrency=None))


def report_of(simulation: Simulation, num_items: int) -> Report:
    return make_report("replay", {}, simulation.world, simulation.run(num_items))


def test_any_stream_and_counters_can_be_measured() -> None:
    """Without a server or a clock that ticks, times and counters are those of the world that was given."""
    summary = report_of(Simulation(), 1000).summary
    assert (summary.requests_ok, summary.wall_s) == (1000, 1009.0)
    assert summary.ttft_ms is not None and summary.ttft_ms.p99 == 10_000.0
    assert summary.server is not None and summary.server.forwards == 1000


def test_counters_that_do_not_answer_at_the_end() -> None:
    """The load is reported all the same, with the reason why the server's figures are missing."""
    report = report_of(Simulation(answers=1), 2)
    assert report.summary.requests_ok == 2
    assert "no figures of the server: gone" in "\n".join(table(report))
    assert "no figures of the server: gone" in render(report)

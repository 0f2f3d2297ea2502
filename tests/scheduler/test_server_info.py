"""GetServerInfo: what it tells while requests run, and of whom."""

from __future__ import annotations

import time

from tests.scheduler.in_memory import Bench, play
from tests.worker.scripted import effort, make_loop


def test_tokens_count_when_they_are_published() -> None:
    """A running request's published tokens are in the totals at once, and are counted once when it has ended."""
    bench = Bench(make_loop())

    async def scene() -> None:
        stream = await bench.submit("a", effort(3), 40)
        events = stream.read()
        published = 0
        while not published:
            published += len((await anext(events)).committed.token_ids)
        info = bench.scheduler.info()
        assert info.running == 1 and info.counters.requests_finished == 0
        assert published <= info.counters.published_tokens < 40
        async for _ in events:
            pass
        bench.scheduler.leave(stream)
        assert bench.scheduler.info().counters.published_tokens == 40

    play(bench, scene)


def test_it_tells_the_time_and_what_its_workers_are() -> None:
    """Its clock and its age come along, and of each worker what it said when it was connected."""
    bench = Bench(make_loop())
    assert bench.scheduler.info().workers[0].version == "", "nothing is known yet"

    async def scene() -> None:
        await bench.read(await bench.submit("a", effort(3), 8))
        said = bench.scheduler.loops[0].info
        assert said is not None
        said.version, said.device, said.dtype = "9", "cuda:1", "bfloat16"
        info = bench.scheduler.info()
        assert abs(info.unix_time_s - time.time()) < 10 and 0 < info.uptime_s < 10
        (worker,) = info.workers
        assert (worker.version, worker.device, worker.dtype) == ("9", "cuda:1", "bfloat16")
        assert worker.page_size == said.page_size > 0

    play(bench, scene)

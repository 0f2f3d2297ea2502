"""Several schedulers on one worker: even shares, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.scheduler.in_memory import FORWARD_S, Bench, TimedLink, run_virtually
from tests.worker.scripted import Clock, assert_whole, effort, make_loop


@pytest.mark.parametrize("head_start_s", [0.0, 5.0])
@pytest.mark.parametrize(("num_slots", "num_pages"), [(16, 400), (32, 64)])
def test_two_schedulers_that_want_all_get_half_each(head_start_s: float, num_slots: int, num_pages: int) -> None:
    """Both always have more to do than fits; rows or pages may be what is short; who came first has no more."""
    clock = Clock()
    loop = make_loop(num_slots=num_slots, num_pages=num_pages, clock=clock)
    first, second = (Bench(loop, link_type=TimedLink) for _ in range(2))
    finished = [0, 0]

    async def client(number: int, bench: Bench, name: str) -> None:
        for turn in itertools.count():
            stream = await bench.submit(f"{name}-{turn}", effort(5 + turn % 7), 60 + 40 * (turn % 5))
            await bench.read(stream)
            finished[number] += 1

    async def scene() -> None:
        seconds = asyncio.get_running_loop().time
        tasks = [asyncio.create_task(bench.scheduler.run()) for bench in (first, second)]

        async def drive() -> None:
            while True:
                clock.now = 100 + seconds()
                loop.tick()
                await asyncio.sleep(FORWARD_S)

        tasks.append(asyncio.create_task(drive()))
        await asyncio.sleep(0.5)
        for number, bench in enumerate((first, second)):
            tasks += [asyncio.create_task(client(number, bench, f"c{n}")) for n in range(2 * num_slots)]
            await asyncio.sleep(head_start_s)
        await asyncio.sleep(10)
        before = [bench.scheduler.counters.denoise_row_forwards for bench in (first, second)]
        finished_before = list(finished)
        await asyncio.sleep(60)
        after = [bench.scheduler.counters.denoise_row_forwards for bench in (first, second)]
        work = [end - start for start, end in zip(before, after, strict=True)]
        assert abs(work[0] - work[1]) <= 0.1 * max(work), work
        assert all(end > start for start, end in zip(finished_before, finished, strict=True))
        for task in tasks:
            assert not task.done()
            task.cancel()

    run_virtually(scene())
    assert_whole(loop)

"""Several schedulers on one worker: even shares, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from fdfo_client.bench.virtual_time import run_virtually
from tests.scheduler.in_memory import FORWARD_S, Bench, TimedLink
from tests.worker.scripted import Clock, assert_whole, effort, make_loop
from worker_svc.denoise import DenoiseLoop


async def drive(loop: DenoiseLoop, clock: Clock) -> None:
    """The device of all schedulers."""
    while True:
        clock.now = 100 + asyncio.get_running_loop().time()
        loop.tick()
        await asyncio.sleep(FORWARD_S)


@pytest.mark.parametrize("num_held", [0, 1])
def test_one_that_comes_late_gets_its_half_soon(num_held: int) -> None:
    """The worker is full of another's long rows, none of which ends; the refusal of a start makes that one give up."""
    clock = Clock()
    loop = make_loop(num_slots=8, num_pages=400, clock=clock)
    first, second = (Bench(loop, link_type=TimedLink) for _ in range(2))

    async def scene() -> None:
        tasks = [asyncio.create_task(drive(loop, clock)), asyncio.create_task(first.scheduler.run())]
        await asyncio.sleep(0.2)
        for number in range(12 - num_held):
            await first.submit(f"a{number}", effort(20), 900)
            if number == 7 - num_held:
                await asyncio.sleep(0.2)
                tasks.append(asyncio.create_task(second.scheduler.run()))
                await asyncio.sleep(0.2)
                late = [await second.submit(f"b{n}", effort(20), 900) for n in range(num_held)]
                await asyncio.sleep(0.2)
        await asyncio.sleep(1.5)  # a refusal is long ago
        assert len(second.scheduler.loops[0].running) == num_held
        late += [await second.submit(f"late{n}", effort(20), 900) for n in range(6)]
        await asyncio.sleep(1.5)
        assert [len(bench.scheduler.loops[0].running) for bench in (first, second)] == [4, 4]
        for task in tasks:
            assert not task.done()
            task.cancel()

    run_virtually(scene())


@pytest.mark.parametrize(("num_slots", "num_pages", "head_start_s"), [(8, 200, 4.0), (16, 32, 4.0)])
def test_two_schedulers_that_want_all_get_half_each(num_slots: int, num_pages: int, head_start_s: float) -> None:
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
        tasks = [asyncio.create_task(bench.scheduler.run()) for bench in (first, second)]

        tasks.append(asyncio.create_task(drive(loop, clock)))
        await asyncio.sleep(0.5)
        for number, bench in enumerate((first, second)):
            tasks += [asyncio.create_task(client(number, bench, f"c{n}")) for n in range(2 * num_slots)]
            await asyncio.sleep(head_start_s)
        await asyncio.sleep(2)
        before = [bench.scheduler.counters.denoise_row_forwards for bench in (first, second)]
        finished_before = list(finished)
        await asyncio.sleep(15)
        after = [bench.scheduler.counters.denoise_row_forwards for bench in (first, second)]
        work = [end - start for start, end in zip(before, after, strict=True)]
        assert abs(work[0] - work[1]) <= 0.1 * max(work), work
        assert all(end > start for start, end in zip(finished_before, finished, strict=True))
        for task in tasks:
            assert not task.done()
            task.cancel()

    run_virtually(scene())
    assert_whole(loop)

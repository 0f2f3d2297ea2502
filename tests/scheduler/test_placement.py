"""Where requests start: cached prefixes, even loads, and the order of the queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.placement import PrefixMemory
from tests.scheduler.in_memory import Bench, TimedLink, expected, play, play_timed
from tests.worker.scripted import BLOCK, effort, make_loop

KEYS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(KEYS, max_size=20), KEYS, st.integers(1, 12))
@settings(deadline=None, max_examples=300)
def test_a_prefix_memory_is_a_list_of_the_latest(noted: list[list[int]], asked: list[int], max_blocks: int) -> None:
    """It tells the same share as walking over all prefixes in the order in which they were last used, ends first."""
    memory, naive = PrefixMemory(max_blocks), OrderedDict[tuple[int, ...], None]()
    for keys in noted:
        prefixes = [tuple(keys[: length + 1]) for length in range(len(keys))]
        memory.note([hash(prefix) for prefix in prefixes])
        for prefix in reversed(prefixes):
            naive.pop(prefix, None)
            naive[prefix] = None
        while len(naive) > max_blocks:
            naive.popitem(last=False)
    known = 0
    while known < len(asked) and tuple(asked[: known + 1]) in naive:
        known += 1
    share = memory.known_share([hash(tuple(asked[: length + 1])) for length in range(len(asked))])
    assert share == (known / len(asked) if asked else 0.0)


def conversation(number: int, num_blocks: int) -> list[int]:
    """A prompt that begins as no other number's."""
    return [5 + number % 30, 5 + number // 30] + [6] * (num_blocks * BLOCK - 1)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_conversation_goes_on_where_its_prefix_is(num_workers: int) -> None:
    """Later turns start at the worker that has the earlier ones, though others have as much room, and are cached."""
    bench = Bench(*(make_loop(num_slots=8, num_pages=400) for _ in range(num_workers)))
    turns: list[list[int]] = []

    async def scene() -> None:
        for turn in range(3):
            order = sorted(range(6), key=lambda n: (n + 1) * (1, 3, 2)[turn] % 7)  # another one in every turn
            streams = [await bench.submit(f"{n}-{turn}", conversation(n, 4 + turn), 31) for n in order]
            answers = await asyncio.gather(*map(bench.read, streams))
            turns.append([finished.usage.cached_tokens for _, finished in answers])

    play(bench, scene)
    assert turns == [[0] * 6, [4 * BLOCK] * 6, [5 * BLOCK] * 6]
    starts = [len({row.request_id[0] for r in link.requests for row in r.starts}) for link in bench.links]
    assert starts == [6 // num_workers] * num_workers


def test_a_prefix_that_all_share_does_not_fill_one_worker() -> None:
    """A cached prompt is worth half a worker's load: both work, and the second has the prefix too from then on."""
    bench = Bench(make_loop(num_slots=16, num_pages=400), make_loop(num_slots=16, num_pages=400), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.2)
        streams = [await bench.submit("first", conversation(0, 4), 200)]
        await asyncio.sleep(1)
        streams += [await bench.submit(f"r{n}", conversation(0, 4), 200) for n in range(20)]
        await asyncio.sleep(0.2)
        loads = [len(loop.running) for loop in bench.scheduler.loops]
        assert sum(loads) in (20, 21) and min(loads) >= 6
        for stream in streams:
            await bench.read(stream)

    play_timed(bench, scene)


@pytest.mark.parametrize("slots", [(8, 8), (4, 12)])
def test_loads_are_even(slots: tuple[int, int]) -> None:
    """Requests without a common prefix fill workers of any sizes to the same share, and no round starts only one."""
    bench = Bench(*(make_loop(num_slots=n, num_pages=20 * n) for n in slots), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.2)
        streams = [await bench.submit(f"r{n}", effort(20), 31) for n in range(sum(slots) // 2)]
        await asyncio.sleep(0.1)
        assert [len(loop.running) for loop in bench.scheduler.loops] == [n // 2 for n in slots]
        assert [len(link.requests[0].starts) for link in bench.links] == [n // 2 for n in slots]
        for stream in streams:
            await bench.read(stream)

    play_timed(bench, scene)


@pytest.mark.parametrize("fdfo", [True, False])
def test_requests_start_in_the_order_of_the_queue_whatever_the_worker(fdfo: bool) -> None:
    """A long prompt that fits nowhere holds back the short ones behind it; with shared prefixes too."""
    bench = Bench(*(make_loop(num_slots=3, num_pages=30) for _ in range(2)), dllm_fdfo=fdfo)
    prompts = [[5] * (BLOCK * (1 + n * 7 % 12)) + [7 + n % 3] for n in range(20)]

    async def scene() -> None:
        streams = [await bench.submit(f"r{n:02}", prompt, 40) for n, prompt in enumerate(prompts)]
        for stream, prompt in zip(streams, prompts, strict=True):
            assert (await bench.read(stream))[0] == expected(len(prompt), 40)

    play(bench, scene)
    firsts: dict[str, int] = {}
    for link in bench.links:
        for request in link.requests:
            for row in request.starts:
                firsts[row.request_id] = min(firsts.get(row.request_id, row.attempt), row.attempt)
    order = sorted(firsts, key=lambda name: firsts[name])
    # Attempts are numbered as rounds are sent, and what two loops were given together may be sent in either order.
    assert all(abs(order.index(name) - number) <= 3 for number, name in enumerate(sorted(firsts)))


def test_a_worker_that_says_nothing_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all its rounds on their way and no word for long, requests go to the other one, cached or not."""
    bench = Bench(*(make_loop(num_slots=8, num_pages=400) for _ in range(2)), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.2)
        await bench.read(await bench.submit("a", conversation(1, 8), 31))
        stopped = next(link for link in bench.links if link.requests)
        assert isinstance(stopped, TimedLink)
        stuck = [await bench.submit("b", conversation(1, 8), 600)]
        await asyncio.sleep(0.2)
        stopped.is_stopped = True
        for number in range(3):  # what fills its rounds in flight
            stuck.append(await bench.submit(f"c{number}", conversation(1, 8), 31))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.6)
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        assert (await bench.read(await bench.submit("d", conversation(1, 8), 31)))[0] == expected(8 * BLOCK + 1, 31)
        assert clock() - asked_at < 2
        for stream in stuck:
            await bench.read(stream)

    play_timed(bench, scene)

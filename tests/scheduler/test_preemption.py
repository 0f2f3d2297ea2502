"""Who gives up its place in a full pool, and that its answer is the same for it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import scheduler_svc.round_loop
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.planner import MAX_PREEMPTIONS
from scheduler_svc.stream import Stream
from tests.scheduler.in_memory import Bench, ContextRunner, expected, play
from tests.worker.scripted import BLOCK, assert_whole, effort, make_loop

PROMPTS = [[20 + n] * length for n, length in enumerate((1, 40, 33, 5, 64, 20))]
SAMPLED = {
    "sampling": api.SamplingParams(temperature=1.0, seed=11),
    "algorithm_params": {"threshold": 0.1},
    "ignore_eos": True,
}


def answers(bench: Bench, max_new_tokens: int, **fields: object) -> tuple[list[list[int]], list[Stream]]:
    """The published ids of a request for each of PROMPTS, all at once."""
    ids: list[list[int]] = []
    streams: list[Stream] = []

    async def scene() -> None:
        for number, prompt in enumerate(PROMPTS):
            streams.append(await bench.submit(f"r{number}", prompt, max_new_tokens, **SAMPLED, **fields))
        ids.extend([answer for answer, _ in await asyncio.gather(*map(bench.read, streams))])

    play(bench, scene)
    return ids, streams


@pytest.mark.parametrize(
    ("in_flight", "fdfo", "page_size"),
    [(1, True, BLOCK), (2, True, BLOCK), (3, True, BLOCK), (1, False, BLOCK), (2, True, 2 * BLOCK)],
)
def test_answers_in_a_tiny_pool_are_those_in_a_big_one(in_flight: int, fdfo: bool, page_size: int) -> None:
    """Preempted rows lose no token and draw no other one, none starves, and the pool is whole after it."""
    undisturbed, _ = answers(Bench(make_loop(num_slots=6, runner=ContextRunner())), 120)
    loop = make_loop(num_slots=4, num_pages=8 * BLOCK // page_size, page_size=page_size, runner=ContextRunner())
    bench = Bench(loop, dllm_fdfo=fdfo, rounds_in_flight=in_flight)
    ids, streams = answers(bench, 120)
    assert ids == undisturbed
    assert len({tuple(answer) for answer in ids}) == len(PROMPTS)
    counts = [stream.samples[0].num_preemptions for stream in streams]
    assert bench.scheduler.counters.preemptions == sum(counts) > 0
    assert bench.scheduler.counters.restarts == 0
    assert counts[0] == 0, "the first to start is never the last that started"
    assert [stream.samples[0].cached_tokens for stream in streams] == [0] * len(PROMPTS), "what it found itself later"
    assert_whole(loop, held=0)


@pytest.mark.parametrize("number", range(10))
def test_any_load_in_a_tiny_pool_gets_the_answers_of_a_big_one(number: int) -> None:
    """Random classes, samples, lengths, arrivals and aborts, one worker or two, any mode and rounds in flight."""
    draw = random.Random(number)
    requests = [
        (
            [draw.randint(20, 29)] * draw.randint(1, 90),
            draw.randint(1, 130),
            draw.randint(-1, 1),
            draw.choice([1, 1, 3]),
        )
        for _ in range(draw.randint(3, 8))
    ]
    delays = [(draw.randint(0, 400), draw.randint(0, 2000)) for _ in requests]

    def load(bench: Bench, calm: bool) -> list[list[list[int]]]:
        async def one(index: int) -> list[list[int]]:
            prompt, max_new_tokens, priority, num_samples = requests[index]
            for _ in range(delays[index][0]):
                await asyncio.sleep(0)
            fields = {**SAMPLED, "priority": priority, "n": num_samples}
            stream = await bench.submit(f"r{index}", prompt, max_new_tokens, **fields)
            reader = asyncio.create_task(bench.read_all(stream))
            for _ in range(0 if calm or index % 5 else delays[index][1]):
                await asyncio.sleep(0)
            if not calm and index % 5 == 0:
                bench.scheduler.abort(stream.request_id)
            return [ids for ids, _ in await reader]

        answers: list[list[list[int]]] = []

        async def scene() -> None:
            answers.extend(await asyncio.gather(*map(one, range(len(requests)))))

        play(bench, scene)
        return answers

    loops = [
        make_loop(draw.randint(1, 5), draw.randint(7, 12), chunk=draw.choice([32, 256]), runner=ContextRunner())
        for _ in range(draw.choice([1, 1, 2]))
    ]
    bench = Bench(*loops, rounds_in_flight=draw.randint(1, 4), dllm_fdfo=number % 5 != 4)
    disturbed = load(bench, calm=False)
    undisturbed = load(Bench(make_loop(num_slots=24, num_pages=200, runner=ContextRunner())), calm=True)
    for index, (samples, whole) in enumerate(zip(disturbed, undisturbed, strict=True)):
        assert samples == (whole if index % 5 else [ids[: len(part)] for ids, part in zip(whole, samples, strict=True)])
    assert not bench.scheduler.live and not len(bench.scheduler.queue)
    for loop in loops:
        assert_whole(loop)


def test_a_row_without_a_page_goes_on_in_place_when_another_gives_one_up() -> None:
    """The row that started last is released, not the one that found no page; that keeps its slot, pages and attempt."""
    loop = make_loop(num_slots=2, num_pages=5)
    bench = Bench(loop)

    async def scene() -> None:
        first = await bench.submit("first", effort(3), 150)
        second = await bench.submit("second", effort(20), 31)
        while not bench.scheduler.counters.preemptions:
            await asyncio.sleep(0)
        assert first.samples[0].num_preemptions == 0
        ids = await asyncio.gather(bench.read(first), bench.read(second))
        assert [answer for answer, _ in ids] == [expected(1, 150), expected(1, 31)]

    play(bench, scene)
    started = [row.request_id for request in bench.links[0].requests for row in request.starts]
    assert started.count("first") == 1 and started.count("second") == 2


def test_no_one_is_preempted_for_ever() -> None:
    """In a pool for one and a half, nobody is preempted often: after the third time others are chosen first."""
    loop = make_loop(num_slots=6, num_pages=9)
    bench = Bench(loop)

    async def scene() -> None:
        streams = [await bench.submit(f"r{n}", effort(2 + n % 3), 250) for n in range(8)]
        for stream in streams:
            assert (await bench.read(stream))[0] == expected(1, 250)
        assert max(stream.samples[0].num_preemptions for stream in streams) <= MAX_PREEMPTIONS + 1

    play(bench, scene)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("sizes", [{"num_slots": 2}, {"num_slots": 4, "num_pages": 8}])
def test_a_higher_class_takes_the_place_of_lower_ones(in_flight: int, sizes: dict[str, Any]) -> None:
    """With no slot or no page free it starts with the next round; the lower ones go on later and lose nothing."""
    loop = make_loop(**sizes)
    bench = Bench(loop, rounds_in_flight=in_flight)

    async def scene() -> None:
        low = [await bench.submit(f"low{n}", effort(30), 100, priority=-n) for n in range(2)]
        while loop.totals.forwards < 5:
            await asyncio.sleep(0)
        before = loop.totals.forwards
        high = await bench.submit("high", [5] * (5 * BLOCK), 60, priority=3)
        assert (await bench.read(high))[0] == expected(5 * BLOCK, 60)
        assert loop.totals.forwards - before <= 12
        assert [stream.samples[0].num_preemptions for stream in low] == [0, 1]
        for stream in low:
            assert (await bench.read(stream))[0] == expected(1, 100)

    play(bench, scene)
    assert_whole(loop, held=0)


def test_an_equal_class_waits_for_its_turn() -> None:
    """Nobody is preempted for a request of the same class, nor of a lower one; positions count who is before."""
    loop = make_loop(num_slots=1)
    bench = Bench(loop)

    async def scene() -> None:
        streams = [await bench.submit("running", effort(20), 62)]
        while not bench.scheduler.loops[0].running:
            await asyncio.sleep(0)
        for name, priority in (("equal", 0), ("low", -1), ("next", 0), ("lowest", -7)):
            streams.append(await bench.submit(name, effort(3), 20, priority=priority))
        started = [(await stream.events.get()).started.queue_position for stream in streams]  # type: ignore[union-attr]
        assert started == [0, 0, 1, 1, 3]
        ends: list[str] = []

        async def read(stream: Stream) -> None:
            await bench.read(stream)
            ends.append(stream.request_id)

        await asyncio.gather(*map(read, streams))
        assert ends == ["running", "equal", "next", "low", "lowest"]

    play(bench, scene)
    assert bench.scheduler.counters.preemptions == 0


def test_nobody_makes_way_in_vain() -> None:
    """A request of a higher class that fits only when a row of its own class ends preempts none below it."""
    loop = make_loop(num_slots=4, num_pages=10)
    bench = Bench(loop)

    async def scene() -> None:
        peer = await bench.submit("peer", [5] * (5 * BLOCK) + effort(9), 31, priority=1)
        low = await bench.submit("low", effort(30), 31)
        while len(bench.scheduler.loops[0].running) < 2:
            await asyncio.sleep(0)
        high = await bench.submit("high", [5] * (6 * BLOCK), 31, priority=1)
        await bench.read(peer)
        assert low.samples[0].num_preemptions == 0
        await asyncio.gather(bench.read(high), bench.read(low))

    play(bench, scene)


def test_a_worker_with_room_is_taken_before_anyone_makes_way() -> None:
    """With two workers, one of them full, a higher class goes to the other one."""
    bench = Bench(make_loop(num_slots=1), make_loop(num_slots=1))

    async def scene() -> None:
        low = await bench.submit("low", effort(30), 62)
        while not bench.scheduler.loops[0].running:
            await asyncio.sleep(0)
        await bench.read(await bench.submit("high", effort(3), 31, priority=1))
        assert not low.is_finished
        await bench.read(low)

    play(bench, scene)
    assert bench.scheduler.counters.preemptions == 0


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    """It ends at once, with what it had published, and never starts again."""
    loop = make_loop(num_slots=1)
    bench = Bench(loop)

    async def scene() -> None:
        low = await bench.submit("low", effort(5), 100)
        while loop.totals.blocks_done < 2:
            await asyncio.sleep(0)
        high = await bench.submit("high", effort(20), 31, priority=1)
        while not low.samples[0].num_preemptions:
            await asyncio.sleep(0)
        assert bench.scheduler.abort("low")
        ids, finished = await bench.read(low)
        assert finished.reason == api.FINISH_REASON_ABORT
        assert ids == expected(1, len(ids)) and finished.usage.completion_tokens == len(ids) > 0
        assert (await bench.read(high))[0] == expected(1, 31)

    play(bench, scene)
    assert len(bench.scheduler.queue) == 0
    assert_whole(loop, held=0)


def test_a_scheduler_above_its_allowance_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds nothing asks all the same; refused, it gets its share from the one that holds all."""
    monkeypatch.setattr(scheduler_svc.round_loop, "FULL_POLL_S", 0.0)
    loop = make_loop(num_slots=4)
    first, second = Bench(loop), Bench(loop)

    async def scene() -> None:
        running = asyncio.create_task(second.scheduler.run())
        held = [await first.submit(f"a{n}", effort(20), 300) for n in range(6)]
        while len(first.scheduler.loops[0].running) < 4:
            await asyncio.sleep(0)
        for number in range(2):
            assert (await second.read(await second.submit(f"b{number}", effort(3), 31)))[0] == expected(1, 31)
        assert not any(stream.is_finished for stream in held)
        assert 0 < first.scheduler.counters.preemptions <= 4
        for stream in held:
            assert (await first.read(stream))[0] == expected(1, 300)
        running.cancel()

    play(first, scene)

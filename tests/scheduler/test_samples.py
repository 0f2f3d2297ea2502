"""Several samples of one request: rows of their own in one stream."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import ServiceError
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from tests.scheduler.in_memory import Bench, ContextRunner, expected, play
from tests.worker.scripted import BAD, BLOCK, Driver, assert_whole, done_blocks, effort, make_loop, start
from worker_svc.rows import RowKey, RowName

SEED, TOKENS = 7, 70
THRESHOLD = {"threshold": 0.1}


def sampled(temperature: float = 1.0) -> dict[str, object]:
    return {
        "sampling": api.SamplingParams(temperature=temperature, seed=SEED),
        "algorithm_params": THRESHOLD,
        "ignore_eos": True,
    }


def one_row_alone(prompt: list[int], sample_index: int) -> list[int]:
    """The tokens of a start with this sample index, alone at a worker, without a scheduler."""
    driver = Driver(make_loop(runner=ContextRunner()))
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, seed=SEED)
    row = start(
        "x", prompt, sample_index=sample_index, sampling=sampling, algorithm_params=THRESHOLD, tokens_left=TOKENS
    )
    reply = driver.run(starts=[row])
    ids = [token for block in done_blocks(reply) for token in block]
    while reply.rows.statuses[0] != pb.ROW_STATUS_ENDED:
        reply = driver.run(continues=[RowName(RowKey("x", sample_index), 1)])
        ids += [token for block in done_blocks(reply) for token in block]
    return ids[len(prompt) % BLOCK :][:TOKENS]


@pytest.mark.parametrize(("prompt_length", "num_samples"), [(3, 4), (70, 4), (BLOCK, 16)])
@pytest.mark.parametrize("fdfo", [True, False])
def test_samples_are_what_their_indexes_draw(prompt_length: int, num_samples: int, fdfo: bool) -> None:
    """Each equals a seeded row of that sample index alone, in company, in turns, and preempted; all differ."""
    prompt = [20 + n % 9 for n in range(prompt_length)]
    loop = make_loop(num_slots=3, num_pages=9, runner=ContextRunner())
    bench = Bench(loop, dllm_fdfo=fdfo)

    async def scene() -> None:
        stream = await bench.submit("x", prompt, TOKENS, n=num_samples, **sampled())
        answers = await bench.read_all(stream)
        assert [ids for ids, _ in answers] == [one_row_alone(prompt, index) for index in range(num_samples)]
        assert len({tuple(ids) for ids, _ in answers}) == num_samples
        for _, finished in answers:
            assert finished.reason == api.FINISH_REASON_LENGTH
            assert finished.usage.completion_tokens == TOKENS and finished.usage.prompt_tokens == prompt_length
            assert finished.usage.forwards > 0 and finished.usage.rounds > 0

    play(bench, scene)
    assert_whole(loop, held=0)
    assert not bench.scheduler.live and not len(bench.scheduler.queue)
    assert bench.scheduler.counters.requests_finished == 1
    assert bench.scheduler.counters.published_tokens == num_samples * TOKENS


def test_samples_at_temperature_0_are_equal() -> None:
    """Nothing is drawn, so nothing differs."""
    bench = Bench(make_loop(runner=ContextRunner()))

    async def scene() -> None:
        answers = await bench.read_all(await bench.submit("x", [20, 21], TOKENS, n=3, **sampled(0.0)))
        assert answers[0][0] == answers[1][0] == answers[2][0]

    play(bench, scene)


@pytest.mark.parametrize(("prompt_length", "first_starts"), [(BLOCK - 1, [0, 1, 2]), (3 * BLOCK + 1, [0])])
def test_the_prompt_is_computed_by_the_first_sample(prompt_length: int, first_starts: list[int]) -> None:
    """The others start when its prefix is there, and before requests that came later; a short prompt needs no wait."""
    loop = make_loop(num_slots=3, chunk=BLOCK)
    bench = Bench(loop)

    async def scene() -> None:
        streams = [await bench.submit("x", [5] * prompt_length, 40, n=3)]
        streams += [await bench.submit(f"later{n}", effort(3), 31) for n in range(2)]
        await asyncio.gather(*map(bench.read_all, streams))

    play(bench, scene)
    rounds = [[row.sample_index for row in sent.starts if row.request_id == "x"] for sent in bench.links[0].requests]
    assert rounds[0] == first_starts
    assert [index for started in rounds for index in started] == [0, 1, 2]


@pytest.mark.parametrize("after_forwards", [0, 1, 3, 8])
@pytest.mark.parametrize("leaves", [True, False])
def test_an_abort_ends_all_samples_in_every_phase(after_forwards: int, leaves: bool) -> None:
    """Held, queued or running: each has one terminal event, all rows are freed; a reader that leaves does the same."""
    loop = make_loop(num_slots=2, chunk=BLOCK)
    bench = Bench(loop)

    async def scene() -> None:
        stream = await bench.submit("x", [5] * (2 * BLOCK) + effort(30), 300, n=4)
        while loop.totals.forwards < after_forwards:
            await asyncio.sleep(0)
        if leaves:
            bench.scheduler.leave(stream)
        else:
            assert bench.scheduler.abort("x")
            answers = await bench.read_all(stream)
            assert [finished.reason for _, finished in answers] == [api.FINISH_REASON_ABORT] * 4
            assert stream.events.empty()
        assert (await bench.read(await bench.submit("x", effort(2), 31)))[0] == expected(1, 31)
        while any(session.rows for session in loop.sessions.values()):
            await asyncio.sleep(0)

    play(bench, scene)
    assert bench.scheduler.counters.requests_aborted == 1
    assert_whole(loop, held=0)


def test_a_sample_that_fails_ends_the_request() -> None:
    """The stream ends with the error, and no row, held or queued sample of it is left; neighbours go on."""
    loops = make_loop(num_slots=2), make_loop(num_slots=2)
    bench = Bench(*loops)

    async def scene() -> None:
        good = await bench.submit("good", effort(9), 100)
        bad = await bench.submit("bad", [BAD], 100, n=6)
        with pytest.raises(ServiceError, match="not finite"):
            await bench.read_all(bad)
        assert (await bench.read(good))[0] == expected(1, 100)
        while any(session.rows for loop in loops for session in loop.sessions.values()):
            await asyncio.sleep(0)

    play(bench, scene)
    assert not len(bench.scheduler.queue)
    for loop in loops:
        assert_whole(loop, held=0)


def test_samples_of_a_lost_worker_go_on_at_another() -> None:
    """Each from its own block, with the draws it would have had."""
    prompt = [20] * (BLOCK + 3)
    bench = Bench(*(make_loop(num_slots=3, runner=ContextRunner()) for _ in range(2)), max_forwards=1)

    async def scene() -> None:
        stream = await bench.submit("x", prompt, TOKENS, n=5, **sampled())
        while not all(loop.running for loop in bench.scheduler.loops):
            await asyncio.sleep(0)
        bench.links[1].is_dead = True
        answers = await bench.read_all(stream)
        assert [ids for ids, _ in answers] == [one_row_alone(prompt, index) for index in range(5)]

    play(bench, scene)
    assert bench.scheduler.counters.restarts > 0

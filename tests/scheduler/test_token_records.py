"""Log probabilities and first-unmask steps from the worker's columns to the client's messages."""

from __future__ import annotations

import asyncio
import math

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.stream import Stream
from tests.scheduler.in_memory import Bench, expected, play
from tests.worker.scripted import BLOCK, VOCAB, effort, make_loop

LOGPROB = 20 - math.log(math.exp(20) + VOCAB - 1)  # of every token that the scripted model is sure of


async def read(stream: Stream) -> list[api.Committed]:
    """The messages with tokens, to the end."""
    return [event.committed async for event in stream.read() if event.HasField("committed")]


def steps_of(forwards: int, count: int) -> list[int]:
    """The steps that set the tokens after a prompt of one token whose block takes so many forwards.

    Later blocks are filled up to their last position in their first step.
    """
    a_step = -(-(BLOCK - 1) // (forwards - 1))
    first = [place // a_step for place in range(BLOCK - 1)]
    return [*first, *(place % BLOCK // (BLOCK - 1) for place in range(count - len(first)))]


@pytest.mark.parametrize("fdfo", [True, False])
def test_each_token_has_its_records_and_who_does_not_ask_has_none(fdfo: bool) -> None:
    """Requests that ask for one kind, both and none, together: values aligned with the ids, or no values."""
    bench = Bench(make_loop(), dllm_fdfo=fdfo)
    kinds = [(False, False), (True, True), (True, False), (False, True)]

    async def scene() -> None:
        requests = [
            await bench.submit(f"r{n}", effort(4 + n), 75, logprobs=logprobs, first_unmask_steps=steps)
            for n, (logprobs, steps) in enumerate(kinds)
        ]
        for n, (request, (logprobs, steps)) in enumerate(zip(requests, kinds, strict=True)):
            messages = await read(request)
            assert [token for message in messages for token in message.token_ids] == expected(1, 75)
            for message in messages:
                assert len(message.logprobs) == logprobs * len(message.token_ids)
                assert len(message.first_unmask_steps) == steps * len(message.token_ids)
                assert list(message.logprobs) == pytest.approx([LOGPROB] * len(message.logprobs), abs=1e-6)
            found = [step for message in messages for step in message.first_unmask_steps]
            assert found == (steps_of(4 + n, 75) if steps else [])

    play(bench, scene)


def test_records_survive_a_lost_worker_in_mid_block() -> None:
    """The first steps were on a worker that died: their values come with the block from the one that ends it."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        request = await bench.submit("a", effort(9), 60, logprobs=True, first_unmask_steps=True)
        beside = await bench.submit("b", effort(9), 60)
        link = bench.links[0]
        while link.loop.totals.forwards < 5:
            await asyncio.sleep(0)
        link.is_dead = True
        while len(bench.scheduler.queue) < 2:
            await asyncio.sleep(0)
        link.loop, link.is_dead = make_loop(), False
        messages = await read(request)
        assert [step for message in messages for step in message.first_unmask_steps] == steps_of(9, 60)
        values = [value for message in messages for value in message.logprobs]
        assert values == pytest.approx([LOGPROB] * 60, abs=1e-6)
        assert not any(message.logprobs or message.first_unmask_steps for message in await read(beside))

    play(bench, scene)
    assert bench.scheduler.counters.restarts == 2


def test_tokens_that_were_held_back_keep_their_records() -> None:
    """A block's last token may begin a stop string: it is published with the next block, and its own step with it."""
    bench = Bench(make_loop())

    async def scene() -> None:
        first = await read(await bench.submit("a", effort(5), 70))
        stop = [first[0].text[-1] + "never"]
        messages = await read(await bench.submit("b", effort(5), 70, stop=stop, first_unmask_steps=True))
        assert len(messages[0].token_ids) < len(first[0].token_ids), "nothing was held back"
        assert all(len(message.first_unmask_steps) == len(message.token_ids) for message in messages)
        assert [step for message in messages for step in message.first_unmask_steps] == steps_of(5, 70)

    play(bench, scene)


def test_the_prompt_has_no_records() -> None:
    """A prompt that ends inside a block: the first value is that of the first generated token."""
    bench = Bench(make_loop())

    async def scene() -> None:
        messages = await read(await bench.submit("a", [*effort(8), *[5] * 9], 22, logprobs=True))
        assert [len(message.logprobs) for message in messages] == [22]
        assert list(messages[0].logprobs) == pytest.approx([LOGPROB] * 22, abs=1e-6)

    play(bench, scene)

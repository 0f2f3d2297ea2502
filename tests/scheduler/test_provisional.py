"""Incomplete blocks, shown on request: what is sent and when, and that it changes nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import InvalidField
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.resume import decode
from scheduler_svc.stream import Stream
from tests.scheduler.in_memory import Bench, ContextRunner, expected, play
from tests.scheduler.test_overload import passes, until
from tests.worker.scripted import BLOCK, MASK, effort, make_loop

# At temperature 1 and a low threshold a block takes several steps, and every token depends on those before it.
SAMPLED: dict[str, Any] = {
    "sampling": api.SamplingParams(temperature=1.0, seed=7),
    "algorithm_params": {"threshold": 0.1},
    "ignore_eos": True,
}
PROMPT = [20 + n % 9 for n in range(BLOCK + 3)]
TOKENS = 90


async def read(bench: Bench, stream: Stream) -> list[api.GenerateResponse]:
    """All events."""
    try:
        return [event async for event in stream.read()]
    finally:
        bench.scheduler.leave(stream)


def provisional(events: list[api.GenerateResponse]) -> list[api.Provisional]:
    return [event.provisional for event in events if event.HasField("provisional")]


def others(events: list[api.GenerateResponse]) -> list[api.GenerateResponse]:
    """The events that are not provisional, resume values decoded; all without the count of rounds."""
    kept = []
    for event in events:
        if event.HasField("provisional"):
            continue
        kept.append(api.GenerateResponse.FromString(event.SerializeToString()))
        message = getattr(kept[-1], str(event.WhichOneof("event")))
        state = decode(message.resume, "resume")
        state.sample.usage.rounds = 0
        message.resume = state.SerializeToString()
        if event.HasField("finished"):
            message.usage.rounds = 0
    return kept


def run_one(bench: Bench, **fields: Any) -> list[api.GenerateResponse]:
    """The events of a request that is alone."""
    events: list[api.GenerateResponse] = []

    async def scene() -> None:
        events.extend(await read(bench, await bench.submit("x", **{"prompt": PROMPT, **fields})))

    play(bench, scene)
    return events


def ids_of(events: list[api.GenerateResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.committed.token_ids]


def context_bench(fused_commit: bool = False, **settings: Any) -> Bench:
    return Bench(make_loop(runner=ContextRunner(), fused_commit=fused_commit), **settings)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_block_is_shown_every_so_many_forwards(every: int, rounds_in_flight: int) -> None:
    """Its positions fill up from event to event; each comes so many forwards after the last one."""
    bench = Bench(make_loop(), rounds_in_flight=rounds_in_flight)
    events = run_one(bench, prompt=effort(11), max_new_tokens=31, provisional_every_forwards=every)
    shown = provisional(events)
    # Each step sets 4 positions; the eighth ends the request.
    assert [one.forwards for one in shown] == list(range(every, 8, every))
    for one in shown:
        num_set = 4 * one.forwards
        assert list(one.token_ids) == expected(1, num_set) + [MASK] * (31 - num_set)
        assert list(one.masked) == [False] * num_set + [True] * (31 - num_set)
        assert sum(piece.num_masks for piece in one.pieces) == 31 - num_set and (one.block_index, one.sample_index) == (
            0,
            0,
        )
    assert ids_of(events) == expected(1, 31)


@pytest.mark.parametrize("fused_commit", [False, True])
@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_all_else_is_as_without(rounds_in_flight: int, fused_commit: bool) -> None:
    """Text, ids, usage and forwards of every other event are those of a request that does not ask; the blocks shown
    hold, where nothing is masked any more, what is then committed."""
    plain, asking = (
        run_one(
            context_bench(fused_commit, rounds_in_flight=rounds_in_flight), max_new_tokens=TOKENS, **SAMPLED, **fields
        )
        for fields in ({}, {"provisional_every_forwards": 1})
    )
    assert others(asking) == others(plain) and not provisional(plain)
    shown = provisional(asking)
    assert len(shown) > 6 and {one.block_index for one in shown} == {1, 2, 3}
    assert all(
        len(one.token_ids) == (29 if one.block_index == 1 else 32 if one.block_index == 2 else 29) for one in shown
    )
    ids = ids_of(plain)
    for one in shown:
        first = max(0, one.block_index * BLOCK - len(PROMPT))
        for place, (token_id, masked) in enumerate(zip(one.token_ids, one.masked, strict=True)):
            assert token_id == (MASK if masked else ids[first + place])


@pytest.mark.parametrize("fused_commit", [False, True])
def test_the_tokens_of_others_do_not_change(fused_commit: bool) -> None:
    """Neighbours that do not ask get the same events beside one that does as beside one that does not."""

    def run(every: int | None) -> list[list[api.GenerateResponse]]:
        bench = context_bench(fused_commit)
        events: list[list[api.GenerateResponse]] = []

        async def scene() -> None:
            fields = {} if every is None else {"provisional_every_forwards": every}
            streams = [await bench.submit("asks", PROMPT, TOKENS, **SAMPLED, **fields)]
            streams += [await bench.submit(f"r{n}", PROMPT[n:], TOKENS, **SAMPLED) for n in range(3)]
            events.extend(await asyncio.gather(*(read(bench, stream) for stream in streams)))

        play(bench, scene)
        return events

    plain, beside = run(None), run(1)
    assert provisional(beside[0]) and not any(map(provisional, beside[1:]))
    for before, after in zip(plain, beside, strict=True):
        assert others(after) == others(before)


def test_rounds_without_one_who_asks_are_not_cut() -> None:
    """Only rounds that name a row of such a request have a limit of forwards, the least that is wanted."""
    bench = Bench(make_loop())

    async def scene() -> None:
        quiet = await bench.submit("quiet", effort(5), 400)
        await until(lambda: quiet.samples[0].committed_ids)
        asking = [
            await bench.submit("a", effort(5), 31, provisional_every_forwards=3),
            await bench.submit("b", effort(5), 31, provisional_every_forwards=2),
        ]
        await asyncio.gather(*(read(bench, stream) for stream in (quiet, *asking)))

    play(bench, scene)
    for request in bench.links[0].requests:
        named = {start.request_id for start in request.starts} | set(request.continues.request_ids)
        assert request.max_forwards == (2 if "b" in named else 3 if "a" in named else 0)


def test_an_unchanged_block_is_not_shown_again() -> None:
    """Steps that only fill positions behind the last allowed token bring no event."""
    events = run_one(Bench(make_loop()), prompt=effort(32), max_new_tokens=4, provisional_every_forwards=1)
    assert [one.forwards for one in provisional(events)] == [1, 2, 3, 4]
    assert [list(one.token_ids).count(MASK) for one in provisional(events)] == [3, 2, 1, 0]
    assert events[-1].finished.usage.forwards == 31


def test_samples_are_shown_each() -> None:
    """The events say whose block it is."""
    events = run_one(context_bench(), max_new_tokens=TOKENS, n=3, **SAMPLED, provisional_every_forwards=1)
    assert {one.sample_index for one in provisional(events)} == {0, 1, 2}


def test_a_server_in_lockstep_refuses_it_by_name() -> None:
    """Its rounds show no block before it is done; a request that does not ask is served."""
    bench = Bench(make_loop(), dllm_fdfo=False)

    async def scene() -> None:
        with pytest.raises(InvalidField, match="lockstep") as refused:
            await bench.submit("x", effort(3), 31, provisional_every_forwards=1)
        assert refused.value.field == "provisional_every_forwards"
        assert (await bench.read(await bench.submit("x", effort(3), 31)))[0] == expected(1, 31)

    play(bench, scene)


def test_a_client_that_does_not_read_finds_the_newest_only() -> None:
    """One event a sample waits, whatever the block went through; done blocks come in their order, and it is not parked
    for what was shown."""
    bench = Bench(make_loop(), max_stream_buffer_bytes=400)

    async def scene() -> None:
        stream = await bench.submit("slow", effort(32), 31, provisional_every_forwards=1)
        await until(lambda: stream.samples[0].forwards == 25)
        assert len(stream.unread_provisional) == 1 and stream.events.qsize() == 2 and not stream.is_parked
        before = stream.buffered_bytes
        reader = stream.read()
        assert (await anext(reader)).HasField("started")
        event = await anext(reader)
        assert event.provisional.forwards == 25 and list(event.provisional.masked).count(False) == 25
        assert not stream.unread_provisional and stream.buffered_bytes < before
        rest = [event async for event in reader]
        assert [one.forwards for one in provisional(rest)] == list(range(26, 31))
        assert stream.buffered_bytes == 0
        bench.scheduler.leave(stream)

    play(bench, scene)
    assert bench.scheduler.counters.times_parked == 0


def test_what_is_outdated_is_not_sent() -> None:
    """A block that is done, or whose request is over, is not shown any more; the next one comes after its text."""
    bench = Bench(make_loop())

    async def scene() -> None:
        stream = await bench.submit("slow", effort(9), 60, provisional_every_forwards=1)
        await until(lambda: stream.unread_provisional and stream.unread_provisional[0].provisional.block_index == 1)
        reader = stream.read()
        kinds = [(await anext(reader)).WhichOneof("event") for _ in range(3)]
        assert kinds == ["started", "committed", "provisional"]
        await until(lambda: stream.is_finished)
        assert [event.WhichOneof("event") async for event in reader][-2:] == ["committed", "finished"]
        bench.scheduler.leave(stream)
        stream = await bench.submit("ended", effort(30), 90, provisional_every_forwards=1)
        await until(lambda: stream.unread_provisional)
        bench.scheduler.abort("ended")
        assert not provisional(await read(bench, stream))
        await passes()

    play(bench, scene)


def test_a_moved_request_is_shown_on() -> None:
    """After its worker died it goes on from the last snapshot, and so do the events."""
    bench = Bench(make_loop(), make_loop())

    async def scene() -> None:
        stream = await bench.submit("x", effort(20), 31, provisional_every_forwards=1)
        reader = asyncio.create_task(read(bench, stream))
        await until(lambda: stream.samples[0].forwards == 8)
        link = next(link for link in bench.links if link.requests)
        link.is_dead = True
        events = await reader
        assert ids_of(events) == expected(1, 31)
        shown = provisional(events)
        assert [list(one.masked).count(False) for one in shown] == [2 * n for n in range(1, 16)]

    play(bench, scene)

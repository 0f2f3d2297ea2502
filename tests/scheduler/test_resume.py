"""Requests that go on at another scheduler, over real denoise loops in memory; what a client keeps is its library's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from common.errors import AlreadyLive, DeadlineOver, InvalidField, QueueFull, ServiceError, TakenOver, Unavailable
from fdfo.scheduler.v1 import resume_pb2
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo_client._progress import Progress
from scheduler_svc.resume import MAX_COUNT, decode, encode
from scheduler_svc.stream import Stream
from tests.scheduler.in_memory import Bench, ContextRunner, expected, play
from tests.worker.scripted import BLOCK, MASK, assert_whole, effort, make_loop

PROMPT = [20 + n % 9 for n in range(BLOCK + 3)]


def generate(request_id: str = "x", prompt: Sequence[int] = PROMPT, **fields: Any) -> api.GenerateRequest:
    """An unseeded request at temperature 1 whose tokens depend on all before them."""
    values: dict[str, Any] = {
        "max_new_tokens": 100,
        "sampling": api.SamplingParams(temperature=1.0),
        "algorithm_params": {"threshold": 0.1},
        "ignore_eos": True,
        **fields,
    }
    return api.GenerateRequest(request_id=request_id, prompt_ids=api.TokenIds(ids=prompt), **values)


def new_bench(**settings: Any) -> Bench:
    return Bench(make_loop(num_slots=3, runner=ContextRunner()), **settings)


class Reader:
    """A client's side of one request: what it was handed, and what it needs to go on."""

    def __init__(self, request: api.GenerateRequest) -> None:
        self.progress = Progress(request)
        self.ids: dict[int, list[int]] = {}
        self.logprobs: list[float] = []
        self.steps: list[int] = []
        self.usage: dict[int, tuple[int, int]] = {}
        self.cached: dict[int, int] = {}
        self.interrupted: list[api.Interrupted] = []

    async def read(self, bench: Bench, num_messages: int | None = None) -> Stream:
        """One call, to its end or until so many messages came; then the client is gone."""
        stream = await bench.scheduler.submit(self.progress.next_request())
        await self.follow(bench, stream, num_messages)
        return stream

    async def follow(self, bench: Bench, stream: Stream, num_messages: int | None = None) -> None:
        count = 0
        try:
            async for message in stream.read():
                self.take(message)
                count += 1
                if count == num_messages:
                    return
        finally:
            bench.scheduler.leave(stream)

    def take(self, message: api.GenerateResponse) -> None:
        event = self.progress.take(message, "memory")
        if message.HasField("interrupted"):
            self.interrupted.append(message.interrupted)
        if event is None:
            return
        if message.HasField("committed"):
            self.ids.setdefault(message.committed.sample_index, []).extend(message.committed.token_ids)
            self.logprobs += message.committed.logprobs
            self.steps += message.committed.first_unmask_steps
        if message.HasField("finished"):
            index, usage = message.finished.sample_index, message.finished.usage
            self.usage[index] = (usage.prompt_tokens, usage.completion_tokens)
            self.cached[index] = usage.cached_tokens

    def answer(self) -> tuple[object, ...]:
        return self.ids, self.logprobs, self.steps, self.usage


def messages_of(request: api.GenerateRequest) -> list[api.GenerateResponse]:
    """All that an undisturbed scheduler sends."""
    messages: list[api.GenerateResponse] = []
    bench = new_bench()

    async def scene() -> None:
        stream = await bench.scheduler.submit(request)
        messages.extend([message async for message in stream.read()])
        bench.scheduler.leave(stream)

    play(bench, scene)
    return messages


def after(request: api.GenerateRequest, messages: Iterable[api.GenerateResponse]) -> Reader:
    """A client that got these messages, and then lost its scheduler."""
    reader = Reader(request)
    for message in messages:
        reader.take(message)
    return reader


def read_at(bench: Bench, reader: Reader, num_messages: int | None = None) -> None:
    """A call at a scheduler that lives for this call."""

    async def scene() -> None:
        await reader.read(bench, num_messages)

    play(bench, scene)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True, "first_unmask_steps": True, "stop": ["never to be seen"]},
        {"sampling": api.SamplingParams()},
        {"provisional_every_forwards": 2},
    ],
    ids=["samples", "records", "greedy", "provisional"],
)
@pytest.mark.parametrize("prompt_length", [3, BLOCK + 3])
def test_a_scheduler_that_dies_after_any_message(fields: dict[str, Any], prompt_length: int) -> None:
    """Another one, with another worker, goes on: all together is the undisturbed answer, under the seed first drawn."""
    request = generate("x", PROMPT[:prompt_length], **fields)
    messages = messages_of(request)
    whole = after(request, messages)
    bench = Bench(make_loop(num_slots=3, runner=ContextRunner(), caching=False))

    async def scene() -> None:
        for cut in range(1, len(messages)):
            reader = after(request, messages[:cut])
            told = sum(len(message.committed.token_ids) for message in messages[:cut])
            before = bench.scheduler.counters.published_tokens
            await reader.read(bench)
            assert reader.progress.is_complete and reader.progress.num_resumes == 1
            assert reader.answer() == whole.answer()
            published = bench.scheduler.counters.published_tokens - before
            assert published + told == 100 * (request.n or 1), "a scheduler counts what it published itself"

    play(bench, scene)
    assert_whole(bench.links[0].loop, held=0)


def test_finished_samples_are_not_computed_again() -> None:
    """Of three samples one had ended: the worker of the next scheduler hears of the other two only."""
    request = generate(n=3)
    messages = messages_of(request)
    first_end = next(i for i, message in enumerate(messages) if message.HasField("finished"))
    reader = after(request, messages[: first_end + 1])
    (ended,) = reader.usage
    bench = new_bench()
    read_at(bench, reader)
    started = [row.sample_index for sent in bench.links[0].requests for row in sent.starts]
    assert sorted(started) == sorted({0, 1, 2} - {ended})
    assert reader.answer() == after(request, messages).answer()


def test_only_the_finish_was_lost() -> None:
    """All tokens had come: the next scheduler says how it ended, and sends nothing to a worker."""
    request = generate()
    messages = messages_of(request)
    reader = after(request, messages[:-1])
    assert len(reader.ids[0]) == 100 and not reader.progress.is_complete
    bench = new_bench()
    read_at(bench, reader)
    assert reader.answer() == after(request, messages).answer()
    assert bench.links[0].requests == []


def test_what_the_first_scheduler_chose_stays() -> None:
    """Seed, limit, algorithm and parameters that a request left open are those of the scheduler that began it."""
    request = generate(max_new_tokens=None, algorithm_params={})
    reader = Reader(request)
    read_at(new_bench(), reader, 2)
    last = new_bench(dllm_algorithm="JointThreshold")

    async def scene() -> None:
        stream = await last.scheduler.submit(reader.progress.next_request())
        spec = stream.samples[0].spec
        assert (spec.algorithm, spec.max_new_tokens) == ("LowConfidence", 1024 - len(PROMPT))
        assert spec.algorithm_params == {"threshold": 0.95}
        last.scheduler.leave(stream)

    play(last, scene)


def test_a_resumed_live_request_is_taken_over() -> None:
    """The old stream ends with ABORTED, its row is released, and the new one goes on from what its client says."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        request = api.GenerateRequest(request_id="x", prompt_ids=api.TokenIds(ids=effort(9)), max_new_tokens=200)
        old, reader = await bench.scheduler.submit(request), Reader(request)
        messages = old.read()
        for _ in range(3):
            reader.take(await anext(messages))
        while not bench.scheduler.loops[0].running:
            await asyncio.sleep(0)
        new = await bench.scheduler.submit(reader.progress.next_request())
        with pytest.raises(TakenOver):
            async for _ in messages:
                pass
        bench.scheduler.leave(old)
        assert bench.scheduler.live == {"x": new}
        await reader.follow(bench, new)
        assert reader.ids[0] == expected(1, 200)
        assert bench.scheduler.counters.published_tokens >= 200

    play(bench, scene)
    assert_whole(bench.links[0].loop)
    assert not bench.scheduler.live
    assert_whole(bench.links[0].loop, held=0)


def test_only_the_same_request_is_taken_over() -> None:
    """A live id without resume, or with that of another request, is refused; the live one goes on."""
    bench = Bench(make_loop())

    async def scene() -> None:
        other = Reader(generate("x", effort(3)))
        await other.read(bench, 1)
        live = await bench.submit("x", effort(9), 60)
        for request in (generate("x", effort(3)), other.progress.next_request()):
            with pytest.raises(AlreadyLive):
                await bench.scheduler.submit(request)
        assert (await bench.read(live))[0] == expected(1, 60)

    play(bench, scene)


def test_a_queued_request_resumes_and_one_that_ran_goes_first() -> None:
    """Nothing committed: it keeps its seed and waits its turn; one with tokens goes before all of its class. The bound
    of the queue holds for both."""
    ran, queued = Reader(generate("ran")), Reader(generate("queued", n=2))
    read_at(new_bench(), ran, 2)
    read_at(new_bench(), queued, 1)
    bench = Bench(make_loop(num_slots=1, runner=ContextRunner()), max_queued_requests=4)

    async def scene() -> None:
        busy = await bench.submit("busy", effort(30), 60)
        while not bench.scheduler.loops[0].running:
            await asyncio.sleep(0)
        waiting = await bench.submit("waiting", effort(3), 60)
        assert queued.progress.started is not None
        streams = [await bench.scheduler.submit(one.progress.next_request()) for one in (queued, ran)]
        assert streams[0].samples[0].seed == queued.progress.started.seed
        assert bench.scheduler.queue.first() is streams[1].samples[0]
        more = [await bench.submit("more", effort(2), 60)]
        with pytest.raises(QueueFull):
            await bench.scheduler.submit(ran.progress.next_request())
        await asyncio.gather(*map(bench.read_all, [busy, waiting, *streams, *more]))

    play(bench, scene)


@pytest.mark.parametrize("reason", ["shutdown", "deadline"])
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_stream_that_is_cut_short_says_how_to_go_on(reason: str, phase: str) -> None:
    """At the end of the grace time and at the deadline: usage and resume of each sample, then the error, and no further
    work; another scheduler goes on from there, the held-back and untold tokens too."""
    bench = Bench(make_loop(num_slots=1, runner=ContextRunner()), max_forwards=1)
    reader = Reader(generate(n=2))

    async def scene() -> None:
        if phase == "queued":
            await bench.submit("before", effort(30), 600)
        stream = await bench.scheduler.submit(reader.progress.next_request())
        while phase == "running" and not stream.samples[0].committed_ids:
            await asyncio.sleep(0)
        if reason == "shutdown":
            await bench.scheduler.close(0)
        else:
            bench.scheduler.end_within(stream, 0.0)
        with pytest.raises(Unavailable if reason == "shutdown" else DeadlineOver):
            await reader.follow(bench, stream)
        while any(request_id == "x" for request_id, _ in bench.scheduler.loops[0].running):
            await asyncio.sleep(0)
        assert not bench.scheduler.queue.first()

    play(bench, scene)
    assert [message.sample_index for message in reader.interrupted] == [0, 1]
    assert (reader.interrupted[0].usage.forwards > 0) == (phase == "running")
    assert reader.interrupted[0].usage.prompt_tokens == len(PROMPT)
    read_at(new_bench(), reader)
    assert reader.progress.started is not None
    seeded = generate(n=2, sampling=api.SamplingParams(temperature=1.0, seed=reader.progress.started.seed))
    assert reader.ids == after(seeded, messages_of(seeded)).ids


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_scheduler_that_ends_frees_its_rows(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker holds nothing for a scheduler that has gone in peace; one that does not answer is not waited for."""
    bench = new_bench()
    loop, link = bench.links[0].loop, bench.links[0]

    async def scene() -> None:
        stream = await bench.scheduler.submit(generate())
        while not stream.samples[0].committed_ids:
            await asyncio.sleep(0)
        held.append(loop.pool.usage().held)
        if is_dead:
            monkeypatch.setattr(link, "heartbeat", lambda generation: asyncio.sleep(3600))

    held: list[int] = []
    monkeypatch.setattr("scheduler_svc.core.FREE_ROWS_S", 0.05)
    play(bench, scene)
    assert held[0]
    assert_whole(loop, held=held[0] if is_dead else 0)


def test_a_deadline_that_is_not_reached_costs_nothing() -> None:
    """The timer goes with its stream."""
    bench = Bench(make_loop())

    async def scene() -> None:
        stream = await bench.submit("a", effort(3), 31)
        bench.scheduler.end_within(stream, None)
        bench.scheduler.end_within(stream, 60.0)
        assert (await bench.read(stream))[0] == expected(1, 31)
        assert stream.timer is not None and stream.timer.cancelled()

    play(bench, scene)


def test_cached_tokens_are_those_of_the_first_start() -> None:
    """A scheduler that goes on at the same worker finds all cached; the prompt was computed all the same."""
    loop = make_loop(runner=ContextRunner())
    reader = Reader(generate(max_new_tokens=200))
    read_at(Bench(loop), reader, 3)
    read_at(Bench(loop), reader)
    assert (reader.usage, reader.cached) == ({0: (len(PROMPT), 200)}, {0: 0})


# What a client may make up.


def begun(request: api.GenerateRequest) -> api.GenerateRequest:
    """The message that goes on with this request after its first block."""
    reader = Reader(request)
    read_at(new_bench(), reader, 2)
    return reader.progress.next_request()


Change = Callable[[api.GenerateRequest, resume_pb2.ResumeState], object]


def set_committed(make: Callable[[list[int]], list[int]]) -> Change:
    def change(request: api.GenerateRequest, state: resume_pb2.ResumeState) -> None:
        request.resumes[0].committed_ids[:] = make(list(request.resumes[0].committed_ids))

    return change


def set_sample(**values: Any) -> Change:
    return lambda request, state: state.sample.MergeFrom(resume_pb2.ResumedSample(**values))


def set_usage(**values: Any) -> Change:
    return lambda request, state: state.sample.usage.MergeFrom(api.Usage(**values))


HOSTILE: dict[str, tuple[Change, str, str]] = {
    "no ids": (set_committed(lambda ids: []), "resumes[0].value", "does not fit 0 committed ids"),
    "part of a block": (set_committed(lambda ids: [*ids, 40]), "resumes[0].committed_ids", "must end with a block"),
    "too many": (set_committed(lambda ids: [40] * 101), "resumes[0].committed_ids", "ends after 100"),
    "huge": (set_committed(lambda ids: [40] * 500_000), "resumes[0].committed_ids", "it has 500000"),
    "mask": (set_committed(lambda ids: [MASK, *ids[1:]]), "resumes[0].committed_ids[0]", "mask token 1"),
    "no token": (set_committed(lambda ids: [*ids[:-1], 2**32 - 1]), "resumes[0].committed_ids[28]", "must be below"),
    "another block": (
        set_committed(lambda ids: [*ids, *[40] * BLOCK]),
        "resumes[0].value",
        "and 61",
    ),
    "published more": (set_sample(published_characters=10**9), "resumes[0].value", "1000000000 characters"),
    "sample": (set_sample(sample_index=7), "resumes[0].value", "is of sample 7; the request has 1"),
    "forwards": (set_usage(forwards=2**64 - 1), "resumes[0].value", f"more than {MAX_COUNT}"),
    "rounds": (set_usage(rounds=MAX_COUNT + 1), "resumes[0].value", f"more than {MAX_COUNT}"),
    "tokens": (set_usage(completion_tokens=2**32 - 1), "resumes[0].value", "does not fit"),
    "prompt tokens": (set_usage(prompt_tokens=5), "resumes[0].value", "counts other prompt tokens"),
    "cached tokens": (set_usage(cached_tokens=2**32 - 1), "resumes[0].value", "counts other prompt tokens"),
    "records": (lambda request, state: state.sample.logprobs.append(0), "resumes[0].value", "does not fit"),
    "other prompt": (lambda request, state: request.prompt_ids.ids.append(5), "resumes[0].value", "another prompt"),
    "other options": (lambda request, state: request.stop.append("a"), "resumes[0].value", "other options"),
    "other seed": (lambda request, state: setattr(request.sampling, "seed", 5), "resumes[0].value", "other options"),
    "made-up seed": (lambda request, state: setattr(state.request, "seed", 2**64 - 1), "sampling.seed", "must be from"),
    "made-up algorithm": (lambda request, state: setattr(state.request, "algorithm", "X"), "algorithm", "unknown"),
    "another model": (
        lambda request, state: setattr(state.request, "fingerprint", "other"),
        "resumes[0].value",
        "is of another model: its fingerprint is other",
    ),
    "twice": (
        lambda request, state: request.resumes.add().CopyFrom(request.resumes[0]),
        "resumes",
        "at most one entry a sample",
    ),
}


def changed(request: api.GenerateRequest, change: Change) -> api.GenerateRequest:
    """The request after a change of it or of its first value, which gets a checksum that fits."""
    request = api.GenerateRequest.FromString(request.SerializeToString())
    state = decode(request.resumes[0].value, "")
    change(request, state)
    request.resumes[0].value = encode(state.SerializeToString())
    return request


def test_made_up_resumes_are_refused_and_disturb_nobody() -> None:
    """Whatever a client makes up, with a checksum that fits: an error that names the field, and no work."""
    request = begun(generate())
    several = begun(generate(n=2))
    bench = new_bench()

    async def scene() -> None:
        good = await bench.scheduler.submit(generate("good"))
        for name, (change, field, words) in HOSTILE.items():
            with pytest.raises(InvalidField) as caught:
                await bench.scheduler.submit(changed(request, change))
            assert (caught.value.field, words in caught.value.message) == (field, True), (name, caught.value)
        several.resumes.append(several.resumes[0])
        with pytest.raises(InvalidField, match=r"resumes\[1\].value: is of sample 0, as that of resumes\[0\] is"):
            await bench.scheduler.submit(several)
        assert list(bench.scheduler.live) == ["good"]
        (answer,) = await bench.read_all(good)
        assert len(answer[0]) == 100
        (answer,) = await bench.read_all(await bench.scheduler.submit(request))
        assert answer[1].usage.completion_tokens == 100

    play(bench, scene)


def test_ids_behind_the_end_are_refused() -> None:
    """What was committed ends with the stop token; more is not taken."""
    request = begun(generate(stop_token_ids=[63], prompt=PROMPT[:3]))
    bench = new_bench()

    async def scene() -> None:
        ids = request.resumes[0].committed_ids
        ids[5] = 63
        with pytest.raises(ServiceError, match=r"resumes\[0\].committed_ids: goes on after its end, which is at 6 ids"):
            await bench.scheduler.submit(request)

    play(bench, scene)

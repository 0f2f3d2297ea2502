"""Calls of both clients against a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import (
    AsyncClient,
    Client,
    Committed,
    Finished,
    InvalidRequest,
    Piece,
    Provisional,
    RequestFailed,
    ServerUnavailable,
    Started,
    UnexpectedServer,
    Usage,
)
from fdfo_client.testing import (
    HOLD,
    FakeScheduler,
    Step,
    answer,
    committed,
    finished,
    serving,
    stall,
    started,
)

READY = pb.GetServerInfoResponse(served_model_name="tiny", workers=[pb.WorkerState(target="w:1", ready=True)])
NOT_READY = pb.GetServerInfoResponse(workers=[pb.WorkerState(target="w:1", last_error="it loads")])


@contextlib.contextmanager
def client_of(scheduler: FakeScheduler) -> Iterator[Client]:
    with serving(scheduler) as target, Client(target) as client:
        yield client


def script(*steps: Step) -> Callable[[pb.GenerateRequest], list[Step]]:
    return lambda request: list(steps)


def test_stream_gives_typed_events() -> None:
    """Each message becomes its event, with every field, in order."""
    usage = pb.Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=2, forwards=6, rounds=5)
    steps = script(
        started("abc", seed=2**64 - 1, queue_position=2, prompt_tokens=4),
        committed("ab", [5, 6], forwards=3),
        committed("c", [7], forwards=6),
        finished(pb.FINISH_REASON_STOP, usage=usage, stop_token_id=0),
    )
    with client_of(FakeScheduler(steps)) as client:
        events = list(client.stream("x"))
    assert events == [
        Started("abc", 2**64 - 1, 2, 4),
        Committed("ab", (5, 6), 3),
        Committed("c", (7,), 6),
        Finished("stop", Usage(4, 3, 2, 6, 5), stop_token_id=0),
    ]


def test_generate_puts_the_events_together() -> None:
    """A completion holds the whole text and ids, why it ended, its cost, and what repeats it."""
    usage = pb.Usage(prompt_tokens=4, completion_tokens=3, forwards=6, rounds=5)
    steps = script(
        started("abc", seed=9),
        committed("ab", [5, 6]),
        committed("", [7]),
        finished(pb.FINISH_REASON_STOP, usage=usage, stop_string="END"),
    )
    with client_of(FakeScheduler(steps)) as client:
        completion = client.generate("x")
    assert (completion.text, completion.token_ids) == ("ab", (5, 6, 7))
    assert (completion.finish_reason, completion.stop_string, completion.stop_token_id) == ("stop", "END", None)
    assert (completion.request_id, completion.seed) == ("abc", 9)
    assert completion.usage == Usage(4, 3, 0, 6, 5)


def several(request: pb.GenerateRequest) -> list[Step]:
    """A script for two samples whose events come mixed."""
    return [
        started("abc", seed=9),
        committed("c", [7], sample_index=1),
        committed("a", [5], sample_index=0),
        committed("d", [8], sample_index=1),
        finished(pb.FINISH_REASON_STOP, usage=pb.Usage(forwards=4), stop_token_id=2, sample_index=1),
        committed("b", [6], sample_index=0),
        finished(usage=pb.Usage(forwards=6)),
    ]


def test_generate_puts_samples_together() -> None:
    """Each sample has its own text, end and cost; the completion is the first, with the others behind it."""
    with client_of(FakeScheduler(several)) as client:
        completion = client.generate("x", n=2)
        events = list(client.stream("x", n=2))
    first, second = completion.samples
    assert first is completion
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", (5, 6), "length")
    assert (second.text, second.token_ids, second.stop_token_id) == ("cd", (7, 8), 2)
    assert [(sample.sample_index, sample.usage.forwards) for sample in completion.samples] == [(0, 6), (1, 4)]
    assert [event.sample_index for event in events if not isinstance(event, Started)] == [1, 0, 1, 1, 0, 0]


def test_a_stream_without_the_finish_of_a_sample() -> None:
    """It is not taken for an answer, nor is one that goes on with a sample after its end."""
    steps = several(pb.GenerateRequest())
    with client_of(FakeScheduler(script(*steps[:-1]))) as client, pytest.raises(UnexpectedServer, match="before Fini"):
        client.generate("x", n=2)
    steps.insert(-1, committed("e", [9], sample_index=1))
    with client_of(FakeScheduler(script(*steps))) as client, pytest.raises(UnexpectedServer, match="out of order"):
        client.generate("x", n=2)


@pytest.mark.parametrize(
    ("reason", "name"),
    [(pb.FINISH_REASON_STOP, "stop"), (pb.FINISH_REASON_LENGTH, "length"), (pb.FINISH_REASON_ABORT, "abort")],
)
def test_finish_reasons(reason: pb.FinishReason, name: str) -> None:
    """Each finish reason has its word."""
    with client_of(FakeScheduler(script(started(), finished(reason)))) as client:
        assert client.generate("x").finish_reason == name


def test_every_option_reaches_the_request() -> None:
    """What is given is sent, in its field."""
    fake = FakeScheduler(script(started(), finished()))
    with client_of(fake) as client:
        client.generate(
            "Hi",
            max_new_tokens=5,
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            min_p=0.125,
            seed=0,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            algorithm="JointThreshold",
            algorithm_params={"threshold": 0.75},
            n=1,
            priority=-3,
            logprobs=True,
            first_unmask_steps=True,
            request_id="mine",
            parse_special_tokens=True,
            timeout=60.0,
        )
    assert fake.requests == [
        pb.GenerateRequest(
            request_id="mine",
            text="Hi",
            sampling=pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=0),
            max_new_tokens=5,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            algorithm="JointThreshold",
            algorithm_params={"threshold": 0.75},
            n=1,
            priority=-3,
            parse_special_tokens=True,
            logprobs=True,
            first_unmask_steps=True,
        )
    ]


def test_absent_options_stay_absent() -> None:
    """None and left out are the same, and neither sets a field: the server's default holds."""
    fake = FakeScheduler()
    with client_of(fake) as client:
        client.generate("Hi", temperature=None, max_new_tokens=None, stop=None, algorithm=None, seed=None)
        client.generate("Hi", stop="one", max_new_tokens=0)
    assert not fake.requests[0].HasField("max_new_tokens")
    assert not fake.requests[0].sampling.ListFields()
    assert fake.requests[1].HasField("max_new_tokens")
    assert list(fake.requests[1].stop) == ["one"]


def test_the_three_kinds_of_prompt() -> None:
    """Text, ids and messages each take their field; an empty one is sent, for the server to refuse."""
    fake = FakeScheduler()
    with client_of(fake) as client:
        client.generate("")
        client.generate(prompt_ids=[1, 2])
        client.generate(prompt_ids=[])
        client.generate(messages=[{"role": "user", "content": "Hi"}])
        client.generate(messages=[])
    assert [request.WhichOneof("prompt") for request in fake.requests] == [
        "text",
        "prompt_ids",
        "prompt_ids",
        "messages",
        "messages",
    ]
    assert fake.requests[3].messages.messages[0] == pb.ChatMessage(role="user", content="Hi")


def test_tools_calls_and_variables_travel_as_json() -> None:
    """Tools, calls and template variables are JSON texts, each in its place; a turn with calls needs no content."""
    fake = FakeScheduler()
    tool = {"type": "function", "function": {"name": "weather", "description": "in °C"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    with client_of(fake) as client:
        client.generate(
            messages=[
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "21", "name": None},  # type: ignore[typeddict-unknown-key]
            ],
            tools=[tool],
            chat_template_kwargs={"enable_thinking": False, "depth": 2, "tone": "ü"},
        )
    sent = fake.requests[0].messages
    assert [json.loads(text) for text in sent.tools] == [tool]
    assert json.loads(sent.chat_template_kwargs) == {"enable_thinking": False, "depth": 2, "tone": "ü"}
    assert [(turn.content, [json.loads(text) for text in turn.tool_calls]) for turn in sent.messages] == [
        ("Hi", []),
        ("", [call]),
        ("21", []),
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ("x", {"prompt_ids": [1]}, "prompt"),
        (None, {"prompt_ids": [1], "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        (5, {}, "prompt"),
        (None, {"prompt_ids": [-1]}, "prompt_ids"),
        (None, {"prompt_ids": ["a"]}, "prompt_ids"),
        (None, {"messages": [{"role": "user"}]}, "messages"),
        (None, {"messages": ["x"]}, "messages"),
        (None, {"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        (None, {"messages": [{"role": "assistant", "tool_calls": [{1, 2}]}]}, "messages[0].tool_calls"),
        (None, {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": {1}}]}, "tools"),
        (None, {"messages": [{"role": "user", "content": "x"}], "tools": 5}, "tools"),
        ("x", {"tools": [{}]}, "tools"),
        ("x", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (None, {"messages": [], "chat_template_kwargs": "a"}, "chat_template_kwargs"),
        (None, {"messages": [], "chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs"),
        ("x", {"max_new_tokens": -1}, "max_new_tokens"),
        ("x", {"max_new_tokens": 2**32}, "max_new_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"seed": 2**64}, "seed"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"top_k": 1.5}, "top_k"),
        ("x", {"stop": [1]}, "stop"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids"),
        ("x", {"algorithm_params": {"threshold": "high"}}, "algorithm_params"),
        ("x", {"n": -1}, "n"),
        ("x", {"priority": 2**31}, "priority"),
        ("x", {"timeout": 0}, "timeout"),
        ("x", {"timeout": float("nan")}, "timeout"),
        ("x", {"timeout": 1e300}, "timeout"),
        ("x", {"timeout": "soon"}, "timeout"),
        ("x", {"stop": 5}, "stop"),
        ("x", {"stop_token_ids": 7}, "stop_token_ids"),
        ("x", {"algorithm_params": [1]}, "algorithm_params"),
        ("x", {"request_id": "\ud800"}, "request_id"),
        ("x", {"ignore_eos": "yes"}, "ignore_eos"),
        (None, {"messages": 7}, "messages"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(prompt: Any, options: Any, field: str) -> None:
    """What does not fit the wire raises InvalidRequest with its field, before any call, from stream itself."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=re.escape(field)) as caught:
        client.stream(prompt, **options)
    assert caught.value.field == field
    assert re.match(rf"{re.escape(field)}\S*: (must be|give) ", str(caught.value)), (
        "in words of the option, not of protobuf"
    )


def test_a_value_that_does_not_fit_is_shown_cut() -> None:
    """The error says what the option takes, and shows what it was given, never more than fits a line."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.stream("x", max_new_tokens=2**40)
    assert str(caught.value) == "max_new_tokens: must be a whole number from 0 to 2**32 - 1, not 1099511627776"
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.stream("x", stop_token_ids=[-1] * 100_000)
    assert len(str(caught.value)) < 200


def test_an_option_that_does_not_exist() -> None:
    """A misspelt option is a TypeError that names it."""
    options: Any = {"temprature": 1}
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="temprature"):
        client.generate("x", **options)


def test_abort_ends_the_stream_with_reason_abort() -> None:
    """An abort from another thread ends the stream with Finished; an id that is not live gives False."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])
    with client_of(fake) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "x", request_id="mine")
        fake.held.get(timeout=10)
        assert client.abort("other") is False
        assert client.abort("mine") is True
        assert running.result(timeout=10).finish_reason == "abort"


def test_abort_reaches_every_target_of_a_list() -> None:
    """The request is found whichever scheduler has it; a target that is down is told when none had it."""
    fakes = [FakeScheduler(faults=[stall(after_blocks=1)]), FakeScheduler(faults=[stall(after_blocks=1)])]
    with (
        serving(fakes[0]) as one,
        serving(fakes[1]) as two,
        Client([one, two]) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        running = [pool.submit(client.generate, "x", request_id=name) for name in ("a", "b")]
        assert sorted(fake.held.get(timeout=10) for fake in fakes) == ["a", "b"]
        assert client.abort("a")
        assert client.abort("b")
        assert {future.result(timeout=10).request_id for future in running} == {"a", "b"}
        with Client([one, "127.0.0.1:1"]) as half, pytest.raises(ServerUnavailable):
            half.abort("a")


def test_leaving_a_stream_cancels_the_call() -> None:
    """break out of the loop is enough: the server sees the call cancelled."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])
    with client_of(fake) as client:
        for event in client.stream("x", request_id="mine"):
            if isinstance(event, Committed):
                fake.held.get(timeout=10)
                break
        gc.collect()
        assert fake.cancelled.get(timeout=10) == "mine"


def test_leaving_an_async_stream_cancels_the_call() -> None:
    """The same for the async client, when its generator is closed."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])

    async def leave(target: str) -> None:
        async with AsyncClient(target) as client:
            async with contextlib.aclosing(client.stream("x", request_id="mine")) as events:
                async for event in events:
                    if isinstance(event, Committed):
                        await asyncio.to_thread(fake.held.get, timeout=10)
                        break
            assert await asyncio.to_thread(fake.cancelled.get, timeout=10) == "mine"

    with serving(fake) as target:
        asyncio.run(leave(target))


def test_cancelling_the_task_cancels_the_call() -> None:
    """A cancelled task sees CancelledError, not an error of ours, and the server sees the call cancelled."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])

    async def cancel(target: str) -> None:
        async with AsyncClient(target) as client:
            task = asyncio.create_task(client.generate("x", request_id="mine"))
            await asyncio.to_thread(fake.held.get, timeout=10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.cancelled.get, timeout=10) == "mine"

    with serving(fake) as target:
        asyncio.run(cancel(target))


def test_closing_the_client_ends_its_calls() -> None:
    """A call that runs when its client is closed fails with a plain error, in its own thread, and is cancelled."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])
    with client_of(fake) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "x", request_id="mine")
        fake.held.get(timeout=10)
        client.close()
        with pytest.raises(RequestFailed, match="closed"):
            running.result(timeout=10)
        assert fake.cancelled.get(timeout=10) == "mine"
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("x")
        client.close()


def test_a_stream_that_outlives_its_client() -> None:
    """Leaving a stream after its client was closed raises nothing."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])
    with client_of(fake) as client:
        events = client.stream("x", request_id="mine")
        next(events)
    events.close()


def test_many_threads_share_a_client() -> None:
    """Calls of 32 threads at once each get their own answer."""
    fake = FakeScheduler(lambda request: answer(request.text, "!")(request))
    gate = threading.Barrier(32)
    with client_of(fake) as client, ThreadPoolExecutor(32) as pool:

        def ask(index: int) -> str:
            gate.wait()
            return client.generate(f"prompt {index}").text

        assert list(pool.map(ask, range(32))) == [f"prompt {index}!" for index in range(32)]


def test_a_list_takes_turns_and_passes_the_dead_by() -> None:
    """Requests go to each live target in turn; one that does not answer costs nothing but the attempt."""
    fakes = [FakeScheduler(), FakeScheduler()]
    with serving(fakes[0]) as one, serving(fakes[1]) as two, Client([one, "127.0.0.1:1", two]) as client:
        for _ in range(9):
            client.generate("x")
    counts = sorted(len(fake.requests) for fake in fakes)
    assert counts == [3, 6], "the dead one's share goes to the next"


def test_no_second_target_once_started() -> None:
    """After Started a lost scheduler is an error: nothing is asked for twice."""
    fake = FakeScheduler(script(started(), HOLD))
    with contextlib.ExitStack() as server, ThreadPoolExecutor(1) as pool:
        target = server.enter_context(serving(fake))
        with Client([target, target]) as client:
            running = pool.submit(client.generate, "x")
            fake.held.get(timeout=10)
            server.close()
            with pytest.raises(ServerUnavailable):
                running.result(timeout=10)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([], "before Finished"),
        ([started()], "before Finished"),
        ([started(), committed("a", [1])], "before Finished"),
        ([committed("a", [1])], "out of order"),
        ([started(), started()], "out of order"),
        ([started(), finished(), committed("a", [1])], "out of order"),
        ([started(), finished(), finished()], "out of order"),
        ([started(), finished(sample_index=1)], "out of order"),
        ([started(), finished(pb.FINISH_REASON_UNSPECIFIED)], "finish reason"),
    ],
)
def test_a_stream_against_the_protocol(steps: list[Step], told: str) -> None:
    """A stream that is not Started, Committed..., Finished raises UnexpectedServer; it is never taken for an answer."""
    with client_of(FakeScheduler(script(*steps))) as client, pytest.raises(UnexpectedServer, match=told):
        client.generate("x")


RECORDS: dict[str, Any] = {"logprobs": [-0.5, -2.0], "first_unmask_steps": [3, 0]}


def test_records_of_tokens_come_with_them() -> None:
    """What was asked for is in the events and in the completion, also where an event has no token."""
    steps = script(started(), committed("ab", [5, 6], **RECORDS), committed("c", []), finished())
    with client_of(FakeScheduler(steps)) as client:
        events = list(client.stream("x", logprobs=True, first_unmask_steps=True))
        completion = client.generate("x", logprobs=True, first_unmask_steps=True)
        half = client.generate("x", logprobs=True)
    assert events[1:3] == [Committed("ab", (5, 6), 0, (-0.5, -2.0), (3, 0)), Committed("c", (), 0, (), ())]
    assert (completion.logprobs, completion.first_unmask_steps) == ((-0.5, -2.0), (3, 0))
    assert (half.logprobs, half.first_unmask_steps) == ((-0.5, -2.0), None)


def test_records_that_were_not_asked_for_are_none() -> None:
    """None, not empty: the difference to an answer without tokens."""
    with client_of(FakeScheduler(script(started(), committed("ab", [5, 6]), finished()))) as client:
        completion = client.generate("x")
        empty = client.generate("x", logprobs=False)
    assert (completion.logprobs, completion.first_unmask_steps) == (None, None)
    assert empty.logprobs is None


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_records_that_do_not_fit_the_tokens(name: str) -> None:
    """Another number of values than of ids is a server against the protocol, never shifted values."""
    options: Any = {name: True}
    steps = script(started(), committed("abc", [5, 6, 7], **RECORDS), finished())
    with client_of(FakeScheduler(steps)) as client, pytest.raises(UnexpectedServer, match=f"2 {name} for 3 tokens"):
        client.generate("x", **options)


def test_events_of_a_later_version_are_passed_over() -> None:
    """An event that this client does not know is skipped."""
    later = pb.GenerateResponse.FromString(b"\xa2\x06\x00")  # field 100
    with client_of(FakeScheduler(script(started(), later, committed("a", [1]), finished()))) as client:
        assert client.generate("x").text == "a"


def test_provisional_events() -> None:
    """They come where the server sends them, with all fields; the whole answer needs none and asks for none."""
    pieces = [pb.ProvisionalPiece(text="ab"), pb.ProvisionalPiece(num_masks=1)]
    shown = pb.GenerateResponse(
        provisional=pb.Provisional(
            block_index=3, token_ids=[5, 6, 1], masked=[False, False, True], pieces=pieces, forwards=2
        )
    )
    fake = FakeScheduler(script(started(), shown, committed("abc", [5, 6, 7]), finished()))
    with client_of(fake) as client:
        events = list(client.stream("x", provisional_every_forwards=2))
        assert events[1] == Provisional(
            (Piece("ab", 0), Piece("", 1)), (5, 6, 1), (False, False, True), block_index=3, forwards=2
        )
        assert [type(event) for event in events] == [Started, Provisional, Committed, Finished]
        with pytest.raises(InvalidRequest, match="provisional_every_forwards: only `stream`"):
            client.generate("x", provisional_every_forwards=2)
        assert client.generate("x").text == "abc"
    assert [request.HasField("provisional_every_forwards") for request in fake.requests] == [True, False]
    assert fake.requests[0].provisional_every_forwards == 2


def test_server_info() -> None:
    """The server's state comes with all fields, workers and counters too."""
    message = pb.GetServerInfoResponse(
        scheduler_id="s",
        served_model_name="tiny",
        block_size=32,
        fdfo=True,
        queued=2,
        workers=[pb.WorkerState(target="w:1", ready=True, rows=3, max_rows=4, pages_free=5, pages_total=9)],
        counters=pb.SchedulerCounters(forwards=7, waiting_row_forwards=11, device_ms=1.5),
    )
    with client_of(FakeScheduler(infos=[message])) as client:
        info = client.server_info()
    assert (info.scheduler_id, info.served_model_name, info.block_size, info.fdfo, info.queued) == (
        "s",
        "tiny",
        32,
        True,
        2,
    )
    assert (info.workers[0].target, info.workers[0].rows, info.workers[0].pages_total) == ("w:1", 3, 9)
    assert (info.counters.forwards, info.counters.waiting_row_forwards, info.counters.device_ms) == (7, 11, 1.5)


def test_wait_ready_waits_for_a_worker() -> None:
    """wait_ready returns when a worker is ready, and else says after its time what is missing."""
    with client_of(FakeScheduler(infos=[NOT_READY, READY])) as client:
        assert client.wait_ready(timeout=30).served_model_name == "tiny"
    missing = pytest.raises(ServerUnavailable, match="no ready worker; w:1: it loads")
    with client_of(FakeScheduler(infos=[NOT_READY])) as client, missing:
        client.wait_ready(timeout=0.05)


def test_wait_ready_waits_for_a_scheduler() -> None:
    """wait_ready survives a scheduler that is not up, and names it after its time."""
    with Client("127.0.0.1:1") as client, pytest.raises(ServerUnavailable, match=r"not ready after 0\.05 s"):
        client.wait_ready(timeout=0.05)


def test_an_async_client_stays_in_its_loop() -> None:
    """Use from a second event loop is refused in words; before its first use a client belongs to none."""
    client = AsyncClient("127.0.0.1:1")
    with pytest.raises(ServerUnavailable):
        asyncio.run(client.generate("x"))
    with pytest.raises(RuntimeError, match="event loop"):
        asyncio.run(client.generate("x"))


@pytest.mark.parametrize(
    "target", ["", "localhost", "localhost:", ":50051", "a:1,b", "h:70000", "h:x", [], "http://h:1", "::1:1"]
)
def test_a_wrong_target(target: Any) -> None:
    """What is not a target is refused when the client is made."""
    with pytest.raises(ValueError, match="target"):
        Client(target)


def test_targets() -> None:
    """A string with commas is a list; a gRPC name is left as it is."""
    assert AsyncClient("a:1, b:2").targets == ("a:1", "b:2")
    assert AsyncClient(["a:1", "[::1]:2"]).targets == ("a:1", "[::1]:2")
    assert AsyncClient("ipv4:10.0.0.1:1,10.0.0.2:1").targets == ("ipv4:10.0.0.1:1,10.0.0.2:1",)
    assert AsyncClient("dns:///schedulers:50051").targets == ("dns:///schedulers:50051",)

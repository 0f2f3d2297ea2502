"""The client's way past lost and full schedulers, against scripted ones."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import (
    AsyncClient,
    Client,
    Committed,
    DeadlineExceeded,
    FdfoError,
    Finished,
    InvalidRequest,
    Overloaded,
    Provisional,
    RequestFailed,
    RetryPolicy,
    ServerUnavailable,
    Started,
    UnexpectedServer,
    Usage,
)
from fdfo_client.testing import (
    HOLD,
    FakeScheduler,
    Script,
    Step,
    answer,
    committed,
    failure,
    finished,
    overload,
    serving,
    started,
)

Code = grpc.StatusCode
LOST = failure(Code.UNAVAILABLE, "Socket closed")
TEXTS = ("one ", "two ", "three")
rest = answer(*TEXTS)  # or what is left of it


def full(hint_s: float | None) -> Step:
    """The refusal of a full queue."""
    (refusal,) = overload(hint_s)(())
    return refusal


class Scripts:
    """A script for each call in turn; the last one stays."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)

    def __call__(self, request: pb.GenerateRequest) -> Sequence[Step]:
        return (self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0])(request)


def ends(*steps: Step) -> Script:
    """A script of its own steps."""
    return lambda request: list(steps)


def dies_after(num_messages: int, end: Step = LOST) -> Script:
    """A script that is cut off."""
    return lambda request: [*rest(request)[:num_messages], end]


class Waits:
    """A policy whose waits are only written down, but for those of no time. A draw is always one half."""

    def __init__(self, **fields: Any) -> None:
        self.seconds: list[float] = []
        self.policy = RetryPolicy(draw=lambda: 0.5, sleep=self._sleep, **fields)

    def _sleep(self, seconds: float) -> Awaitable[None]:
        if seconds:
            self.seconds.append(round(seconds, 9))
        return asyncio.sleep(0)


@contextlib.contextmanager
def client_of(*fakes: FakeScheduler, **fields: Any) -> Iterator[tuple[Client, list[float]]]:
    """A client of all of them in this order, and the waits it made."""
    waits = Waits(**fields)
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(serving(fake)) for fake in fakes]
        client = stack.enter_context(Client(targets, retry=waits.policy))
        client._client._turn = 0
        yield client, waits.seconds


@pytest.mark.parametrize("num_messages", [1, 2, 3, 4])
def test_a_scheduler_dies_after_any_message(num_messages: int) -> None:
    """The next one goes on at once: each text and id once, one Started, one Finished that says so."""
    fakes = FakeScheduler(dies_after(num_messages)), FakeScheduler(rest)
    with client_of(*fakes) as (client, waits):
        events = list(client.stream("x", max_new_tokens=50))
    assert [type(event) for event in events] == [Started, *[Committed] * 3, Finished]
    assert [event.text for event in events if isinstance(event, Committed)] == list(TEXTS)
    assert isinstance(events[-1], Finished) and events[-1].resumes == 1
    assert [len(fake.requests) for fake in fakes] == [1, 1] and waits == []
    again = fakes[1].requests[0]
    again.ClearField("resumes")
    assert again == pb.GenerateRequest(text="x", max_new_tokens=50, request_id="fake-1"), "else the same request"


def test_provisional_events_are_nothing_to_go_on_from() -> None:
    """What is resumed is what was committed, and schedulers that only ever show are given up like silent ones."""
    shown = pb.GenerateResponse(provisional=pb.Provisional(token_ids=[5], masked=[False], forwards=1))
    fake = FakeScheduler(Scripts(lambda request: [*rest(request)[:2], shown, LOST], rest))
    with client_of(fake) as (client, _):
        events = list(client.stream("x", provisional_every_forwards=1))
    assert [type(event) for event in events] == [Started, Committed, Provisional, Committed, Committed, Finished]
    resume = pb.Resume(committed_ids=[ord(char) for char in TEXTS[0]], value=b"0:1")
    assert list(fake.requests[1].resumes) == [resume] and fake.requests[1].provisional_every_forwards == 1
    only_shows = FakeScheduler(lambda request: [rest(request)[0], shown, LOST])
    with client_of(only_shows, max_retries=2) as (client, waits), pytest.raises(ServerUnavailable):
        list(client.stream("x", provisional_every_forwards=1))
    assert waits == [0.075, 0.15]


def test_generate_goes_on_too() -> None:
    """The completion is whole and says how often it went on, from a client in asyncio code as well."""
    fake = FakeScheduler(Scripts(dies_after(2), dies_after(1), dies_after(2), rest))

    async def ask(target: str) -> None:
        waits = Waits()
        async with AsyncClient(target, retry=waits.policy) as client:
            completion = await client.generate("x")
        assert (completion.text, completion.resumes) == ("one two three", 3)
        assert waits.seconds == [0.075, 0.15, 0.075], "longer after a failure without anything new"

    with serving(fake) as target:
        asyncio.run(ask(target))


def test_a_server_that_really_goes() -> None:
    """A lost connection in mid-stream is resumed as a status is."""
    first, second = FakeScheduler(dies_after(2, HOLD)), FakeScheduler(rest)
    with contextlib.ExitStack() as server, serving(second) as other, ThreadPoolExecutor(1) as pool:
        target = server.enter_context(serving(first))
        with Client([target, other]) as client:
            client._client._turn = 0
            running = pool.submit(client.generate, "x")
            first.held.get(timeout=10)
            server.close()
            assert running.result(timeout=10).text == "one two three"


def test_nothing_new_for_too_long_is_an_error() -> None:
    """After so many turns over all targets, with longer and longer waits, the last error is raised."""
    fakes = FakeScheduler(Scripts(dies_after(3), dies_after(0))), FakeScheduler(dies_after(1))
    with client_of(*fakes, max_retries=4, max_delay_s=0.5) as (client, waits):
        with pytest.raises(ServerUnavailable):
            client.generate("x")
        assert waits == [0.075, 0.15, 0.3, 0.375]
        assert len(fakes[0].requests) + len(fakes[1].requests) == 10


def test_a_client_that_was_never_answered_does_not_wait() -> None:
    """Its target may be wrong. One that was answered before waits for its scheduler to come back."""
    fake = FakeScheduler(Scripts(ends(LOST), ends(LOST), rest, ends(LOST), ends(LOST), rest))
    with client_of(fake) as (client, waits):
        for _ in range(2):
            with pytest.raises(ServerUnavailable):
                client.generate("x")
        assert client.generate("x").resumes == 0 and waits == []
        assert client.generate("x").text == "one two three" and waits == [0.075, 0.15]


def test_without_retries_nothing_is_resumed() -> None:
    """max_retries=0: a list of targets is tried once, and what is lost after Started is an error."""
    fakes = FakeScheduler(Scripts(ends(LOST), dies_after(2), ends(full(1.0)))), FakeScheduler(Scripts(rest, ends(LOST)))
    with client_of(*fakes, max_retries=0) as (client, waits):
        assert client.generate("x").text == "one two three"
        for _ in range(2):
            client._client._turn = 0
            with pytest.raises(ServerUnavailable):
                client.generate("x")
        with client_of(fakes[0], max_retries=0) as (alone, _), pytest.raises(Overloaded):
            alone.generate("x")
    assert waits == [] and [len(fake.requests) for fake in fakes] == [4, 2]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(Code.INVALID_ARGUMENT, InvalidRequest), (Code.INTERNAL, RequestFailed), (Code.ABORTED, RequestFailed)],
)
def test_other_errors_are_raised_at_once(code: grpc.StatusCode, kind: type[FdfoError]) -> None:
    """What would fail again, and a request that another call took over, is not tried at another scheduler."""
    fakes = FakeScheduler(dies_after(2, failure(code, "why"))), FakeScheduler(rest)
    with client_of(*fakes) as (client, waits), pytest.raises(kind, match="why"):
        client.generate("x")
    assert fakes[1].requests == [] and waits == []


def test_a_full_queue_is_waited_for_as_it_says() -> None:
    """The other targets first; then the least of the hints and up to a quarter more; without a hint it is an error."""
    fakes = FakeScheduler(Scripts(ends(full(4.0)), rest)), FakeScheduler(ends(full(2.0)))
    with client_of(*fakes) as (client, waits):
        assert client.generate("x").text == "one two three"
    assert waits == [2.25] and len(fakes[1].requests) == 1
    with client_of(FakeScheduler(ends(full(None)))) as (client, waits), pytest.raises(Overloaded):
        client.generate("x")
    assert waits == []


def test_a_full_queue_is_waited_for_only_so_often() -> None:
    """A new request gives up after max_retries; one that was admitted before goes on asking."""
    with client_of(FakeScheduler(ends(full(1.0))), max_retries=3) as (client, waits):
        with pytest.raises(Overloaded) as caught:
            client.generate("x")
        assert caught.value.retry_after_s == 1.0 and len(waits) == 3
    scripts = Scripts(dies_after(2), *[ends(full(1.0))] * 20, rest)
    with client_of(FakeScheduler(scripts), max_retries=3) as (client, waits):
        assert client.generate("x").text == "one two three" and len(waits) == 21


def test_no_wait_passes_the_deadline() -> None:
    """When the next attempt would come after the timeout, the reason to wait is the error, at once."""
    fake = FakeScheduler(Scripts(ends(full(60.0)), dies_after(2)))
    with client_of(fake, first_delay_s=60.0, max_delay_s=60.0) as (client, waits):
        with pytest.raises(Overloaded):
            client.generate("x", timeout=5.0)
        with pytest.raises(ServerUnavailable):
            client.generate("x", timeout=5.0)
    assert waits == [] and len(fake.requests) == 2


def test_the_timeout_counts_all_attempts() -> None:
    """A later call has what the earlier ones left of the time."""
    fakes = FakeScheduler(dies_after(2)), FakeScheduler(dies_after(1, HOLD))
    with client_of(*fakes) as (client, _), pytest.raises(DeadlineExceeded):
        client.generate("x", timeout=0.3)
    assert len(fakes[1].requests) == 1


def interrupted(index: int, ids: list[int], value: bytes, forwards: int) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, forwards=forwards)
    return pb.GenerateResponse(
        interrupted=pb.Interrupted(sample_index=index, committed_ids=ids, resume=value, usage=usage)
    )


def test_what_a_scheduler_says_before_it_stops_is_used() -> None:
    """Interrupted is no event; its ids and value go to the next scheduler, with those of the samples that had ended."""
    first = ends(
        started("drawn", resume=b"s"),
        committed("a", [1], committed_ids=[1, 2], resume=b"v1", sample_index=1),
        finished(committed_ids=[7], resume=b"v0", usage=pb.Usage(forwards=2)),
        interrupted(1, [3], b"v2", 8),
        failure(Code.UNAVAILABLE, "the scheduler is shutting down"),
    )
    second = ends(
        started("drawn", resume=b"s"),
        finished(usage=pb.Usage(forwards=2)),
        committed("b", [4], committed_ids=[4], resume=b"v3", sample_index=1),
        finished(sample_index=1),
    )
    fakes = FakeScheduler(first), FakeScheduler(second)
    with client_of(*fakes) as (client, _):
        completion = client.generate("x", n=2)
    assert {resume.value: list(resume.committed_ids) for resume in fakes[1].requests[0].resumes} == {
        b"v2": [1, 2, 3],
        b"v0": [7],
    }
    assert [(sample.text, sample.resumes) for sample in completion.samples] == [("", 0), ("ab", 1)]
    assert completion.usage.forwards == 2


def test_a_deadline_tells_what_was_done() -> None:
    """The error has the usage of each sample that had not finished, as the scheduler of the last call told it."""
    late: list[Step] = [interrupted(1, [], b"", 5), interrupted(0, [], b"", 6), failure(Code.DEADLINE_EXCEEDED, "late")]
    lost: list[Step] = [interrupted(2, [], b"", 7), LOST]
    scripts = Scripts(ends(started(resume=b"s"), *lost), ends(started(resume=b"s"), *late), ends(*late[2:]))
    with client_of(FakeScheduler(scripts)) as (client, _):
        with pytest.raises(DeadlineExceeded) as caught:
            client.generate("x", n=3)
        assert caught.value.usage == (Usage(prompt_tokens=3, forwards=6), Usage(prompt_tokens=3, forwards=5))
        with pytest.raises(DeadlineExceeded) as caught:
            client.generate("x")
        assert caught.value.usage == ()


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([started("other", resume=b"0")], "began another"),
        ([started("drawn", seed=8, resume=b"0")], "began another"),
        ([committed("two ", [1])], "out of order"),
        ([started("drawn", resume=b"0"), committed("x", [1], sample_index=1), finished()], "out of order"),
        ([started("drawn", resume=b"0")], "before Finished"),
    ],
)
def test_a_resumed_stream_against_the_protocol(steps: list[Step], told: str) -> None:
    """Another request, another order or something new of a sample that had ended: an error, never part of an answer."""
    first: list[Step] = [started("drawn", resume=b"0"), finished(sample_index=1), LOST]
    fakes = FakeScheduler(ends(*first)), FakeScheduler(ends(*steps))
    with client_of(*fakes) as (client, _), pytest.raises(UnexpectedServer, match=told):
        client.generate("x", n=2)


def test_a_connection_lost_after_the_end_is_no_error() -> None:
    """Once every sample is finished the answer is whole, whatever becomes of the call."""
    fake = FakeScheduler(lambda request: [*rest(request), LOST])
    with client_of(fake) as (client, waits):
        assert client.generate("x").text == "one two three"
    assert waits == [] and len(fake.requests) == 1


def test_an_id_that_may_be_our_own_is_tried_again() -> None:
    """Lost before Started: the scheduler may hold the id until it sees that the connection is gone. Else it is an
    error."""
    exists = failure(Code.ALREADY_EXISTS, "request id 'drawn' is live")
    fake = FakeScheduler(Scripts(rest, ends(LOST), ends(exists), ends(exists), rest, ends(exists)))
    with client_of(fake) as (client, waits):
        client.generate("x")
        assert client.generate("x", request_id="drawn").text == "one two three"
        assert len(waits) == 3
        with pytest.raises(FdfoError, match="is live"):
            client.generate("x", request_id="drawn")
        assert len(waits) == 3


def test_closing_the_client_ends_a_wait() -> None:
    """A request that waits for its next attempt fails at once when its client is closed."""
    waiting = threading.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await asyncio.sleep(3600)

    fake = FakeScheduler(dies_after(2))
    with serving(fake) as target, ThreadPoolExecutor(1) as pool:
        client = Client(target, retry=RetryPolicy(sleep=sleep))
        running = pool.submit(client.generate, "x")
        assert waiting.wait(timeout=10)
        client.close()
        with pytest.raises(RequestFailed, match="closed"):
            running.result(timeout=10)

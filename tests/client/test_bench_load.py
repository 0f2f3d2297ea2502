"""Closed and open loops under a clock that jumps, with streams that last as long as a test says."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdfo_client import Committed, Event, FdfoError, Finished, Started, Usage
from fdfo_client.bench.load import Commit, Load
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import Item


class Server:
    """Streams that wait as long as their options say; counts those that run."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0
        self.num_left = 0

    async def stream(self, options: dict[str, Any]) -> AsyncIterator[Event]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            yield Started("r", seed=5, queue_position=0, prompt_tokens=3)
            await asyncio.sleep(options["lasts_s"])
            if "fails" in options:
                raise FdfoError(options["fails"])
            yield Committed("ab", (1, 2), forwards=4)
            if "ends" not in options:
                yield Finished(options.get("reason", "length"), Usage(prompt_tokens=3, completion_tokens=2, forwards=4))
        except (asyncio.CancelledError, GeneratorExit):
            self.num_left += 1
            raise
        finally:
            self.num_running -= 1


def run(
    items: list[Item], *, concurrency: int | None = None, duration_s: float | None = None, cut_at_s: float | None = None
) -> tuple[Load, Server]:
    """A load run to its end in virtual time."""
    server = Server()

    async def scenario() -> Load:
        load = Load(server.stream)
        if cut_at_s is not None:
            asyncio.get_running_loop().call_later(cut_at_s, load.cut_short)
        await load.run(items, concurrency=concurrency, duration_s=duration_s)
        return load

    return run_virtually(scenario()), server


def items_of(lasts_s: list[float], at_s: list[float] | None = None) -> list[Item]:
    return [Item(at_s[i] if at_s else None, {"lasts_s": each}) for i, each in enumerate(lasts_s)]


durations = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=30)


@given(durations, st.integers(1, 8))
def test_a_closed_loop_never_exceeds_its_concurrency(lasts_s: list[float], concurrency: int) -> None:
    """At most so many run at a time, the next is sent just when one ends, and all are sent in order."""
    load, server = run(items_of(lasts_s), concurrency=concurrency)
    assert server.most_running <= concurrency
    free_at_s = [0.0] * concurrency
    for record, each in zip(load.records, lasts_s, strict=True):
        assert record.sent_at_s == heapq.heappop(free_at_s)
        assert record.ended_at_s == record.sent_at_s + each
        heapq.heappush(free_at_s, record.ended_at_s)
    assert load.wall_s == max(free_at_s)


@given(durations, st.data())
def test_an_open_loop_sends_at_its_times(lasts_s: list[float], data: st.DataObject) -> None:
    """Each item is sent at its time exactly, however long the others take, and all ends are waited for."""
    gaps = data.draw(st.lists(st.integers(0, 20), min_size=len(lasts_s), max_size=len(lasts_s)))
    at_s = [float(sum(gaps[: i + 1])) for i in range(len(gaps))]
    load, _ = run(items_of(lasts_s, at_s))
    assert [record.sent_at_s for record in load.records] == at_s
    assert [record.due_at_s for record in load.records] == at_s
    assert load.wall_s == max(at + lasts for at, lasts in zip(at_s, lasts_s, strict=True))


def test_a_record_has_what_came_and_when() -> None:
    """Times, tokens, forwards, seed, prompt length, usage and the reason of the end are kept."""
    load, _ = run([Item(2.0, {"lasts_s": 3.0})])
    (record,) = load.records
    assert (record.sent_at_s, record.started_at_s, record.ended_at_s) == (2.0, 2.0, 5.0)
    assert record.commits == [Commit(5.0, num_tokens=2, forwards=4)]
    assert (record.prompt_tokens, record.seed, record.output_tokens) == (3, 5, 2)
    assert record.finish_reason == "length"
    assert record.usage is not None and record.usage.forwards == 4
    assert record.is_ok


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"fails": "a\n b"}, "a b"),
        ({"fails": ""}, "FdfoError"),
        ({"reason": "abort"}, "the request was aborted at the server"),
        ({"ends": True}, "the stream ended before Finished"),
    ],
)
def test_a_failed_request_is_counted_and_the_rest_goes_on(option: dict[str, Any], error: str) -> None:
    """Whatever a request fails of stands in its record as one line; the others are sent and finish."""
    load, _ = run([Item(None, {"lasts_s": 1.0, **option}), *items_of([1.0])], concurrency=1)
    assert [record.error for record in load.records] == [error, None]
    assert [record.is_ok for record in load.records] == [False, True]
    assert load.num_failed == 1


def test_a_stream_that_cannot_begin_is_a_failed_request() -> None:
    """A callable that refuses the options fails that request alone."""

    def refuse(options: dict[str, Any]) -> AsyncIterator[Event]:
        raise FdfoError("no")

    async def scenario() -> Load:
        load = Load(refuse)
        await load.run(items_of([1.0, 1.0]), concurrency=1)
        return load

    assert [record.error for record in run_virtually(scenario()).records] == ["no", "no"]


def test_a_duration_ends_the_sending() -> None:
    """After it nothing is sent, even of endless items; what is under way ends."""
    load, _ = run(items_of([2.0] * 100), concurrency=2, duration_s=5.0)
    assert [record.sent_at_s for record in load.records] == [0, 0, 2, 2, 4, 4]
    assert load.wall_s == 6.0
    load, _ = run(items_of([9.0] * 100, [float(i) for i in range(100)]), duration_s=3.0)
    assert [record.sent_at_s for record in load.records] == [0, 1, 2]
    assert all(record.is_ok for record in load.records)


def test_items_are_taken_when_they_are_sent() -> None:
    """An endless source is not read ahead."""
    taken = 0

    def endless() -> Iterator[Item]:
        nonlocal taken
        while True:
            taken += 1
            yield Item(None, {"lasts_s": 1.0})

    async def scenario() -> Load:
        load = Load(Server().stream)
        await load.run(endless(), concurrency=3, duration_s=2.0)
        return load

    assert len(run_virtually(scenario()).records) == taken == 6


@pytest.mark.parametrize("concurrency", [2, None])
def test_cut_short(concurrency: int | None) -> None:
    """What finished stays, what is under way is left and neither ok nor failed, and nothing more is sent."""
    load, server = run(items_of([1.0, 9.0, 9.0, 9.0], [0.0, 0.0, 1.0, 5.0]), concurrency=concurrency, cut_at_s=3.0)
    assert load.was_cut_short
    assert [record.ended_at_s for record in load.records] == [1.0, None, None]
    assert [record.is_ok for record in load.records] == [True, False, False]
    assert all(record.error is None for record in load.records)
    assert (load.num_in_flight, load.num_failed, load.wall_s) == (2, 0, 3.0)
    assert (server.num_left, server.num_running) == (2, 0)


def test_cutting_a_load_that_does_not_run_does_nothing() -> None:
    """Before and after a run it is no cut."""

    async def scenario() -> bool:
        load = Load(Server().stream)
        load.cut_short()
        await load.run(items_of([1.0]), concurrency=1)
        load.cut_short()
        return load.was_cut_short

    assert run_virtually(scenario()) is False


def test_a_cancelled_run_is_cancelled() -> None:
    """Cancelling the task around a run is no cut: the cancellation goes on outwards, and the streams are left."""
    server = Server()

    async def scenario() -> None:
        async with asyncio.timeout(1.0):
            await Load(server.stream).run(items_of([9.0, 9.0]), concurrency=2)

    with pytest.raises(TimeoutError):
        run_virtually(scenario())
    assert server.num_left == 2


def test_progress_is_told_of_every_change() -> None:
    """The callback sees each request sent, each commit and each end."""
    seen: list[tuple[int, int, int]] = []

    async def scenario() -> None:
        def note(load: Load) -> None:
            seen.append((len(load.records), load.num_tokens, load.num_ended))

        await Load(Server().stream, note).run(items_of([1.0, 1.0]), concurrency=1)

    run_virtually(scenario())
    assert seen == [(1, 0, 0), (1, 2, 0), (1, 2, 1), (2, 2, 1), (2, 4, 1), (2, 4, 2)]

"""More load than a scheduler takes, in memory: clients that share or do not read, deadlines, full queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.errors import DeadlineOver, QueueFull, ServiceError
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.stream import Stream
from tests.scheduler.in_memory import Bench, expected, play
from tests.worker.scripted import BLOCK, assert_whole, effort, make_loop

BUFFER_BYTES = 400  # about five blocks


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def passes(count: int = 200) -> None:
    """Time for several rounds."""
    for _ in range(count):
        await asyncio.sleep(0)


def rows_at_the_worker(bench: Bench) -> set[str]:
    return {key.request_id for session in bench.links[0].loop.sessions.values() for key in session.rows}


async def read_to_the_error(bench: Bench, stream: Stream) -> tuple[list[api.GenerateResponse], ServiceError]:
    """All events before the error that ends the stream."""
    events = []
    try:
        async for event in stream.read():
            events.append(event)
    except ServiceError as error:
        return events, error
    finally:
        bench.scheduler.leave(stream)
    raise AssertionError("the stream ended without an error")


# Clients share ------------------------------------------------------------------------------------------------------


def test_a_client_with_one_request_does_not_wait_for_another_with_many() -> None:
    """It starts with the next row that becomes free; those of the other client start in their order."""
    bench = Bench(make_loop(num_slots=2))

    async def scene() -> None:
        many = [await bench.submit(f"m{number}", effort(4), 31, client="many") for number in range(30)]
        await until(lambda: bench.scheduler.counters.blocks_done)
        one = await bench.submit("one", effort(4), 31, client="one")
        assert (await bench.read(one))[0] == expected(1, 31)
        assert sum(stream.is_finished for stream in many) <= 6
        for stream in many:
            assert (await bench.read(stream))[0] == expected(1, 31)
        attempts = [stream.samples[0].attempt for stream in many]
        assert attempts == sorted(attempts)

    play(bench, scene)
    assert_whole(bench.links[0].loop)


def test_a_client_never_has_more_rows_than_its_limit() -> None:
    """Its other requests wait though rows are free, all samples counted, and all of them end."""
    bench = Bench(make_loop(num_slots=8), max_running_requests_per_client=2)

    async def scene() -> None:
        streams = [await bench.submit(f"r{number}", effort(3), 31, client="a", n=2) for number in range(5)]
        for stream in streams:
            for ids, _ in await bench.read_all(stream):
                assert ids == expected(1, 31)

    play(bench, scene)
    for request in bench.links[0].requests:
        assert len(request.starts) + len(request.continues.request_ids) <= 2


def test_a_client_with_its_part_of_the_queue_full_is_refused_alone() -> None:
    """The refusal is counted; the other client gets in."""
    bench = Bench(make_loop(num_slots=1), max_queued_requests_per_client=2)

    async def scene() -> None:
        streams = [await bench.submit("a0", effort(9), 31, client="a")]
        await until(lambda: not len(bench.scheduler.queue))
        streams += [await bench.submit(f"a{number}", effort(9), 31, client="a") for number in (1, 2)]
        with pytest.raises(QueueFull, match="this client's part"):
            await bench.submit("a3", effort(9), 31, client="a")
        streams.append(await bench.submit("b", effort(9), 31, client="b"))
        assert bench.scheduler.info().counters.requests_rejected == 1
        for stream in streams:
            await bench.read(stream)

    play(bench, scene)


def test_without_a_worker_requests_wait_within_the_bound_of_the_queue() -> None:
    """One more is refused at once, and a place is free again when a client gives up or a worker comes."""
    bench = Bench(make_loop(), max_queued_requests=3)
    bench.links[0].is_dead = True

    async def scene() -> None:
        waiting = [asyncio.create_task(bench.submit(f"r{number}", effort(2), 31)) for number in range(3)]
        await passes(5)
        with pytest.raises(QueueFull):
            await bench.submit("r3", effort(2), 31)
        waiting.pop().cancel()
        await passes(5)
        waiting.append(asyncio.create_task(bench.submit("r4", effort(2), 31)))
        await passes(5)
        assert not any(task.done() for task in waiting[:2] + waiting[2:])
        bench.links[0].is_dead = False
        for task in waiting:
            assert (await bench.read(await task))[0] == expected(1, 31)

    play(bench, scene)


# Clients that do not read ---------------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_is_parked_alone() -> None:
    """Its row keeps slot and pages and no round names it, while another goes on; then it goes on to the same tokens."""
    loop = make_loop()
    bench = Bench(loop, max_stream_buffer_bytes=BUFFER_BYTES)

    async def scene() -> None:
        slow = await bench.submit("slow", effort(3), 900)
        await until(lambda: slow.is_parked)
        await passes()
        held, committed = loop.pool.usage().held, len(slow.samples[0].committed_ids)
        fast = await bench.submit("fast", effort(3), 300)
        assert (await bench.read(fast))[0] == expected(1, 300)
        sent = bench.links[0].requests
        assert not any("slow" in request.continues.request_ids for request in sent[-5:])
        await passes()
        assert "slow" in rows_at_the_worker(bench) and loop.pool.usage().held == held
        assert len(slow.samples[0].committed_ids) == committed
        num_sent = len(sent)
        await passes()
        assert len(sent) == num_sent  # a parked row alone makes no rounds
        assert (await bench.read(slow))[0] == expected(1, 900)
        assert bench.scheduler.counters.times_parked == 1

    play(bench, scene)
    assert_whole(loop)


def test_what_is_not_read_stays_bounded() -> None:
    """By the limit and what the rounds on their way bring, for a reader that takes an event now and then."""
    bench = Bench(make_loop(), max_stream_buffer_bytes=BUFFER_BYTES)
    most, events = 0, 0

    async def scene() -> None:
        nonlocal most, events
        stream = await bench.submit("slow", effort(2), 900)
        async for _ in stream.read():
            events += 1
            for _ in range(300):
                await asyncio.sleep(0)
                most = max(most, stream.buffered_bytes)
        bench.scheduler.leave(stream)
        assert bench.scheduler.counters.times_parked > 5

    play(bench, scene)
    assert BUFFER_BYTES < most < 2 * BUFFER_BYTES and events == 31


@pytest.mark.parametrize("end", ["abort", "leave", "deadline", "close"])
def test_a_parked_request_ends_like_any_other(end: str) -> None:
    """Its row is freed though nothing was read; a client that reads on gets all that was there, and one end."""
    loop = make_loop()
    bench = Bench(loop, max_stream_buffer_bytes=BUFFER_BYTES)

    async def scene() -> None:
        stream = await bench.submit("slow", effort(3), 900)
        await until(lambda: stream.is_parked)
        await passes()
        if end == "abort":
            assert bench.scheduler.abort("slow")
        elif end == "leave":
            bench.scheduler.leave(stream)
        elif end == "deadline":
            bench.scheduler.end_within(stream, 0.0)
        else:
            await bench.scheduler.close(0)
        await until(lambda: not rows_at_the_worker(bench))
        if end == "abort":
            ids, finished = await bench.read(stream)
            assert finished.reason == api.FINISH_REASON_ABORT and ids == expected(1, len(ids)) and len(ids) > BLOCK
        elif end != "leave":
            await read_to_the_error(bench, stream)
        assert end == "leave" or stream.events.empty()

    play(bench, scene)
    assert not bench.scheduler.live and not len(bench.scheduler.queue)
    assert_whole(loop)


def test_a_parked_request_that_lost_its_worker_waits_for_its_reader() -> None:
    """It does not start again before, and those behind it in the queue do."""
    bench = Bench(make_loop(), max_stream_buffer_bytes=BUFFER_BYTES)

    async def scene() -> None:
        link = bench.links[0]
        slow = await bench.submit("slow", effort(3), 400)
        await until(lambda: slow.is_parked)
        await passes()
        link.is_dead = True
        # An idle worker is asked for news seldom; work for it makes the loss known.
        other = await bench.submit("other", effort(3), 31)
        await until(lambda: not bench.scheduler.has_worker)
        link.loop, link.is_dead = make_loop(), False
        assert (await bench.read(other))[0] == expected(1, 31)
        assert rows_at_the_worker(bench) == set() and len(bench.scheduler.queue) == 1
        assert (await bench.read(slow))[0] == expected(1, 400)

    play(bench, scene)


# Deadlines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "running", "samples held"])
def test_a_deadline_ends_a_request_with_its_usage_and_all_work_for_it(phase: str) -> None:
    """Interrupted for each sample, then DEADLINE_EXCEEDED; the row is freed at the next boundary, others go on."""
    loop = make_loop(num_slots=1, chunk=BLOCK)
    bench = Bench(loop)

    async def scene() -> None:
        if phase == "queued":
            other = await bench.submit("other", effort(9), 100)
            await until(lambda: not len(bench.scheduler.queue))
        prompt = [5] * (3 * BLOCK) + effort(5) if phase == "samples held" else effort(5)
        late = await bench.submit("late", prompt, 300, n=3 if phase == "samples held" else 1)
        if phase == "running":
            await until(lambda: late.samples[0].committed_ids)
        elif phase == "samples held":
            await until(lambda: rows_at_the_worker(bench))
        bench.scheduler.end_within(late, 0.0)
        await until(lambda: late.is_finished)
        boundary = loop.totals.forwards
        await until(lambda: "late" not in rows_at_the_worker(bench))
        assert loop.totals.forwards - boundary <= 2 and not len(bench.scheduler.queue)
        events, error = await read_to_the_error(bench, late)
        assert isinstance(error, DeadlineOver)
        told = [event.interrupted for event in events if event.HasField("interrupted")]
        assert [sample.sample_index for sample in told] == list(range(len(late.samples)))
        usage = told[0].usage
        assert usage.prompt_tokens == len(prompt)
        assert (usage.completion_tokens > 0, usage.forwards > 0) == (phase == "running",) * 2
        if phase == "queued":
            assert (await bench.read(other))[0] == expected(1, 100)
        assert bench.scheduler.counters.requests_expired == 1

    play(bench, scene)
    assert not bench.scheduler.live
    assert_whole(loop)


def test_without_a_worker_a_request_waits_until_its_deadline() -> None:
    """It keeps what it had, and ends with its usage when the time comes."""
    bench = Bench(make_loop())

    async def scene() -> None:
        late = await bench.submit("late", effort(5), 300)
        await until(lambda: late.samples[0].committed_ids)
        bench.links[0].is_dead = True
        await until(lambda: not bench.scheduler.has_worker)
        await passes()
        assert not late.is_finished and len(bench.scheduler.queue) == 1
        bench.scheduler.end_within(late, 0.0)
        events, error = await read_to_the_error(bench, late)
        assert isinstance(error, DeadlineOver) and not len(bench.scheduler.queue)
        assert events[-1].interrupted.usage.completion_tokens > 0

    play(bench, scene)


def test_a_request_whose_deadline_has_passed_never_starts() -> None:
    """Though a row is free."""
    bench = Bench(make_loop())

    async def scene() -> None:
        await passes()
        late = await bench.submit("late", effort(2), 31)
        bench.scheduler.end_within(late, 0.0)
        _, error = await read_to_the_error(bench, late)
        assert isinstance(error, DeadlineOver)
        await passes()

    play(bench, scene)
    assert not any(request.starts for request in bench.links[0].requests)


def test_a_request_ends_a_little_before_its_deadline_so_that_its_client_hears_of_it() -> None:
    """50 ms before, or in the middle of a shorter time; without a deadline never; no timer outlives its request."""
    bench = Bench(make_loop())

    async def scene() -> None:
        clock = asyncio.get_running_loop().time
        for seconds, delay in ((60.0, 59.95), (0.08, 0.04)):
            stream = await bench.submit("r", effort(2), 31)
            now = clock()
            bench.scheduler.end_within(stream, seconds)
            assert stream.timer is not None and stream.timer.when() - now == pytest.approx(delay, abs=0.005)
            bench.scheduler.leave(stream)
            assert stream.timer.cancelled()
        stream = await bench.submit("r", effort(2), 31)
        bench.scheduler.end_within(stream, None)
        assert (await bench.read(stream))[0] == expected(1, 31)
        assert bench.scheduler.counters.requests_expired == 0

    play(bench, scene)

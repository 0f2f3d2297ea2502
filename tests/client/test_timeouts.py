"""The parts of a timeout, under a clock that a test moves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fdfo_client import (
    AsyncClient,
    Client,
    Committed,
    DeadlineExceeded,
    Finished,
    InvalidRequest,
    RequestFailed,
    RetryPolicy,
    Started,
    Timeout,
)
from fdfo_client.testing import (
    HOLD,
    FakeScheduler,
    committed,
    finished,
    lose_connection,
    serving,
    stall,
    started,
)


class Clock:
    """Time for all waits of a client: it passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now_s + seconds, waiting))
        if seconds:
            await waiting

    async def advance(self, seconds: float) -> None:
        """Wake who sleeps until then, and let everybody run."""
        await self.settle()
        self.now_s += seconds
        for until_s, waiting in self.sleepers:
            if until_s <= self.now_s and not waiting.done():
                waiting.set_result(None)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def client_of(*targets: str, **fields: Any) -> AsyncIterator[tuple[AsyncClient, Clock]]:
    """A client that tries these in this order."""
    clock = Clock()
    async with AsyncClient(targets, retry=RetryPolicy(draw=lambda: 0.0, sleep=clock.sleep, **fields)) as client:
        client._turn = 0
        yield client, clock


async def held(fake: FakeScheduler) -> str:
    return await asyncio.to_thread(fake.held.get, timeout=10)


async def ends_by(task: asyncio.Task[Any] | asyncio.Future[Any], part: str, told: str) -> None:
    """The task raises the error of this part."""
    with pytest.raises(DeadlineExceeded, match=told) as caught:
        await asyncio.wait_for(task, 10)
    assert caught.value.part == part and caught.value.usage == ()


def test_no_token_for_too_long() -> None:
    """first_token counts from the call; when it runs out the scheduler sees the request cancelled."""

    async def run(target: str) -> None:
        async with client_of(target) as (client, clock):
            task = asyncio.create_task(client.generate("x", request_id="mine", timeout=Timeout(first_token=5)))
            await held(fake)
            await clock.advance(4.9)
            assert not task.done()
            await clock.advance(0.2)
            await ends_by(task, "first_token", r"timeout\.first_token: no token came within 5 s; ")
            assert await asyncio.to_thread(fake.cancelled.get, timeout=10) == "mine"

    fake = FakeScheduler(faults=[stall()])
    with serving(fake) as target:
        asyncio.run(run(target))


def test_no_block_for_too_long() -> None:
    """between_blocks counts anew from each block, and first_token no longer."""

    async def run(target: str) -> None:
        async with client_of(target) as (client, clock):
            events = client.stream("x", request_id="mine", timeout=Timeout(first_token=1, between_blocks=5))
            assert isinstance(await anext(events), Started)
            assert await anext(events) == Committed("a", (1,), 0)
            following = asyncio.ensure_future(anext(events))
            await held(fake)
            await clock.advance(4)
            await client.abort("mine")  # which lets the script go on
            assert await following == Committed("b", (2,), 0)
            following = asyncio.ensure_future(anext(events))
            await held(fake)
            await clock.advance(4)
            assert not following.done()
            await clock.advance(1)
            await ends_by(following, "between_blocks", "nothing new came within 5 s")
            assert await asyncio.to_thread(fake.cancelled.get, timeout=10) == "mine"

    fake = FakeScheduler(lambda request: [started(), committed("a", [1]), HOLD, committed("b", [2]), HOLD, finished()])
    with serving(fake) as target:
        asyncio.run(run(target))


def test_the_time_goes_on_at_another_scheduler() -> None:
    """A wait before the next attempt and another scheduler's silence count too."""

    async def run(target: str) -> None:
        async with client_of(target, first_delay_s=4.0, max_delay_s=4.0) as (client, clock):
            task = asyncio.create_task(client.generate("x", timeout=Timeout(between_blocks=5)))
            while len(clock.sleepers) < 2:  # the part, and the wait
                await asyncio.sleep(0)
            await clock.advance(2.1)
            await held(fake)
            assert len(fake.requests) == 2
            await clock.advance(3)
            await ends_by(task, "between_blocks", "within 5 s")

    fake = FakeScheduler(faults=[lose_connection(after_blocks=1), stall()])
    with serving(fake) as target:
        asyncio.run(run(target))


def test_a_wait_for_the_next_attempt_ends_too() -> None:
    """The part runs out in the wait itself."""

    async def run(target: str) -> None:
        async with client_of(target, first_delay_s=60.0, max_delay_s=60.0) as (client, clock):
            task = asyncio.create_task(client.generate("x", timeout=Timeout(first_token=5)))
            while len(clock.sleepers) < 2:
                await asyncio.sleep(0)
            await clock.advance(5)
            await ends_by(task, "first_token", "within 5 s")

    fake = FakeScheduler(faults=[lose_connection()])
    with serving(fake) as target:
        asyncio.run(run(target))
    assert len(fake.requests) == 1


def test_a_caller_that_takes_its_time() -> None:
    """What the caller does with a block is no silence of the scheduler."""

    async def run(target: str) -> None:
        async with client_of(target) as (client, clock):
            texts = []
            async for event in client.stream("x", timeout=Timeout(first_token=5, between_blocks=5)):
                if isinstance(event, Committed):
                    texts.append(event.text)
                    await clock.advance(100)
            assert texts == ["a", "b", "c"] and isinstance(event, Finished)

    with serving(FakeScheduler(["a", "b", "c"])) as target:
        asyncio.run(run(target))


@pytest.mark.parametrize("is_waiting", [True, False])
def test_closing_the_client_waits_for_no_part(is_waiting: bool) -> None:
    """A stream that is open when its client is closed, in a wait or not, keeps neither from ending."""
    fake = FakeScheduler(faults=[stall(1)])
    with serving(fake) as target, ThreadPoolExecutor(1) as pool:
        client = Client(target)
        events = client.stream("x", timeout=Timeout(first_token=600, between_blocks=600))
        assert isinstance(next(events), Started)
        if is_waiting:
            assert isinstance(next(events), Committed)
            waiting = pool.submit(next, events)
            fake.held.get(timeout=10)
        closing = threading.Thread(target=client.close)
        closing.start()
        closing.join(timeout=10)
        assert not closing.is_alive()
        if is_waiting:
            with pytest.raises(RequestFailed, match="closed"):
                waiting.result(timeout=10)
        events.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """A target that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_no_connection(silent: str) -> None:
    """When connect runs out the next scheduler is tried; when there is none, that is the error."""

    async def run(target: str) -> None:
        for targets in ([silent, target], [silent]):
            async with client_of(*targets) as (client, clock):
                task = asyncio.create_task(client.generate("x", timeout=Timeout(connect=0.5)))
                while not clock.sleepers:
                    await asyncio.sleep(0)
                await clock.advance(0.5)
                if target in targets:
                    assert (await task).text == "Hello world"
                else:
                    await ends_by(task, "connect", r"timeout\.connect: no scheduler answered the call within 0\.5 s")

    with serving(FakeScheduler()) as target:
        asyncio.run(run(target))


def test_parts_that_are_left_out_are_not_counted() -> None:
    """A number is the total, which the server keeps; nothing else waits."""

    async def run(target: str) -> None:
        async with client_of(target) as (client, clock):
            await client.generate("x", timeout=60.0)
            await client.generate("x", timeout=Timeout(total=60.0))
            assert clock.sleepers == []
            with pytest.raises(DeadlineExceeded, match="the timeout passed") as caught:
                await client.generate("x", timeout=Timeout(total=0.1))
            assert caught.value.part == "total"

    fake = FakeScheduler()
    with serving(fake) as target:
        fake.faults = [lambda steps: steps, lambda steps: steps, stall()]
        asyncio.run(run(target))


@pytest.mark.parametrize("part", ["connect", "first_token", "between_blocks", "total"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e300, "soon"])
def test_a_wrong_part_is_refused_by_name(part: str, value: Any) -> None:
    """What is no number of seconds raises InvalidRequest with the part."""
    with pytest.raises(InvalidRequest, match=rf"timeout\.{part}: must be a number of seconds above 0") as caught:
        Timeout(**{part: value})
    assert caught.value.field == f"timeout.{part}"

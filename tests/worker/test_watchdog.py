"""Health that follows the device thread, and what the executor tells of itself."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from fdfo_client.bench.virtual_time import run_virtually
from tests.worker.scripted import Clock, Driver, ScriptedRunner, effort, make_loop, start
from worker_svc.executor import Executor
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput
from worker_svc.watchdog import watch_device

TIMEOUT_S = 10.0


class _Watched:
    """A watchdog over a made-up device thread, and what it said."""

    def __init__(self) -> None:
        self.executor: Any = SimpleNamespace(is_idle=False, num_turns=0)
        self.said: list[bool] = []

    async def __aenter__(self) -> _Watched:
        self._task = asyncio.create_task(watch_device(self.executor, TIMEOUT_S, self.said.append))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


def test_a_thread_that_makes_no_turn_for_the_timeout_is_stalled() -> None:
    """Nothing is said of a forward that is shorter, stalled is said once when the time is over, and once its end."""

    async def scene() -> None:
        async with _Watched() as watched:
            await asyncio.sleep(TIMEOUT_S - 0.5)
            watched.executor.num_turns += 1
            await asyncio.sleep(TIMEOUT_S - 0.5)
            assert watched.said == [], "two long forwards, and a turn between them"
            await asyncio.sleep(2 * TIMEOUT_S)
            assert watched.said == [True]
            watched.executor.num_turns += 1
            await asyncio.sleep(1.1)
            assert watched.said == [True, False]

    with structlog.testing.capture_logs() as logs:
        run_virtually(scene())
    assert [entry["event"] for entry in logs] == ["device_stalled", "device_goes_on"]


def test_a_thread_without_work_is_never_stalled() -> None:
    """Without work at hand no turn is expected."""

    async def scene() -> None:
        async with _Watched() as watched:
            watched.executor.is_idle = True
            await asyncio.sleep(5 * TIMEOUT_S)
            watched.executor.is_idle = False
            await asyncio.sleep(TIMEOUT_S - 1.5)
            assert watched.said == []

    run_virtually(scene())


def test_the_executor_tells_idle_from_busy_and_counts_turns_and_host_time() -> None:
    """Idle while it waits for a call, not during a forward; the host's time is that of a turn less the device's."""
    clock = Clock()
    in_forward, may_end = threading.Event(), threading.Event()

    class Slow(ScriptedRunner):
        def forward(self, inputs: ForwardInput, kv: KVStore) -> Any:
            in_forward.set()
            assert may_end.wait(20)
            clock.now += 3.0  # of which the runner says that the device took a millisecond
            return super().forward(inputs, kv)

    async def until_idle(executor: Executor) -> None:
        while not executor.is_idle:
            await asyncio.sleep(0.001)

    async def scene() -> None:
        loop = make_loop(runner=Slow(), clock=clock)
        executor = Executor(loop)
        try:
            async with asyncio.timeout(20):
                await until_idle(executor)
                reply = asyncio.create_task(executor.run_round(Driver(loop).request(starts=[start("a", effort(2))])))
                await asyncio.to_thread(in_forward.wait, 20)
                assert not executor.is_idle
                turns = executor.num_turns
                may_end.set()
                await reply
                await until_idle(executor)
                assert executor.num_turns >= turns + 2
                assert executor.host_s == pytest.approx(2 * (3.0 - 0.001))
        finally:
            may_end.set()
            executor.stop()

    asyncio.run(scene())

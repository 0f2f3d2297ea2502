"""The device thread beside an asyncio event loop: neither waits for the other, and a failure is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch

from common.errors import InvalidField, Refused
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import Driver, ScriptedRunner, assert_whole, done_blocks, effort, make_loop, names, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

PATIENCE_S = 20.0  # for what happens at once unless it never does


class GatedRunner(ScriptedRunner):
    """Every forward says that it began and waits until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.error: Exception | None = None

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        self.began.release()
        assert self.may_end.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().forward(inputs, kv)

    async def in_forward(self) -> None:
        """Returns once the next forward has begun; it does not end before `let`."""
        assert await asyncio.to_thread(self.began.acquire, timeout=PATIENCE_S)

    def let(self, forwards: int = 1000) -> None:
        self.may_end.release(forwards)


def run(scene: Callable[[Executor, DenoiseLoop, GatedRunner], Awaitable[None]]) -> None:
    """Play `scene` on a fresh executor; afterwards its thread ends."""

    async def play() -> None:
        runner = GatedRunner()
        loop = make_loop(runner=runner)
        executor = Executor(loop)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(executor, loop, runner)
        finally:
            runner.let()
            executor.stop()

    asyncio.run(play())


def test_the_event_loop_runs_on_while_a_forward_runs() -> None:
    """During a forward state is read and calls are taken; the calls are answered at the boundary, in order."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        round_ = asyncio.create_task(executor.run_round(Driver(loop).request(starts=[start("a", effort(2))])))
        await runner.in_forward()
        seen: list[str] = []
        executor.post(lambda _: seen.append(f"post on {threading.current_thread().name}"))

        def count(this: DenoiseLoop) -> int:
            seen.append("call")
            return this.totals.forwards

        call = asyncio.create_task(executor.call(count))
        for _ in range(10):
            await asyncio.sleep(0)  # the event loop turns; the forward stands
        assert executor.state.slots_used == 1, "the state is that of the last boundary, where the row started"
        assert not seen and not call.done() and not round_.done()
        runner.let(1)
        assert await call == 1
        assert seen == ["post on device", "call"]
        await runner.in_forward()
        assert executor.state.slots_used == 1 and not round_.done()
        runner.let()
        assert len(done_blocks(await round_)) == 1

    run(scene)


def test_two_schedulers_at_once_share_a_forward_and_get_their_own_replies() -> None:
    """Both calls wait in the event loop together; a row of each is in one forward."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        first = Driver(loop, "one").request(starts=[start("a", effort(4))])
        second = Driver(loop, "two").request(starts=[start("a", effort(2)), start("b", effort(2))])
        calls = [asyncio.create_task(executor.run_round(first))]
        await runner.in_forward()
        calls.append(asyncio.create_task(executor.run_round(second)))
        await asyncio.sleep(0)  # the call is in the inbox
        runner.let()
        one, two = await asyncio.gather(*calls)
        assert [len(done_blocks(reply)) for reply in (one, two)] == [1, 2]
        assert [one.work.forwards, two.work.forwards] == [4, 2]
        assert [len(inputs.logits_units) for inputs in runner.inputs] == [1, 3, 3, 1]

    run(scene)


def test_cancelling_a_running_round_ends_it_at_the_boundary() -> None:
    """The call is gone at once, the row stands as the forward left it, and the repeated id gets the kept reply."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        request = Driver(loop).request(starts=[start("a", effort(8))])
        round_ = asyncio.create_task(executor.run_round(request))
        await runner.in_forward()
        round_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await round_
        runner.let()
        while not await executor.call(lambda loop: loop.totals.rounds):
            pass  # the next boundary ends it
        reply = await executor.run_round(request)
        assert reply.work.forwards == 1 and list(reply.rows.step_counts) == [1]
        assert len(runner.inputs) == 1, "nothing runs for a caller that is gone"

    run(scene)


def test_cancelling_a_waiting_round_removes_it() -> None:
    """Nothing of it ever runs; its id can come again with other rows."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        driver = Driver(loop)
        running = asyncio.create_task(executor.run_round(driver.request(starts=[start("a", effort(2))])))
        await runner.in_forward()
        waiting = asyncio.create_task(executor.run_round(driver.request(starts=[start("b", effort(2))])))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        runner.let()
        await running
        driver.next_id -= 1
        reply = await executor.run_round(driver.request(continues=names("a", "b")))
        assert list(reply.rows.statuses) == [pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_SLOT_MISSING]

    run(scene)


def test_refusals_and_errors_of_a_call_come_back_as_they_are() -> None:
    """A ServiceError reaches its caller and nobody else; the thread goes on."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        def refuse(_: DenoiseLoop) -> None:
            raise InvalidField("field", "wrong")

        runner.let()
        with pytest.raises(InvalidField):
            await executor.call(refuse)
        with pytest.raises(Refused) as refused:
            await executor.run_round(Driver(loop).request(worker_epoch="another"))
        assert refused.value.reason == "EPOCH_CHANGED"
        reply = await executor.run_round(Driver(loop).request(starts=[start("a", effort(2))]))
        assert len(done_blocks(reply)) == 1 and not executor.failed.is_set()

    run(scene)


@pytest.mark.parametrize("place", ["forward", "call"])
def test_an_exception_on_the_device_thread_sets_failed(place: str) -> None:
    """A bug or device error in a forward or in a call ends the thread and says so; no reply is made up."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        def broken(_: DenoiseLoop) -> None:
            raise RuntimeError("a bug")

        round_ = asyncio.create_task(executor.run_round(Driver(loop).request(starts=[start("a", effort(2))])))
        await runner.in_forward()
        assert not executor.failed.is_set()
        if place == "forward":
            runner.error = RuntimeError("device error")
        else:
            executor.post(broken)
        runner.let()
        await executor.failed.wait()
        assert not round_.done()
        round_.cancel()

    run(scene)


def test_stop_ends_the_thread_at_a_boundary() -> None:
    """Stop with a round half way: the forward that runs is finished, no other begins, the pool is consistent."""

    async def scene(executor: Executor, loop: DenoiseLoop, runner: GatedRunner) -> None:
        round_ = asyncio.create_task(executor.run_round(Driver(loop).request(starts=[start("a", effort(8))])))
        await runner.in_forward()
        stopping = asyncio.create_task(asyncio.to_thread(executor.stop))
        while not executor._inbox.qsize():
            await asyncio.sleep(0)
        runner.let()
        await stopping
        assert len(runner.inputs) == 1 and not round_.done()
        assert_whole(loop, held=1)
        round_.cancel()

    run(scene)

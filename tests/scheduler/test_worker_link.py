"""WorkerLink against a server that fails on purpose: what is repeated, for how long, and what counts as a death."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from common.errors import Refused, abort_with
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from scheduler_svc.workers import WorkerLink, WorkerLost

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Context], Awaitable[None]]


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Call n of RunRound does what `answers[n]` says, the last one for ever, and then replies."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.round_ids: list[int] = []

    async def RunRound(self, request: pb.RunRoundRequest, context: Context) -> pb.RunRoundResponse:  # noqa: N802
        self.round_ids.append(request.round_id)
        await self.answers[min(len(self.round_ids), len(self.answers)) - 1](context)
        return pb.RunRoundResponse(round_id=request.round_id)

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Context) -> pb.GetWorkerInfoResponse:  # noqa: N802
        await self.answers[0](context)
        return pb.GetWorkerInfoResponse(worker_epoch="e")


async def reply(context: Context) -> None:
    """Nothing is wrong."""


async def hang(context: Context) -> None:
    await asyncio.sleep(60)


def fail(code: grpc.StatusCode) -> Answer:
    async def answer(context: Context) -> None:
        await context.abort(code, "on purpose")

    return answer


def refuse(reason: Any) -> Answer:
    async def answer(context: Context) -> None:
        await abort_with(context, Refused(reason, "on purpose"))

    return answer


def with_link(use: Callable[[WorkerLink, grpc.aio.Server], Awaitable[None]], worker: Worker) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        link = WorkerLink(f"127.0.0.1:{port}", "s")
        try:
            async with asyncio.timeout(20):
                await use(link, server)
        finally:
            await link.close()
            await server.stop(0)

    asyncio.run(run())


ROUND = pb.RunRoundRequest(round_id=7)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_a_failed_round_is_repeated_under_its_id(code: grpc.StatusCode) -> None:
    """Two failures on the way, then the reply."""
    worker = Worker(fail(code), fail(code), reply)

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        assert (await link.run_round(ROUND, 5)).round_id == 7
        assert worker.round_ids == [7, 7, 7]

    with_link(use, worker)


def test_a_round_whose_reply_is_lost_is_repeated_after_its_deadline() -> None:
    """The first call is never answered; the repeat is."""
    worker = Worker(hang, reply)

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        assert (await link.run_round(ROUND, 0.1)).round_id == 7
        assert worker.round_ids == [7, 7]

    with_link(use, worker)


@pytest.mark.parametrize("answer", [fail(grpc.StatusCode.UNAVAILABLE), hang])
def test_repeats_end_in_a_lost_worker_that_is_not_dead(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for repeats the worker is given up; since something listens there, nobody says that it died."""
    monkeypatch.setattr("scheduler_svc.workers.REPEAT_FOR_S", 0.4)
    worker = Worker(answer)

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        with pytest.raises(WorkerLost) as lost:
            await link.run_round(ROUND, 0.1)
        assert not lost.value.is_death
        assert 0.4 <= clock() - started_at < 2
        assert len(worker.round_ids) >= 2

    with_link(use, worker)


@pytest.mark.parametrize("reason", ["EPOCH_CHANGED", "STALE_GENERATION", "ROUND_GAP", "DRAINING", "OTHER_MODEL"])
def test_a_refusal_is_not_repeated(reason: str) -> None:
    """Only another epoch tells that the worker we knew has died."""
    worker = Worker(refuse(reason))

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        with pytest.raises(WorkerLost, match=reason) as lost:
            await link.run_round(ROUND, 5)
        assert lost.value.is_death == (reason == "EPOCH_CHANGED")
        assert worker.round_ids == [7]

    with_link(use, worker)


def test_what_no_repeat_can_change_is_not_repeated() -> None:
    """INVALID_ARGUMENT speaks of the message."""
    worker = Worker(fail(grpc.StatusCode.INVALID_ARGUMENT))

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        with pytest.raises(WorkerLost):
            await link.run_round(ROUND, 5)
        assert worker.round_ids == [7]

    with_link(use, worker)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_where_nothing_listens_the_worker_is_dead_at_once(host: str) -> None:
    """A round in flight when the process ends is not waited for, and neither is a probe."""
    worker = Worker(hang)

    async def use(link: WorkerLink, server: grpc.aio.Server) -> None:
        link = WorkerLink(f"{host}:{link.target.rpartition(':')[2]}", "s")
        call = asyncio.create_task(link.run_round(ROUND, 60))
        while not worker.round_ids:
            await asyncio.sleep(0.01)
        await server.stop(0)
        with pytest.raises(WorkerLost) as lost:
            await call
        assert lost.value.is_death
        with pytest.raises(WorkerLost) as lost:
            await link.probe()
        assert lost.value.is_death
        await link.close()

    with_link(use, worker)


def test_a_probe_of_a_hung_worker_ends_in_time_and_tells_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a listening socket and gives no answer."""
    monkeypatch.setattr("scheduler_svc.workers.PROBE_TIMEOUT_S", 0.1)

    async def run() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            link = WorkerLink(f"127.0.0.1:{listener.getsockname()[1]}", "s")
            with pytest.raises(WorkerLost) as lost:
                await link.probe()
            assert not lost.value.is_death
            await link.close()

    asyncio.run(run())

"""The scheduler's link to a worker over gRPC, with the worker's own server in this process."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from scheduler_svc.worker_rows import row_names
from scheduler_svc.workers import WorkerLink, WorkerLost
from tests.scheduler.in_memory import FOLDER
from tests.worker.scripted import effort, make_loop, start
from tests.worker.test_executor import PATIENCE_S, GatedRunner
from worker_svc.executor import Executor
from worker_svc.metrics import WorkerMetrics
from worker_svc.server import LoadingServicer, WorkerServicer
from worker_svc.settings import WorkerSettings


def test_a_release_acts_on_a_lockstep_round_at_the_next_boundary() -> None:
    """Told beside the round while a forward runs, the row is gone after it and the round goes on without; a release of
    an older generation is a lost worker, not silence."""

    async def scene() -> None:
        runner = GatedRunner()
        loop = make_loop(runner=runner)
        executor = Executor(loop)
        server = grpc.aio.server()
        servicer = WorkerServicer(executor, loop, FOLDER, WorkerSettings(model_path=FOLDER.path), WorkerMetrics())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        link = WorkerLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "s")
        await server.start()
        try:
            request = pb.RunRoundRequest(
                scheduler_id="s",
                generation=1,
                worker_epoch=loop.epoch,
                fingerprint="scripted",
                round_id=1,
                mode=pb.MODE_SYNC,
                starts=[start("a", effort(30)), start("b", effort(3))],
            )
            round_ = asyncio.create_task(link.run_round(request, PATIENCE_S))
            await runner.in_forward()
            release = asyncio.create_task(link.release(1, row_names([(("a", 0), 1)])))
            while not executor._inbox.qsize():
                await asyncio.sleep(0)
            runner.let(1)
            await release
            runner.let()
            reply = await round_
            assert list(reply.rows.statuses) == [pb.ROW_STATUS_RELEASED, pb.ROW_STATUS_RUNNING]
            assert reply.work.forwards == 3
            await link.heartbeat(2)
            with pytest.raises(WorkerLost, match="STALE_GENERATION"):
                await link.release(1, row_names([(("b", 0), 1)]))
        finally:
            runner.let()
            await link.close()
            await server.stop(None)
            executor.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_a_worker_that_loads_is_another_life() -> None:
    """What was there before is gone: a probe and a call say so, as a death, and the link waits with the reason until
    the model is there."""

    async def scene() -> None:
        loop = make_loop()
        executor = Executor(loop)
        loading = LoadingServicer()
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(loading, server)
        link = WorkerLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "s")
        await server.start()
        try:
            for call in (link.probe(), link.heartbeat(1)):
                with pytest.raises(WorkerLost, match="loading its model") as lost:
                    await call
                assert lost.value.is_death and lost.value.refusal == "EPOCH_CHANGED"
            connecting = asyncio.create_task(link.get_info())
            while "loading its model" not in link.last_error:
                await asyncio.sleep(0.001)
            settings = WorkerSettings(model_path=FOLDER.path)
            loading.servicer = WorkerServicer(executor, loop, FOLDER, settings, WorkerMetrics())
            assert (await connecting).worker_epoch == loop.epoch
        finally:
            await link.close()
            await server.stop(None)
            executor.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))

"""A worker and a scheduler on loopback in this process, over real gRPC, with a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.grpc_server import GrpcService
from common.security_settings import SecuritySettings
from common.tracing import Tracing
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo.worker.v1 import worker_pb2_grpc
from scheduler_svc.__main__ import worker_connector
from scheduler_svc.core import Scheduler
from scheduler_svc.server import SERVICE_NAME as SCHEDULER_NAME
from scheduler_svc.server import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.traces import RequestTraces, TraceCalls
from scheduler_svc.validation import MAX_CLIENT_MESSAGE_BYTES
from tests.scheduler.in_memory import FOLDER
from tests.worker.scripted import make_loop
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.metrics import WorkerMetrics
from worker_svc.server import SERVICE_NAME as WORKER_NAME
from worker_svc.server import WorkerServicer
from worker_svc.settings import WorkerSettings
from worker_svc.traces import TracedExecutor

MODEL = Path("models/tiny-llada2")


@dataclass(frozen=True)
class Running:
    """The scheduler's address, and what is behind it."""

    target: str
    worker_target: str
    scheduler: Scheduler
    loop: DenoiseLoop


@contextlib.asynccontextmanager
async def scheduler_and_worker(worker: SecuritySettings | None = None, **settings: object) -> AsyncIterator[Running]:
    """`worker`: the worker's security. `settings`: the scheduler's, security included."""
    async with services(worker, settings) as running:
        yield running


@contextlib.asynccontextmanager
async def services(
    worker: SecuritySettings | None,
    settings: Mapping[str, object],
    *,
    tracing: Tracing | None = None,
    worker_tracing: Tracing | None = None,
) -> AsyncIterator[Running]:
    """The same, with traces."""
    loop = make_loop(clock=time.monotonic)  # type: ignore[arg-type]
    executor = Executor(loop) if worker_tracing is None else TracedExecutor(loop, worker_tracing)
    worker_service = GrpcService("127.0.0.1", 0, [WORKER_NAME], security=worker)
    servicer = WorkerServicer(executor, loop, FOLDER, WorkerSettings(model_path=MODEL), WorkerMetrics())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, worker_service.server)
    worker_target = f"127.0.0.1:{await worker_service.start()}"

    of_scheduler = SchedulerSettings(model_path=MODEL, workers=worker_target, **settings)  # type: ignore[arg-type]
    traces = None if tracing is None else RequestTraces(tracing)
    scheduler = Scheduler(FOLDER, of_scheduler, {}, worker_connector(of_scheduler, traces))
    service = GrpcService(
        "127.0.0.1",
        0,
        [SCHEDULER_NAME],
        security=of_scheduler,
        max_receive_bytes=MAX_CLIENT_MESSAGE_BYTES,
        interceptors=() if traces is None else (TraceCalls(traces),),
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), service.server)
    port = await service.start()
    running = asyncio.create_task(scheduler.run())
    try:
        yield Running(f"127.0.0.1:{port}", worker_target, scheduler, loop)
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await scheduler.close(0)
        await service.stop(0)
        await worker_service.stop(0)
        executor.stop()

"""A worker: serve a model from its loading on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads beside a process cost ten times

import structlog

from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.metrics import listen
from common.model_folder import ModelFolder
from common.tracing import Tracing, tracing_to
from fdfo.worker.v1 import worker_pb2_grpc
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.loading import exit_beside_threads, in_thread
from worker_svc.loop_config import LoopConfig
from worker_svc.metrics import WorkerMetrics
from worker_svc.model_runner import ModelRunner
from worker_svc.ranks import Ranks
from worker_svc.server import SERVICE_NAME, LoadingServicer, WorkerServicer
from worker_svc.settings import WorkerSettings
from worker_svc.start_up import load_loop, start_ranks
from worker_svc.tensor_parallel import LeadingRunner
from worker_svc.traces import TracedExecutor
from worker_svc.watchdog import watch_device

DRAIN_GRACE_S = 10.0
RANK_STOP_S = 5.0  # that the other ranks have to end when told to
DRAIN_LINGER_S = 0.2  # rounds that are on their way are told that the worker drains; a closed port looks like a crash
# The device thread comes back from a forward and wants the interpreter from the gRPC thread; the usual 5 ms is long.
SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger()


async def serve(
    settings: WorkerSettings, folder: ModelFolder, load: Callable[[], DenoiseLoop], tracing: Tracing | None = None
) -> int:
    """Load the model, and serve it until a signal (0) or until the device thread fails (1). A signal while that thread
    is stalled ends it without a drain (1). Health is answered from the start. Raises what `load` raises."""
    metrics = WorkerMetrics()
    service = GrpcService(settings.host, settings.port, [SERVICE_NAME], security=settings, call_metrics=metrics.calls)
    servicer = LoadingServicer()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, service.server)
    target = f"{settings.host}:{await service.start()}"
    ready = {}
    if settings.metrics_port is not None:
        ready["metrics"] = f"{settings.host}:{listen(settings.host, settings.metrics_port, metrics.registry)}"
    log.info("loading", target=target, **ready)
    stop = asyncio.create_task(service.wait_for_stop(settings.exit_with_parent))
    loading = in_thread(load)
    waits: set[asyncio.Future[Any]] = {stop, loading}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if stop.done() or loading.exception() is not None:
        await service.stop(0)
    if stop.done():
        loading.cancel()
        log.info("stopped", hint="before the model was there")
        return 0
    loop = loading.result()
    executor = Executor(loop) if tracing is None else TracedExecutor(loop, tracing)
    metrics.loaded(executor, loop, folder)
    servicer.servicer = WorkerServicer(executor, loop, folder, settings, metrics)
    forget_garbage()
    service.set_serving(True)
    log.info("serving", target=target, worker_epoch=loop.epoch)
    print_ready(target, worker_epoch=loop.epoch, **ready)

    def on_stall(is_stalled: bool) -> None:
        metrics.is_stalled = is_stalled
        service.set_alive(not is_stalled)
        service.set_serving(not is_stalled)

    watch = asyncio.create_task(watch_device(executor, settings.stall_timeout_s, on_stall))
    failure = asyncio.create_task(executor.failed.wait())
    await asyncio.wait({stop, failure}, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    service.set_serving(False)
    if failure.done() or metrics.is_stalled:
        await service.stop(0)
        return 1
    log.info("draining")
    await executor.call(DenoiseLoop.drain)
    await asyncio.sleep(DRAIN_LINGER_S)
    await service.stop(DRAIN_GRACE_S)
    executor.stop()
    log.info("stopped")
    return 0


def run(settings: WorkerSettings, folder: ModelFolder, config: LoopConfig) -> int:
    """Load and serve, see `load_loop` and `serve`; then end the other ranks."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ranks = start_ranks(settings, folder)
    loops: list[DenoiseLoop] = []

    def load() -> DenoiseLoop:
        loops.append(load_loop(settings, folder, config, ranks))
        return loops[0]

    status = 1
    try:
        with tracing_to(settings.otlp_traces_endpoint, "fdfo-worker", sample_ratio=0.0) as tracing:
            status = asyncio.run(serve(settings, folder, load, tracing))
    finally:
        if ranks is not None:
            _end_ranks(ranks, loops[0].runner if loops and status == 0 else None)
    exit_beside_threads(status)
    return status


def _end_ranks(ranks: Ranks, runner: ModelRunner | None) -> None:
    """Where the loop ended well they are told to end; else they may wait for what will not come."""
    ranks.expect_end()
    if isinstance(runner, LeadingRunner):
        runner.stop()
    ranks.stop(0 if runner is None else RANK_STOP_S)

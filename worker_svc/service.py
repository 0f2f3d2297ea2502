"""A worker: load a model, warm it up, serve it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads beside a process cost ten times

import structlog
import torch

from common.fingerprint import short_fingerprint
from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.metrics import listen
from common.model_folder import ModelFolder
from common.tracing import Tracing, tracing_to
from fdfo.worker.v1 import worker_pb2_grpc
from worker_svc import simulated
from worker_svc.attention import ATTENTION_BACKENDS, AttentionUnavailable
from worker_svc.cuda_graphs import CaptureError, capture_forwards, cuda_capture
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.fault_hook import loop_type
from worker_svc.loading import exit_beside_threads, in_thread
from worker_svc.loop_config import LoopConfig, SettingsError
from worker_svc.metrics import WorkerMetrics
from worker_svc.model_runner import ModelRunner, TorchModelRunner
from worker_svc.models.loading import load_model
from worker_svc.server import SERVICE_NAME, LoadingServicer, WorkerServicer
from worker_svc.settings import WorkerSettings
from worker_svc.traces import TracedExecutor
from worker_svc.warm_up import WARM_UP_LIMIT_S, warm_up
from worker_svc.watchdog import watch_device

DRAIN_GRACE_S = 10.0
DRAIN_LINGER_S = 0.2  # rounds that are on their way are told that the worker drains; a closed port looks like a crash
PROGRESS_EVERY_S = 2.0
# The device thread comes back from a forward and wants the interpreter from the gRPC thread; the usual 5 ms is long.
SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger()


def load_runner(folder: ModelFolder, settings: WorkerSettings) -> ModelRunner:
    """The folder's model on its device. Raises SettingsError naming the flag, or CheckpointError."""
    device = torch.device(settings.device)
    if not folder.has_weights:
        if device.type != "cpu" or settings.dtype != "auto":
            raise SettingsError(f"--device, --dtype: {folder.path} is simulated; leave them out")
        time_line = simulated.TimeLine(time.monotonic, time.sleep, simulated.usual_overshoot_s())
        return simulated.SimulatedRunner(folder, time_line)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"--device {settings.device}: this torch ({torch.__version__}) finds no CUDA device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    last_report_at = time.monotonic()

    def on_progress(bytes_read: int, bytes_total: int) -> None:
        nonlocal last_report_at
        if time.monotonic() - last_report_at > PROGRESS_EVERY_S:
            last_report_at = time.monotonic()
            log.info("loading", mib_read=bytes_read >> 20, mib_total=bytes_total >> 20)

    dtype = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    model = load_model(folder, dtype=dtype, device=device, on_progress=on_progress)
    try:
        attention = ATTENTION_BACKENDS[settings.attention_backend].for_model(model, settings.batch_invariant)
    except AttentionUnavailable as error:
        raise SettingsError(f"--attention-backend {error}") from error
    return TorchModelRunner(model, attention, batch_invariant=settings.batch_invariant, logit_shift=folder.logit_shift)


def load_loop(settings: WorkerSettings, folder: ModelFolder, config: LoopConfig) -> DenoiseLoop:
    """The folder's model behind a warm loop. Raises SettingsError naming the flag, or CheckpointError."""
    torch.set_num_threads(1 if settings.batch_invariant else settings.num_threads)
    started_at = time.monotonic()
    loop = loop_type(os.environ)(load_runner(folder, settings), config, time.monotonic)
    if loop.runner.device.type == "cuda":
        try:
            capture_forwards(loop.runner, loop.kv, config.block_size, settings, cuda_capture(loop.runner.device))
        except CaptureError as error:
            raise SettingsError(str(error)) from error
    loaded_at = time.monotonic()
    log.info("warming_up", limit_s=WARM_UP_LIMIT_S)
    warm_up(loop)
    log.info(
        "model_ready",
        model=str(folder.path),
        fingerprint=short_fingerprint(folder.fingerprint),
        dtype=str(loop.runner.dtype),
        device=str(loop.runner.device),
        kv_tokens=config.num_pages * config.page_size,
        num_threads=torch.get_num_threads(),
        load_s=round(loaded_at - started_at, 2),
        warm_up_s=round(time.monotonic() - loaded_at, 2),
    )
    return loop


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
    """Load and serve; see `load_loop` and `serve`."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tracing_to(settings.otlp_traces_endpoint, "fdfo-worker", sample_ratio=0.0) as tracing:
        status = asyncio.run(serve(settings, folder, partial(load_loop, settings, folder, config), tracing))
    exit_beside_threads(status)
    return status

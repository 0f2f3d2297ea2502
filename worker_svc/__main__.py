"""`python -m worker_svc`: load a model, warm it up, serve it."""

from __future__ import annotations

import asyncio
import os
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads beside a process cost ten times

import structlog
import torch

from common.architectures import CheckpointError
from common.errors import ServiceError
from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.logging import configure_logging
from common.model_folder import ModelFolder, ModelFolderError, read_model_folder
from common.settings import parse_settings
from fdfo.worker.v1 import worker_pb2_grpc
from worker_svc import simulated
from worker_svc.attention import ATTENTION_BACKENDS, AttentionUnavailable
from worker_svc.cuda_graphs import CaptureError, capture_forwards, cuda_capture
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.fault_hook import loop_type
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner, TorchModelRunner
from worker_svc.models.loading import load_model
from worker_svc.server import SERVICE_NAME, WorkerServicer
from worker_svc.settings import WorkerSettings, default_kv_tokens
from worker_svc.warm_up import warm_up

DRAIN_GRACE_S = 10.0
DRAIN_LINGER_S = 0.2  # rounds that are on their way are told that the worker drains; a closed port looks like a crash
PROGRESS_EVERY_S = 2.0
# The device thread comes back from a forward and wants the interpreter from the gRPC thread; the usual 5 ms is long.
SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger()


class SettingsError(Exception):
    """One line: two settings that do not go together."""


def loop_config(folder: ModelFolder, settings: WorkerSettings) -> LoopConfig:
    """The loop's sizes from the settings; raises SettingsError naming the flag."""
    block_size = folder.block_size
    page_size = settings.page_size or block_size
    if page_size % block_size:
        raise SettingsError(f"--page-size {page_size} must be a multiple of the block size {block_size}")
    if settings.chunked_prefill_size < block_size or settings.chunked_prefill_size % block_size:
        raise SettingsError(
            f"--chunked-prefill-size {settings.chunked_prefill_size} must be a multiple of the block size {block_size}"
        )
    total_tokens = settings.max_total_tokens or default_kv_tokens(
        folder.context_length, page_size, settings.max_running_requests
    )
    if total_tokens < page_size:
        raise SettingsError(f"--max-total-tokens {total_tokens} is less than a page of {page_size}")
    return LoopConfig(
        fingerprint=folder.fingerprint,
        block_size=block_size,
        mask_token_id=folder.mask_token_id,
        context_length=folder.context_length,
        page_size=page_size,
        num_slots=settings.max_running_requests,
        num_pages=total_tokens // page_size,
        chunked_prefill_size=settings.chunked_prefill_size,
        fused_commit=settings.fused_commit and not folder.logit_shift,
        logit_shift=folder.logit_shift,
        lease_s=settings.lease_s,
        early_end=settings.early_end,
        enable_prefix_caching=settings.enable_prefix_caching,
    )


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


def load_loop(settings: WorkerSettings) -> tuple[ModelFolder, DenoiseLoop]:
    """The model behind a warm loop."""
    torch.set_num_threads(1 if settings.batch_invariant else settings.num_threads)
    folder = read_model_folder(
        settings.model_path,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        context_length=settings.context_length,
    )
    for warning in folder.warnings:
        log.warning("model_folder", path=str(folder.path), hint=warning)
    config = loop_config(folder, settings)
    started_at = time.monotonic()
    runner = load_runner(folder, settings)
    loop = loop_type(os.environ)(runner, config, time.monotonic)
    if runner.device.type == "cuda":
        capture_forwards(runner, loop.kv, config.block_size, settings, cuda_capture(runner.device))
    warm_up(loop)
    log.info(
        "model_ready",
        model=str(folder.path),
        fingerprint=folder.fingerprint[:12],
        dtype=str(runner.dtype),
        device=str(runner.device),
        kv_tokens=config.num_pages * config.page_size,
        num_threads=torch.get_num_threads(),
        load_s=round(time.monotonic() - started_at, 2),
    )
    return folder, loop


async def serve(settings: WorkerSettings, folder: ModelFolder, loop: DenoiseLoop) -> int:
    """Serve until a signal (0) or until the device thread fails (1)."""
    service = GrpcService(settings.host, settings.port, [SERVICE_NAME], security=settings)
    executor = Executor(loop)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerServicer(executor, loop, folder, settings), service.server
    )
    port = await service.start()
    forget_garbage()
    service.set_serving(True)
    log.info("serving", port=port, worker_epoch=loop.epoch)
    print_ready(f"{settings.host}:{port}", worker_epoch=loop.epoch)
    stop = asyncio.create_task(service.wait_for_stop(settings.exit_with_parent))
    failure = asyncio.create_task(executor.failed.wait())
    await asyncio.wait({stop, failure}, return_when=asyncio.FIRST_COMPLETED)
    service.set_serving(False)
    if failure.done():
        await service.stop(0)
        return 1
    log.info("draining")
    await executor.call(DenoiseLoop.drain)
    await asyncio.sleep(DRAIN_LINGER_S)
    await service.stop(DRAIN_GRACE_S)
    executor.stop()
    log.info("stopped")
    return 0


def main(argv: list[str] | None = None) -> int:
    settings = parse_settings(
        WorkerSettings,
        argv,
        prog="python -m worker_svc",
        description="Load a model and run rounds over it for schedulers.",
        examples=["python -m worker_svc --model-path models/tiny-llada2 --port 50052"],
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(service="worker")
    try:
        folder, loop = load_loop(settings)
        return asyncio.run(serve(settings, folder, loop))
    except (ModelFolderError, CheckpointError, SettingsError, CaptureError, ServiceError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m worker_svc`: load a model, warm it up, serve it."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads beside a process cost ten times

import structlog

from common.architectures import CheckpointError
from common.errors import ServiceError
from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.logging import configure_logging
from common.model_folder import ModelFolder, ModelFolderError
from common.settings import parse_settings
from fdfo.worker.v1 import worker_pb2_grpc
from worker_svc.cuda_graphs import CaptureError
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.memory import OutOfRoom
from worker_svc.server import SERVICE_NAME, WorkerServicer
from worker_svc.settings import WorkerSettings
from worker_svc.start_up import SettingsError, load_loop
from worker_svc.tensor_parallel import LeadingRunner

DRAIN_GRACE_S = 10.0
DRAIN_LINGER_S = 0.2  # rounds that are on their way are told that the worker drains; a closed port looks like a crash
RANK_STOP_S = 5.0  # that the other ranks have to end when told to
# The device thread comes back from a forward and wants the interpreter from the gRPC thread; the usual 5 ms is long.
SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger()


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
        folder, loop, ranks = load_loop(settings)
    except (ModelFolderError, CheckpointError, SettingsError, OutOfRoom, CaptureError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    status = 1
    try:
        status = asyncio.run(serve(settings, folder, loop))
    except ServiceError as error:
        print(f"worker: {error}", file=sys.stderr)
    finally:
        if ranks is not None:
            ranks.expect_end()
            if status == 0 and isinstance(loop.runner, LeadingRunner):
                loop.runner.stop()
            ranks.stop(RANK_STOP_S if status == 0 else 0)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""`python -m scheduler_svc`: queue requests and drive the workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
import yaml

from common.api_keys import read_api_key
from common.connection import Tls
from common.errors import ServiceError
from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.logging import configure_logging
from common.model_folder import ModelFolder, ModelFolderError, read_model_folder
from common.settings import EXIT_WRONG_CONFIGURATION, parse_settings
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from scheduler_svc.core import BadDefaults, Scheduler
from scheduler_svc.server import SERVICE_NAME, SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.validation import MAX_CLIENT_MESSAGE_BYTES
from scheduler_svc.workers import Link, WorkerLink

WITHOUT_WORKER_GRACE_S = 10.0
LAST_MESSAGES_S = 5.0

log = structlog.get_logger()


class ConfigError(Exception):
    """One line: what in which file is wrong."""


def read_algorithm_params(path: Path | None) -> dict[str, float]:
    """Default parameters of the default algorithm, from a YAML file of numbers."""
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--dllm-algorithm-config {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--dllm-algorithm-config {path}: must map parameter names to numbers")
    for name, value in content.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--dllm-algorithm-config {path}: {name}: must be a number, is {value!r}")
    return {name: float(value) for name, value in content.items()}


def worker_connector(settings: SchedulerSettings) -> Callable[[str, str], Link]:
    """What makes the link to a worker, with TLS and key as the --worker flags say. Raises ServiceError or ConfigError
    for files that cannot be used."""
    tls = None
    given = (settings.worker_tls_cert_file, settings.worker_tls_key_file, settings.worker_tls_server_name)
    if settings.worker_tls_ca_file is not None:
        try:
            tls = Tls(settings.worker_tls_ca_file, *given)
        except ValueError as error:
            raise ConfigError(f"--worker-tls-cert-file, --worker-tls-key-file: {error}") from None
        tls.credentials()
    elif any(given):
        raise ConfigError("--worker-tls-ca-file is missing; it turns on TLS to the workers")
    if settings.worker_api_key_file is not None:
        read_api_key(settings.worker_api_key_file)
    return partial(WorkerLink, tls=tls, api_key_file=settings.worker_api_key_file)


async def serve(settings: SchedulerSettings, folder: ModelFolder, algorithm_params: dict[str, float]) -> int:
    """Serve until a signal (0), until a round loop fails (1), or until a worker does not serve our defaults (2)."""
    scheduler = Scheduler(folder, settings, algorithm_params, worker_connector(settings))
    service = GrpcService(
        settings.host,
        settings.port,
        [SERVICE_NAME],
        security=settings,
        max_receive_bytes=MAX_CLIENT_MESSAGE_BYTES,
        max_connection_age_s=settings.max_connection_age_s,
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), service.server)
    port = await service.start()
    forget_garbage()
    service.set_serving(True)
    log.info("serving", port=port, scheduler_id=scheduler.scheduler_id, workers=settings.workers)
    print_ready(f"{settings.host}:{port}", scheduler_id=scheduler.scheduler_id)
    stop = asyncio.create_task(service.wait_for_stop(settings.exit_with_parent))
    loops = asyncio.create_task(scheduler.run())
    health = asyncio.create_task(_watch_workers(scheduler, service))
    await asyncio.wait({stop, loops}, return_when=asyncio.FIRST_COMPLETED)
    health.cancel()
    service.set_serving(False)
    log.info("stopping", live_requests=len(scheduler.live))
    status = 0 if stop.done() else 1
    if not stop.done():
        failure = loops.exception()
        if isinstance(failure, ExceptionGroup) and isinstance(failure.exceptions[0], BadDefaults):
            status = EXIT_WRONG_CONFIGURATION
            log.error("bad_defaults", reason=str(failure.exceptions[0]))
        else:
            log.error("round_loop_failed", exc_info=failure)
    await scheduler.close(settings.stop_grace_s if stop.done() else 0)
    await service.stop(LAST_MESSAGES_S)
    loops.cancel()
    await asyncio.gather(loops, return_exceptions=True)
    return status


async def _watch_workers(scheduler: Scheduler, service: GrpcService) -> None:
    """NOT_SERVING while no worker has been there for the grace time."""
    seconds_without = 0.0
    while True:
        seconds_without = 0.0 if scheduler.has_worker else seconds_without + 1
        service.set_serving(seconds_without < WITHOUT_WORKER_GRACE_S)
        await asyncio.sleep(1)


def main(argv: list[str] | None = None) -> int:
    settings = parse_settings(
        SchedulerSettings,
        argv,
        prog="python -m scheduler_svc",
        description="Queue requests and drive workers, block by block.",
        examples=["python -m scheduler_svc --model-path models/tiny-llada2 --workers 127.0.0.1:50052 --port 50051"],
    )
    configure_logging(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(service="scheduler")
    try:
        folder = read_model_folder(
            settings.model_path,
            block_size=settings.block_size,
            mask_token_id=settings.mask_token_id,
            context_length=settings.context_length,
        )
        for warning in folder.warnings:
            log.warning("model_folder", path=str(folder.path), hint=warning)
        algorithm_params = read_algorithm_params(settings.dllm_algorithm_config)
        return asyncio.run(serve(settings, folder, algorithm_params))
    except (ModelFolderError, ConfigError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    except ServiceError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

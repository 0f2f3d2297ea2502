"""`python -m scheduler_svc`: queue requests and drive the workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from common.api_keys import read_api_key
from common.configuration import parse_settings
from common.connection import Tls
from common.errors import ServiceError
from common.grpc_server import GrpcService, forget_garbage, print_ready
from common.logging import configure_logging
from common.metrics import listen
from common.model_folder import ModelFolder, ModelFolderError, read_model_folder
from common.settings import EXIT_WRONG_CONFIGURATION
from common.tracing import Tracing, tracing_to
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from scheduler_svc.config_files import ConfigError, ServedModel, read_algorithm_params, served_models
from scheduler_svc.core import BadDefaults, Scheduler
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.server import SERVICE_NAME, SchedulerServicer
from scheduler_svc.settings import ENV_PREFIX, SchedulerSettings
from scheduler_svc.traces import RequestTraces, TraceCalls, TracedLink
from scheduler_svc.validation import MAX_CLIENT_MESSAGE_BYTES
from scheduler_svc.workers import Link, WorkerLink

WITHOUT_WORKER_GRACE_S = 10.0
WORKER_POLL_S = 0.1
LAST_MESSAGES_S = 5.0
ENGINE_NAME = "vllm.grpc.engine.VllmEngine"  # what gateways call

log = structlog.get_logger()


def worker_connector(settings: SchedulerSettings, traces: RequestTraces | None = None) -> Callable[[str, str], Link]:
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
    make_link = WorkerLink if traces is None else partial(TracedLink, traces=traces)
    return partial(make_link, tls=tls, api_key_file=settings.worker_api_key_file)


async def serve(
    settings: SchedulerSettings,
    folder: ModelFolder,
    algorithm_params: dict[str, float],
    models: Sequence[ServedModel],
    tracing: Tracing | None = None,
) -> int:
    """Serve until a signal (0), until a round loop fails (1), or until a worker does not serve our defaults (2).
    `models`: for gateways, our own name first; empty without --vllm-grpc."""
    metrics = SchedulerMetrics()
    traces = None if tracing is None else RequestTraces(tracing)
    connect = worker_connector(settings, traces)
    scheduler = Scheduler(folder, settings, algorithm_params, connect, served_models=models, metrics=metrics)
    metrics.read_from(scheduler)
    engine = [ENGINE_NAME] if models else []
    service = _service(settings, settings.port, [SERVICE_NAME, *engine], metrics, traces)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), service.server)
    services = [service, *(_service(settings, model.port, engine, metrics, traces) for model in models[1:])]
    if models:
        from scheduler_svc.gateway import add_to_server  # its packages are an extra

        for of_model, model in zip(services, models, strict=True):
            add_to_server(of_model.server, scheduler, model, lambda: service.is_serving)
    # Ours comes last: it is the one that takes the signals.
    targets = [f"{settings.host}:{await one.start()}" for one in reversed(services)][::-1]
    ready: dict[str, Any] = {}
    if models:
        ready["models"] = {model.name: target for model, target in zip(models, targets, strict=True)}
    if settings.metrics_port is not None:
        ready["metrics"] = f"{settings.host}:{listen(settings.host, settings.metrics_port, metrics.registry)}"
    forget_garbage()
    log.info("serving", target=targets[0], scheduler_id=scheduler.scheduler_id, workers=settings.workers, **ready)
    print_ready(targets[0], scheduler_id=scheduler.scheduler_id, **ready)
    stop = asyncio.create_task(service.wait_for_stop(settings.exit_with_parent))
    loops = asyncio.create_task(scheduler.run())
    health = asyncio.create_task(_watch_workers(scheduler, services))
    await asyncio.wait({stop, loops}, return_when=asyncio.FIRST_COMPLETED)
    health.cancel()
    _set_serving(services, False)
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
    await asyncio.gather(*(one.stop(LAST_MESSAGES_S) for one in services))
    loops.cancel()
    await asyncio.gather(loops, return_exceptions=True)
    return status


def _service(
    settings: SchedulerSettings,
    port: int,
    names: Sequence[str],
    metrics: SchedulerMetrics,
    traces: RequestTraces | None,
) -> GrpcService:
    return GrpcService(
        settings.host,
        port,
        names,
        security=settings,
        max_receive_bytes=MAX_CLIENT_MESSAGE_BYTES,
        max_connection_age_s=settings.max_connection_age_s,
        call_metrics=metrics.calls,
        interceptors=() if traces is None else (TraceCalls(traces),),
    )


def _set_serving(services: Sequence[GrpcService], serving: bool) -> None:
    for service in services:
        service.set_serving(serving)


async def _watch_workers(scheduler: Scheduler, services: Sequence[GrpcService]) -> None:
    """SERVING from the first worker on, and NOT_SERVING while none has been there for the grace time: one that never
    had a worker must not take the place of one that has."""
    now, last_there_at, is_serving = asyncio.get_running_loop().time, float("-inf"), False
    while True:
        if scheduler.has_worker:
            last_there_at = now()
        if (now() - last_there_at < WITHOUT_WORKER_GRACE_S) != is_serving:
            is_serving = not is_serving
            _set_serving(services, is_serving)
        await asyncio.sleep(WORKER_POLL_S)


def main(argv: list[str] | None = None) -> int:
    settings = parse_settings(
        SchedulerSettings,
        argv,
        env_prefix=ENV_PREFIX,
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
        with tracing_to(settings.otlp_traces_endpoint, "fdfo-scheduler", settings.trace_sample_ratio) as tracing:
            return asyncio.run(serve(settings, folder, algorithm_params, served_models(settings), tracing))
    except (ModelFolderError, ConfigError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    except ServiceError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

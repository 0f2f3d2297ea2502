"""What `fdfo serve` passes on to its services, and how all of these are reached then."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from common.configuration import BadSetting, read_environment
from common.settings import settings_from
from fdfo_client._access import Access
from fdfo_client._channel import Tls, check_access
from fdfo_client._errors import InvalidRequest
from scheduler_svc import settings as of_scheduler
from scheduler_svc.settings import SchedulerSettings
from worker_svc import settings as of_worker
from worker_svc.settings import WorkerSettings

# Fields of the services' settings that `serve` fills itself.
OWN_FIELDS = ("model_path", "port", "workers", "exit_with_parent")

S = TypeVar("S", SchedulerSettings, WorkerSettings)


def passed_on(
    arguments: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[WorkerSettings, SchedulerSettings, dict[str, str]]:
    """The settings of each service, from flags and else from its variables, and the environment without these: a
    command line leaves defaults out, which a variable must not replace then. Raises InvalidRequest."""
    prefixes = (of_worker.ENV_PREFIX, of_scheduler.ENV_PREFIX)
    worker = _settings(WorkerSettings, prefixes[0], arguments, environment)
    scheduler = _settings(SchedulerSettings, prefixes[1], arguments, environment)
    rest = {name: value for name, value in environment.items() if not name.startswith(prefixes)}
    return worker, scheduler, rest


def _settings(cls: type[S], prefix: str, arguments: argparse.Namespace, environment: Mapping[str, str]) -> S:
    try:
        found = read_environment(cls, prefix, environment)
    except BadSetting as error:
        raise InvalidRequest(str(error)) from None
    for name in OWN_FIELDS:
        if name in found:
            raise InvalidRequest(f"{found[name].source}: `fdfo serve` sets this itself, by flags of its own; unset it")
    settings = settings_from(cls, arguments, {name: value for name, (value, _) in found.items()})
    return dataclasses.replace(settings, exit_with_parent=True)


def check_files(scheduler: SchedulerSettings) -> None:
    """Raises InvalidRequest for a file of algorithms or models with which the scheduler would end, when a model has
    loaded."""
    from scheduler_svc.config_files import (
        ConfigError,
        read_algorithm_params,
        served_models,
    )  # needs the extra scheduler

    try:
        read_algorithm_params(scheduler.dllm_algorithm_config)
        if scheduler.served_models is not None:
            served_models(scheduler)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None


def access_to(scheduler: SchedulerSettings) -> Access:
    """How all services here are reached: schedulers as workers, since certificate and keys go to both.

    Raises InvalidRequest for flags with which the scheduler would not reach its workers.
    """
    if scheduler.tls_cert_file and not scheduler.worker_tls_ca_file:
        raise InvalidRequest("--tls-cert-file goes to the workers too; add --worker-tls-ca-file for the way to them")
    if scheduler.api_keys_file and not scheduler.worker_api_key_file:
        raise InvalidRequest("--api-keys-file goes to the workers too; add --worker-api-key-file with one of the keys")
    tls = None
    try:
        if scheduler.worker_tls_ca_file:
            cert_file, key_file = scheduler.worker_tls_cert_file, scheduler.worker_tls_key_file
            tls = Tls(scheduler.worker_tls_ca_file, cert_file, key_file, scheduler.worker_tls_server_name)
        check_access(tls, scheduler.worker_api_key_file)
    except ValueError as error:
        raise InvalidRequest(f"--worker-tls-..., --worker-api-key-file: {error}") from None
    return Access(tls=tls, api_key=scheduler.worker_api_key_file)

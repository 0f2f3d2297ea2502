"""Schedulers and workers over the network: who answers, as what, in which state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from common.fingerprint import check_fingerprint, short_fingerprint
from fdfo.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from fdfo.worker.v1 import worker_pb2, worker_pb2_grpc
from fdfo_client._access import Access
from fdfo_client._channel import CHANNEL_OPTIONS, Connection
from fdfo_client._errors import error_from_rpc
from fdfo_client._types import ServerInfo, server_info_from_proto
from fdfo_client.commands.words import duration
from fdfo_client.doctor.finding import Finding, fail, ok, warn

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
CLOCK_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class Look:
    """What was heard at a target: the information of a scheduler or of a worker, or None and the problem: what
    happened, and what to do.

    `seconds`: until it answered. `health` is of its service, None when it could not be asked. `clock_ahead_s`: the
    scheduler's clock before ours.
    """

    target: str
    info: ServerInfo | worker_pb2.GetWorkerInfoResponse | None
    seconds: float = 0.0
    health: str | None = None
    clock_ahead_s: float = 0.0
    problem: tuple[str, str] = ("", "")

    @property
    def kind(self) -> str | None:
        """ "a scheduler", "a worker", or None."""
        if self.info is None:
            return None
        return "a scheduler" if isinstance(self.info, ServerInfo) else "a worker"


async def look(target: str, access: Access, timeout_s: float) -> Look:
    """Ask as a scheduler, and as a worker where it is none."""
    connection = Connection(target, _Stubs, CHANNEL_OPTIONS, tls=access.tls, api_key=access.api_key)
    try:
        return await _ask(connection, timeout_s)
    except grpc.aio.AioRpcError as error:
        return Look(target, None, problem=_problem(error, connection, timeout_s))
    finally:
        await connection.close()


def look_at_all(targets: Sequence[str], access: Access, timeout_s: float) -> list[Look]:
    """All at once, in order."""

    async def run() -> list[Look]:
        return list(await asyncio.gather(*(look(target, access, timeout_s) for target in targets)))

    return asyncio.run(run())


def check_scheduler(look: Look, fingerprint: str | None, version: str | None) -> Iterator[Finding]:
    """`fingerprint`: of the model folder here; `version`: ours; None where there is none to compare with."""
    what = f"scheduler {look.target}"
    if not isinstance(look.info, ServerInfo):
        yield _no_answer(what, look, "a scheduler")
        return
    info = look.info
    yield ok(
        what,
        f"answers in {look.seconds * 1000:.0f} ms, version {info.version}, up {duration(info.uptime_s)}, "
        f"{info.running} running, {info.queued} queued",
    )
    yield from _check_common(what, look, info.version, version)
    yield _check_model(what, info.fingerprint, info.served_model_name, fingerprint)
    if abs(look.clock_ahead_s) > CLOCK_TOLERANCE_S:
        yield warn(
            "clock",
            f"that of {look.target} is {look.clock_ahead_s:+.1f} s from ours",
            "set both by NTP: certificates and logs depend on it",
        )
    elif info.unix_time_s:
        yield ok("clock", f"that of {look.target} is {look.clock_ahead_s:+.1f} s from ours")
    for worker in info.workers:
        if worker.ready:
            found = f"ready, {worker.rows} of {worker.max_rows} rows, {worker.device} {worker.dtype}"
            yield ok(f"{what}, worker {worker.target}", found)
        else:
            found = worker.last_error or "not connected yet"
            yield fail(f"{what}, worker {worker.target}", found, "see the worker's log, and --workers of the scheduler")
    if not info.workers:
        yield fail(what, "knows no worker", "give it --workers")


def check_worker(look: Look, fingerprint: str | None, version: str | None) -> Iterator[Finding]:
    """See `check_scheduler`; `fingerprint` may be the schedulers'."""
    what = f"worker {look.target}"
    if not isinstance(look.info, worker_pb2.GetWorkerInfoResponse):
        yield _no_answer(what, look, "a worker")
        return
    info = look.info
    pages = info.pages
    yield ok(
        what,
        f"answers in {look.seconds * 1000:.0f} ms, version {info.version}, {info.device} {info.dtype}, "
        f"{info.slots_used} of {info.max_running_requests} rows, {pages.free + pages.cached} of {pages.total} pages "
        "available",
    )
    yield from _check_common(what, look, info.version, version)
    yield _check_model(what, info.fingerprint, info.model_architecture, fingerprint)
    if info.draining:
        yield warn(what, "drains: it ends soon and takes no request", "start another one")


class _Stubs:
    """The calls of both services on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.GetServerInfo = scheduler_pb2_grpc.SchedulerServiceStub(channel).GetServerInfo
        self.GetWorkerInfo = worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerInfo


async def _ask(connection: Connection, timeout_s: float) -> Look:
    started_at = time.monotonic()
    try:
        answer = await connection.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        worker = await connection.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=timeout_s)
        seconds = time.monotonic() - started_at
        return Look(connection.target, worker, seconds, await _health(connection, WORKER, timeout_s))
    info, seconds = server_info_from_proto(answer), time.monotonic() - started_at
    ahead_s = info.unix_time_s - (time.time() - seconds / 2)
    return Look(connection.target, info, seconds, await _health(connection, SCHEDULER, timeout_s), ahead_s)


async def _health(connection: Connection, service: str, timeout_s: float) -> str | None:
    """SERVING, NOT_SERVING and so on; None without the package for it or where it is not answered."""
    try:
        from grpc_health.v1 import health_pb2, health_pb2_grpc
    except ImportError:
        return None
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _problem(error: grpc.aio.AioRpcError, connection: Connection, timeout_s: float) -> tuple[str, str]:
    """What happened, and what to do."""
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            found, semicolon, advice = connection.explain(details).removesuffix(f" ({details})").partition("; ")
            if found != details.partition("; ")[0]:
                return found, advice if semicolon else "see docs/security.md"
            return f"no answer: {details.rpartition('last error: ')[2]}", "start it, or give its address"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout_s:g} s", "see its log: it hangs, or a firewall drops what it is sent"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "what answers is no service of ours", "give the address of a scheduler or a worker"
        case _:
            found, _, advice = str(error_from_rpc(error, connection.target)).rpartition("; ")
            return found or advice, advice if found else "see its log"


def _no_answer(what: str, look: Look, wanted: str) -> Finding:
    if look.kind is not None:
        return fail(what, f"{look.kind} answers there", f"give the address of {wanted}")
    return fail(what, *look.problem)


def _check_common(what: str, look: Look, its_version: str, our_version: str | None) -> Iterator[Finding]:
    if look.health == "NOT_SERVING":
        yield fail(what, "its health is NOT_SERVING", "see its log; a scheduler without a worker says so, too")
    if our_version is not None and its_version != our_version:
        yield warn(what, f"version {its_version}, here it is {our_version}", "install one version everywhere")


def _check_model(what: str, its_fingerprint: str, name: str, fingerprint: str | None) -> Finding:
    if fingerprint is not None and not _is_same_model(its_fingerprint, fingerprint):
        return warn(
            what,
            f"serves {name}, fingerprint {short_fingerprint(its_fingerprint)}, not {short_fingerprint(fingerprint)}",
            "start all services with one --model-path, and give it here",
        )
    return ok(what, f"serves {name}, fingerprint {short_fingerprint(its_fingerprint)}")


def _is_same_model(one: str, other: str) -> bool:
    """Weights that one of them does not know are no difference."""
    try:
        check_fingerprint(*sorted((one, other), key=lambda fingerprint: fingerprint.endswith("-")))
    except ValueError:
        return False
    return True

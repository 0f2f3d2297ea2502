"""A worker as the scheduler sees it: its channel, its facts, and calls that repeat until they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import structlog

from common.connection import Connection, Tls
from common.errors import RefusalReason, ServiceError, refusal_reason
from common.grpc_server import MAX_MESSAGE_BYTES
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from scheduler_svc.settings import split_target

REPEAT_FOR_S = 3.0
REPEAT_EVERY_S = 0.1
INFO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
RECONNECT_EVERY_S = 0.25

# What may be the fault of the way to the worker; with any other status a repeat would end like the call.
REPEATED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A link to an address that was left and came back does not wait out the back-off of the former one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

T = TypeVar("T")
log = structlog.get_logger()


class WorkerLost(Exception):
    """What this worker held of ours is void: our requests start anew, here or elsewhere.

    `is_death`: its process has certainly ended, since another epoch answers or nothing listens at its address. A worker
    that hangs cannot be told from one that cannot be reached, so neither is a death. `refusal`: why it refuses us, if
    it does.
    """

    def __init__(self, reason: str, is_death: bool = False, refusal: RefusalReason | None = None) -> None:
        super().__init__(reason)
        self.is_death = is_death
        self.refusal = refusal


class Link(Protocol):
    """What a round loop asks of a worker; tests put a loop in memory behind it."""

    target: str
    scheduler_id: str
    last_error: str

    async def get_info(self) -> pb.GetWorkerInfoResponse: ...
    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse: ...
    async def release(self, generation: int, rows: pb.RowNames) -> None: ...
    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse: ...
    async def probe(self) -> pb.GetWorkerInfoResponse: ...
    async def close(self) -> None: ...


class WorkerLink:
    """One worker address; see Connection for `tls` and `api_key_file`."""

    def __init__(
        self, target: str, scheduler_id: str, *, tls: Tls | None = None, api_key_file: Path | None = None
    ) -> None:
        self.target = target
        self.scheduler_id = scheduler_id
        self.last_error = "not connected yet"
        make_stub = worker_pb2_grpc.WorkerServiceStub
        self._new = partial(Connection, target, make_stub, CHANNEL_OPTIONS, tls=tls, api_key=api_key_file)
        self._connection = self._new()

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        """The worker's facts, as soon as it answers. Every try has a connection of its own: the last one may be dead
        without a word, which nothing but silence tells."""
        while True:
            await self._connection.close()
            self._connection = self._new()
            try:
                request = pb.GetWorkerInfoRequest(scheduler_id=self.scheduler_id)
                stub = self._connection.stub
                info: pb.GetWorkerInfoResponse = await stub.GetWorkerInfo(request, timeout=INFO_TIMEOUT_S)
                return info
            except grpc.aio.AioRpcError as error:
                self.last_error = self._connection.explain(error.details() or error.code().name)
            except ServiceError as error:  # a TLS file or the key's
                self.last_error = str(error)
            await asyncio.sleep(RECONNECT_EVERY_S)

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        """The round's reply. After a failure (the deadline too) the same round is repeated for 3 s; raises WorkerLost
        after that, and at once when the worker refuses or is dead."""
        return await self._repeat(lambda limit_s: self._connection.stub.RunRound(request, timeout=limit_s), timeout_s)

    async def release(self, generation: int, rows: pb.RowNames) -> None:
        """Free rows at the next boundary, beside the rounds. Fails as `run_round` does."""
        request = pb.ReleaseRequestsRequest(scheduler_id=self.scheduler_id, generation=generation, rows=rows)
        await self._repeat(
            lambda limit_s: self._connection.stub.ReleaseRequests(request, timeout=limit_s), INFO_TIMEOUT_S
        )

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        """What is free now; renews the lease. Fails as `run_round` does."""
        request = pb.HeartbeatRequest(scheduler_id=self.scheduler_id, generation=generation)
        return await self._repeat(
            lambda limit_s: self._connection.stub.Heartbeat(request, timeout=limit_s), INFO_TIMEOUT_S
        )

    async def probe(self) -> pb.GetWorkerInfoResponse:
        """The worker's facts, asked once, and renewing no lease. Raises WorkerLost when no answer comes in time."""
        try:
            info: pb.GetWorkerInfoResponse = await self._connection.stub.GetWorkerInfo(
                pb.GetWorkerInfoRequest(), timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            self.last_error, reason = f"{error.code().name}: {error.details()}", refusal_reason(error)
            is_death = reason == "EPOCH_CHANGED" or await self._is_gone(error)  # another life loads, or none is there
            raise WorkerLost(self.last_error, is_death, reason) from error
        return info

    async def _repeat(self, call: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        give_up_at: float | None = None
        while True:
            try:
                return await call(timeout_s)
            except grpc.aio.AioRpcError as error:
                reason, now = refusal_reason(error), time.monotonic()
                self.last_error = f"{reason or error.code().name}: {error.details()}"
                if reason is not None:
                    raise WorkerLost(self.last_error, reason == "EPOCH_CHANGED", reason) from error
                if await self._is_gone(error):
                    raise WorkerLost(self.last_error, is_death=True) from error
                give_up_at = now + REPEAT_FOR_S if give_up_at is None else give_up_at
                if error.code() not in REPEATED or now >= give_up_at:
                    raise WorkerLost(self.last_error) from error
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # a second wait of the whole would be too long
                    timeout_s = give_up_at - now
                await asyncio.sleep(REPEAT_EVERY_S)

    async def _is_gone(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether nothing listens at the address any more. gRPC says that in words only, so it is tried."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        events = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                host, port = split_target(self.target)
                for family, kind, protocol, _, address in await events.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    with socket.socket(family, kind, protocol) as probe, contextlib.suppress(ConnectionRefusedError):
                        probe.setblocking(False)
                        await events.sock_connect(probe, address)
                        return False
        except OSError:  # TimeoutError is one
            return False
        return True

    async def close(self) -> None:
        await self._connection.close()

"""A worker as the scheduler sees it: its channel, its facts, and calls that repeat until they are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import structlog

from common.connection import Connection, Tls
from common.errors import ServiceError, refusal_reason
from common.grpc_server import MAX_MESSAGE_BYTES
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc

REPEAT_FOR_S = 3.0
REPEAT_EVERY_S = 0.1
INFO_TIMEOUT_S = 5.0
RECONNECT_EVERY_S = 0.25

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

T = TypeVar("T")
log = structlog.get_logger()


class WorkerLost(Exception):
    """What this worker held of ours is void: our requests start anew, here or elsewhere."""


class Link(Protocol):
    """What a round loop asks of a worker; tests put a loop in memory behind it."""

    target: str
    scheduler_id: str
    last_error: str

    async def get_info(self) -> pb.GetWorkerInfoResponse: ...
    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse: ...
    async def release(self, generation: int, rows: pb.RowNames) -> None: ...
    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse: ...


class WorkerLink:
    """One worker address; see Connection for `tls` and `api_key_file`."""

    def __init__(
        self, target: str, scheduler_id: str, *, tls: Tls | None = None, api_key_file: Path | None = None
    ) -> None:
        self.target = target
        self.scheduler_id = scheduler_id
        self.last_error = "not connected yet"
        make_stub = worker_pb2_grpc.WorkerServiceStub
        self._connection = Connection(target, make_stub, CHANNEL_OPTIONS, tls=tls, api_key=api_key_file)

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        """The worker's facts, as soon as it answers."""
        while True:
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
        """The round's reply. After a lost reply the same round is repeated for 3 s; raises WorkerLost after that,
        at once when the worker refuses, and at once when it hangs (the deadline)."""
        return await self._repeat(lambda: self._connection.stub.RunRound(request, timeout=timeout_s))

    async def release(self, generation: int, rows: pb.RowNames) -> None:
        """Free rows at the next boundary, beside the rounds."""
        request = pb.ReleaseRequestsRequest(scheduler_id=self.scheduler_id, generation=generation, rows=rows)
        await self._repeat(lambda: self._connection.stub.ReleaseRequests(request, timeout=INFO_TIMEOUT_S))

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(scheduler_id=self.scheduler_id, generation=generation)
        return await self._repeat(lambda: self._connection.stub.Heartbeat(request, timeout=INFO_TIMEOUT_S))

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        first_failure_at: float | None = None
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                reason = refusal_reason(error)
                self.last_error = f"{reason or error.code().name}: {error.details()}"
                now = time.monotonic()
                first_failure_at = now if first_failure_at is None else first_failure_at
                lost_connection = error.code() is grpc.StatusCode.UNAVAILABLE and reason is None
                if not lost_connection or now - first_failure_at > REPEAT_FOR_S:
                    raise WorkerLost(self.last_error) from error
                await asyncio.sleep(REPEAT_EVERY_S)

    async def close(self) -> None:
        await self._connection.close()

"""Typed errors of both services and the gRPC status each one becomes.

| error           | status                             | detail                             |
|-----------------|------------------------------------|------------------------------------|
| Internal        | INTERNAL                           | none                               |
| InvalidField    | INVALID_ARGUMENT                   | google.rpc.BadRequest              |
| AlreadyLive     | ALREADY_EXISTS                     | none                               |
| QueueFull       | RESOURCE_EXHAUSTED                 | google.rpc.RetryInfo and ErrorInfo |
| Unavailable     | UNAVAILABLE                        | none                               |
| DeadlineOver    | DEADLINE_EXCEEDED                  | none                               |
| TakenOver       | ABORTED                            | none                               |
| SlowReader      | ABORTED                            | none                               |
| Unauthenticated | UNAUTHENTICATED                    | none                               |
| Refused         | FAILED_PRECONDITION or UNAVAILABLE | google.rpc.ErrorInfo, domain below |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

REFUSAL_DOMAIN = "fdfo.worker"
SCHEDULER_DOMAIN = "fdfo.scheduler"
RefusalReason = Literal["EPOCH_CHANGED", "STALE_GENERATION", "ROUND_GAP", "OTHER_MODEL", "DRAINING"]


# Texts travel in HTTP/2 metadata, whose limit is 16 KiB with the details; a user's value may be echoed in them.
MAX_TEXT_CHARACTERS = 1000


def short(text: str) -> str:
    """Cut to what fits into an error."""
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 1] + "…"


class ServiceError(Exception):
    """Base of all; `str(error)` is the status message. One raised at start ends the process with that line."""

    code = grpc.StatusCode.INTERNAL

    def details(self) -> Sequence[Message]:
        """The google.rpc messages that travel with the status."""
        return ()


class Internal(ServiceError):
    """The service itself failed; nothing in the request is at fault."""


class InvalidField(ServiceError):
    """A field of the request is wrong; `field` is its path as in the proto, e.g. "sampling.top_p"."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        self.field = short(field)
        self.message = short(message)
        super().__init__(f"{self.field}: {self.message}")

    def details(self) -> Sequence[Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
        return (error_details_pb2.BadRequest(field_violations=[violation]),)


class AlreadyLive(ServiceError):
    """A request with this id is live."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is live")
        self.request_id = request_id


class QueueFull(ServiceError):
    """No place in the queue, for anybody or for this client; try again after `retry_after_s` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, retry_after_s: float, *, of_client: bool = False) -> None:
        whose = "this client's part of the queue" if of_client else "the queue"
        super().__init__(f"{whose} is full; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s
        self.reason = "CLIENT_QUEUE_FULL" if of_client else "QUEUE_FULL"

    def details(self) -> Sequence[Message]:
        delay = Duration()
        delay.FromNanoseconds(round(self.retry_after_s * 1e9))
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=SCHEDULER_DOMAIN)
        return error_details_pb2.RetryInfo(retry_delay=delay), info


class Unavailable(ServiceError):
    """The service takes no requests now."""

    code = grpc.StatusCode.UNAVAILABLE


class SlowReader(ServiceError):
    """The client has not read what it was sent."""

    code = grpc.StatusCode.ABORTED


class Unauthenticated(ServiceError):
    """The caller does not say who it is, or is nobody we know."""

    code = grpc.StatusCode.UNAUTHENTICATED


class DeadlineOver(ServiceError):
    """The client's deadline is here."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class TakenOver(ServiceError):
    """Another call goes on with this request."""

    code = grpc.StatusCode.ABORTED


class Refused(ServiceError):
    """A worker takes no round of this scheduler, for one of the reasons that worker.proto lists."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = grpc.StatusCode.UNAVAILABLE if reason == "DRAINING" else grpc.StatusCode.FAILED_PRECONDITION

    def details(self) -> Sequence[Message]:
        return (error_details_pb2.ErrorInfo(reason=self.reason, domain=REFUSAL_DOMAIN),)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End the RPC with the error's status, message and details."""
    status = status_pb2.Status(code=error.code.value[0], message=short(str(error)))
    for detail in error.details():
        status.details.add().Pack(detail)
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)


def refusal_reason(rpc_error: grpc.RpcError) -> RefusalReason | None:
    """Why a worker refused the call; None for every other failure (`Refused` on the worker's side)."""
    try:
        # Both grpc's and grpc.aio's errors have what from_call reads of a call.
        status = rpc_status.from_call(cast(grpc.Call, rpc_error))
    except ValueError:  # code and detail disagree: not from abort_with
        return None
    if status is None:
        return None
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info) and info.domain == REFUSAL_DOMAIN:
            return cast(RefusalReason, info.reason)
    return None

"""What a call may raise, and the one place where a gRPC status becomes such an error.

FdfoError
    InvalidRequest      a field is wrong; nothing was done
    RequestExists       the request id is in use
    Overloaded          the scheduler's queue is full
    ServerUnavailable   no scheduler answers, or it went away
    DeadlineExceeded    the timeout passed; `part` says which part of it
    Unauthenticated     the scheduler asks for an API key that it knows
    UnexpectedServer    something answers, but it does not speak this protocol
    RequestFailed       any other failure; `code` says which
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from fdfo_client._types import Usage

# The fields of Timeout.
TimeoutPart: TypeAlias = Literal["connect", "first_token", "between_blocks", "total"]

# gRPC's words for what an HTTP server answers that is none of gRPC: in HTTP/1, and in HTTP/2. With UNAVAILABLE, for
# 502 to 504, the last ones are of a proxy that has lost its server.
_NOT_GRPC = ("Expected SETTINGS frame", "http1.x server", "END_STREAM flag received")
_HTTP_STATUS = "http2 header with status"

# The metadata key of google.rpc.Status, fixed by gRPC's error model.
_DETAILS_KEY = "grpc-status-details-bin"


class FdfoError(Exception):
    """Base of all errors of this library. `str(error)` is one line: what happened and what to do next."""


class InvalidRequest(FdfoError):
    """A field of the request is wrong. Sending it again unchanged gives the same error.

    `field` is the name of the option, perhaps with a place in it ("stop[2]"), or None when the server named none.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RequestExists(FdfoError):
    """A live request has this id. Use another id, or none: the server then draws one."""


class Overloaded(FdfoError):
    """The queue is full; nothing was done. `retry_after_s` is the server's hint in seconds, or None."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerUnavailable(FdfoError):
    """No scheduler answers at the target, or it ended the call."""


class DeadlineExceeded(FdfoError):
    """A part of the timeout ran out before the answer was complete. The request was aborted.

    `part` is the field of `Timeout` that ran out.
    `usage`: of each sample that had not finished, in order, what it had cost; empty when the scheduler did not tell,
    as it does only of the total.
    """

    usage: tuple[Usage, ...] = ()

    def __init__(self, message: str, part: TimeoutPart = "total") -> None:
        super().__init__(message)
        self.part = part


class Unauthenticated(FdfoError):
    """The scheduler asks for an API key, and was given none or one that it does not know."""


class UnexpectedServer(FdfoError):
    """What answers at the target is not an FDFO scheduler of this version."""


class RequestFailed(FdfoError):
    """The server failed the request for another reason. `code` is the gRPC status name, such as "INTERNAL"."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def error_from_rpc(
    failure: grpc.aio.AioRpcError, target: str, explain: Callable[[str], str] = lambda words: words
) -> FdfoError:
    """The typed error for a failed call to `target`. `explain`: see `Connection.explain`."""
    code = failure.code()
    said = (failure.details() or "").strip() or "no reason given"
    match code:
        case _ if _is_not_grpc(code, said):
            return UnexpectedServer(
                f"what answers at {target} does not speak gRPC ({said}); give the address of a scheduler"
            )
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            return _invalid_request(failure, said)
        case grpc.StatusCode.ALREADY_EXISTS:
            return RequestExists(f"{said}; use another request_id, or leave it out")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _resource_exhausted(failure, said, target)
        case grpc.StatusCode.UNAVAILABLE if (explained := explain(said)) != said:
            return ServerUnavailable(f"cannot connect to {target}: {explained}")
        case grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(
                f"no scheduler is available at {target} ({said}); start one with `fdfo serve`, or name another target"
            )
        case grpc.StatusCode.CANCELLED:
            return ServerUnavailable(f"the scheduler at {target} ended the call ({said}); send the request again")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(
                f"the timeout passed at {target} ({said}); give a longer timeout, or ask for fewer tokens"
            )
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(
                f"{target} asks for an API key that it knows ({said}); give api_key, on the command line "
                "--api-key-file or FDFO_API_KEY"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnexpectedServer(
                f"{target} does not serve fdfo.scheduler.v1 ({said}); give the address of a scheduler, not of a worker"
            )
        case _:
            return RequestFailed(f"{target} failed the request: {code.name}: {said}", code.name)


def _is_not_grpc(code: grpc.StatusCode, said: str) -> bool:
    if any(words in said for words in _NOT_GRPC):
        return True
    return _HTTP_STATUS in said and code is not grpc.StatusCode.UNAVAILABLE


def _invalid_request(failure: grpc.aio.AioRpcError, said: str) -> InvalidRequest:
    detail = error_details_pb2.BadRequest()
    if not _read_detail(failure, detail) or not detail.field_violations:
        return InvalidRequest(said)
    violation = detail.field_violations[0]
    message = violation.description or said
    field = _option_name(violation.field)
    # The field stands in front, unless it does already.
    if field and not message.startswith(field):
        message = f"{field}: {message}"
    return InvalidRequest(message, field or None)


def _option_name(path: str) -> str:
    """The option of `generate` that set the request's field of this path."""
    return "prompt" if path == "text" else path.removeprefix("sampling.")


def _resource_exhausted(failure: grpc.aio.AioRpcError, said: str, target: str) -> Overloaded | RequestFailed:
    if "larger than max" in said:  # gRPC's own use of this code: a message over the size limit; waiting will not help
        return RequestFailed(f"a message to or from {target} is too large: {said}", failure.code().name)
    detail = error_details_pb2.RetryInfo()
    if not _read_detail(failure, detail):
        return Overloaded(f"{said}; try again later")
    seconds = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    # The server's sentence may give the advice already.
    return Overloaded(said if "try again" in said else f"{said}; try again in {seconds:g} s", seconds)


def _read_detail(
    failure: grpc.aio.AioRpcError, detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo
) -> bool:
    """Fill `detail` from the google.rpc.Status that came with the failure; False when there is none of its kind.

    A status that does not parse is as good as none: the plain code and sentence are then all there is.
    """
    for key, value in failure.trailing_metadata() or ():
        if key != _DETAILS_KEY or isinstance(value, str):
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
            return any(packed.Unpack(detail) for packed in status.details)
        except DecodeError:
            return False
    return False

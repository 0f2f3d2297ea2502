"""Errors as they arrive at the other end of a real call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_args

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common.errors import (
    AlreadyLive,
    Internal,
    InvalidField,
    QueueFull,
    RefusalReason,
    Refused,
    ServiceError,
    Unavailable,
    abort_with,
    refusal_reason,
)

M = TypeVar("M", bound=Message)


class _Handlers(grpc.GenericRpcHandler):
    """Answers every call with one behaviour."""

    def __init__(self, behaviour: Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Any]) -> None:
        self.behaviour = behaviour

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_unary_rpc_method_handler(self.behaviour)


def _error_of_call(behaviour: Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Any]) -> grpc.aio.AioRpcError:
    async def run() -> grpc.aio.AioRpcError:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Handlers(behaviour),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Service/Call")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
        await server.stop(None)
        return caught.value

    return asyncio.run(run())


def _over_the_wire(error: ServiceError) -> grpc.aio.AioRpcError:
    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort_with(context, error)

    return _error_of_call(call)


def _detail(error: grpc.aio.AioRpcError, kind: type[M]) -> M:
    status = rpc_status.from_call(cast(grpc.Call, error))
    assert status is not None
    detail = kind()
    assert any(packed.Unpack(detail) for packed in status.details)
    return detail


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Internal("the loop failed"), grpc.StatusCode.INTERNAL, "the loop failed"),
        (InvalidField("stop[2]", "is empty"), grpc.StatusCode.INVALID_ARGUMENT, "stop[2]: is empty"),
        (AlreadyLive("r1"), grpc.StatusCode.ALREADY_EXISTS, "request id 'r1' is live"),
        (QueueFull(0.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; try again in 0.5 s"),
        (Unavailable("shutting down"), grpc.StatusCode.UNAVAILABLE, "shutting down"),
        (Refused("DRAINING", "the worker drains"), grpc.StatusCode.UNAVAILABLE, "the worker drains"),
        (Refused("ROUND_GAP", "round 7 before 6"), grpc.StatusCode.FAILED_PRECONDITION, "round 7 before 6"),
    ],
)
def test_status_of_each_error(error: ServiceError, code: grpc.StatusCode, message: str) -> None:
    """Each error arrives with its own status code and its one line."""
    got = _over_the_wire(error)
    assert (got.code(), got.details()) == (code, message)


def test_invalid_field_names_the_field() -> None:
    """INVALID_ARGUMENT carries a BadRequest with the field's path and what is wrong with it."""
    detail = _detail(_over_the_wire(InvalidField("sampling.top_p", "must be above 0")), error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in detail.field_violations] == [("sampling.top_p", "must be above 0")]


@pytest.mark.parametrize(("of_client", "reason"), [(False, "QUEUE_FULL"), (True, "CLIENT_QUEUE_FULL")])
def test_queue_full_says_when_to_try_again(of_client: bool, reason: str) -> None:
    """RESOURCE_EXHAUSTED carries a RetryInfo with the delay, and an ErrorInfo that says whose queue is full."""
    error = _over_the_wire(QueueFull(1.25, of_client=of_client))
    delay = _detail(error, error_details_pb2.RetryInfo).retry_delay
    assert delay.ToTimedelta().total_seconds() == 1.25
    info = _detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, "fdfo.scheduler")


@pytest.mark.parametrize("reason", get_args(RefusalReason))
def test_refusal_reason_arrives(reason: RefusalReason) -> None:
    """A scheduler reads the reason of a refusal, whichever it is."""
    assert refusal_reason(_over_the_wire(Refused(reason, "no"))) == reason


def test_other_failures_have_no_refusal_reason() -> None:
    """A failure without detail, with another detail, or with one of another domain is no refusal."""
    assert refusal_reason(_over_the_wire(Unavailable("gone"))) is None
    assert refusal_reason(_over_the_wire(QueueFull(1))) is None

    class Foreign(ServiceError):
        def details(self) -> Sequence[Message]:
            return (error_details_pb2.ErrorInfo(reason="DRAINING", domain="elsewhere.example"),)

    assert refusal_reason(_over_the_wire(Foreign("no"))) is None


def test_a_detail_that_contradicts_its_status_is_no_refusal() -> None:
    """A proxy that rewrote the status code does not make the scheduler trip."""

    packed = AnyMessage()
    packed.Pack(Refused("DRAINING", "no").details()[0])
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="no", details=[packed])

    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "no", rpc_status.to_status(status).trailing_metadata)

    got = _error_of_call(call)
    assert got.code() == grpc.StatusCode.ABORTED
    assert refusal_reason(got) is None


def test_a_long_value_in_a_refusal_is_cut() -> None:
    """What a user sent may be echoed, but never so long that the status itself cannot travel."""
    error = InvalidField("algorithm", "unknown algorithm " + "x" * 100_000)
    assert len(str(error)) < 2100

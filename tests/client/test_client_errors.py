"""How a failed call becomes a typed error."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

import fdfo_client
from fdfo_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    FdfoError,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestFailed,
    RetryPolicy,
    ServerUnavailable,
    UnexpectedServer,
)
from fdfo_client._errors import error_from_rpc
from fdfo_client.testing import FakeScheduler, committed, failure, serving, stall, started

Code = grpc.StatusCode
ONCE = RetryPolicy(max_retries=0)


def error_for(status: status_pb2.Status, after_start: bool = False) -> FdfoError:
    """What a client that may not retry raises when the scheduler ends the call with this status."""
    first = [started(), committed("a", [1])] if after_start else []
    with serving(FakeScheduler(lambda request: [*first, status])) as target, Client(target, retry=ONCE) as client:
        with pytest.raises(FdfoError) as caught:
            client.generate("x")
        return caught.value


@pytest.mark.parametrize("after_start", [False, True])
@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (Code.INVALID_ARGUMENT, InvalidRequest, "why"),
        (Code.OUT_OF_RANGE, InvalidRequest, "why"),
        (Code.ALREADY_EXISTS, RequestExists, "another request_id"),
        (Code.RESOURCE_EXHAUSTED, Overloaded, "try again later"),
        (Code.UNAVAILABLE, ServerUnavailable, "fdfo serve"),
        (Code.CANCELLED, ServerUnavailable, "send the request again"),
        (Code.DEADLINE_EXCEEDED, DeadlineExceeded, "longer timeout"),
        (Code.UNIMPLEMENTED, UnexpectedServer, "address of a scheduler"),
        (Code.INTERNAL, RequestFailed, "INTERNAL: why"),
        (Code.UNKNOWN, RequestFailed, "UNKNOWN: why"),
        (Code.FAILED_PRECONDITION, RequestFailed, "FAILED_PRECONDITION: why"),
    ],
)
def test_every_status_has_its_error(code: Code, kind: type[FdfoError], advice: str, after_start: bool) -> None:
    """The kind follows the code, at once and in mid-stream, and the sentence says what to do next."""
    error = error_for(failure(code, "why"), after_start)
    assert type(error) is kind
    assert advice in str(error)
    assert "\n" not in str(error)


def test_a_bad_field_is_named() -> None:
    """The field of google.rpc.BadRequest is the error's, and stands in its sentence once."""
    violations = error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field="top_p", description="must be above 0")]
    )
    error = error_for(failure(Code.INVALID_ARGUMENT, "bad request", violations))
    assert isinstance(error, InvalidRequest)
    assert error.field == "top_p"
    assert str(error) == "top_p: must be above 0"

    violations.field_violations[0].description = "top_p must be above 0"
    assert str(error_for(failure(Code.INVALID_ARGUMENT, "bad request", violations))) == "top_p must be above 0"


@pytest.mark.parametrize(
    ("path", "option"), [("text", "prompt"), ("sampling.top_k", "top_k"), ("stop[2]", "stop[2]"), ("n", "n")]
)
def test_a_field_is_called_as_the_option_is(path: str, option: str) -> None:
    """The error's field is the name that the caller used, not the path in the request."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=path, description="is wrong")
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    error = error_for(failure(Code.INVALID_ARGUMENT, "bad request", detail))
    assert isinstance(error, InvalidRequest)
    assert error.field == option
    assert str(error) == f"{option}: is wrong"


def test_a_bad_request_without_a_field() -> None:
    """Without a violation the server's sentence is all there is."""
    error = error_for(failure(Code.INVALID_ARGUMENT, "just wrong"))
    assert isinstance(error, InvalidRequest)
    assert error.field is None
    assert str(error) == "just wrong"


def test_the_retry_hint_is_read() -> None:
    """google.rpc.RetryInfo becomes seconds, fractions too, also when another detail stands before it."""
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    other = error_details_pb2.ErrorInfo(reason="QUEUE_FULL")
    error = error_for(failure(Code.RESOURCE_EXHAUSTED, "1024 requests wait", other, retry))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.5
    assert str(error) == "1024 requests wait; try again in 2.5 s"
    assert (
        str(error_for(failure(Code.RESOURCE_EXHAUSTED, "full; try again in 2.5 s", retry)))
        == "full; try again in 2.5 s"
    )


def test_a_message_over_the_size_limit_is_not_overload() -> None:
    """gRPC's own RESOURCE_EXHAUSTED, for a message that is too large, asks for no retry."""
    said = "CLIENT: Sent message larger than max (70000000 vs. 67108864)"
    assert isinstance(error_for(failure(Code.RESOURCE_EXHAUSTED, said)), RequestFailed)


def test_details_that_do_not_parse() -> None:
    """Broken details leave the code and the sentence."""
    broken = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    failed = grpc.aio.AioRpcError(Code.INVALID_ARGUMENT, grpc.aio.Metadata(), broken, details="why")
    error = error_from_rpc(failed, "t:1")
    assert isinstance(error, InvalidRequest)
    assert str(error) == "why"


def test_no_server() -> None:
    """Without a scheduler every call says so at once, names the target and the command that starts one."""
    with Client("127.0.0.1:1") as client:
        for call in (lambda: client.generate("x"), client.server_info, lambda: client.abort("r")):
            with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1 .*fdfo serve"):
                call()


def test_the_timeout_passes() -> None:
    """A timeout ends the wait with DeadlineExceeded, and the server sees the call cancelled."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])
    with serving(fake) as target, Client(target) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("x", request_id="mine", timeout=0.2)
        assert fake.cancelled.get(timeout=10) == "mine"


def test_a_call_cancelled_by_the_server_does_not_cancel_the_task() -> None:
    """In asyncio code a cancelled call is an Exception: a task that awaits it is not taken for cancelled."""

    async def ask(target: str) -> None:
        async with AsyncClient(target) as client:
            with pytest.raises(ServerUnavailable):
                await client.generate("x")
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()

    with serving(FakeScheduler(lambda request: [failure(Code.CANCELLED, "why")])) as target:
        asyncio.run(ask(target))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.generate("x", request_id="mine"),
        lambda client: list(client.stream("x", request_id="mine")),
    ],
    ids=["generate", "stream"],
)
def test_ctrl_c_aborts_the_request(ask: Callable[[Client], object]) -> None:
    """Ctrl-C in the thread that waits ends the wait and cancels the call; the client can be used on."""
    fake = FakeScheduler(faults=[stall(after_blocks=1)])

    def interrupt() -> None:
        fake.held.get(timeout=10)
        os.kill(os.getpid(), signal.SIGINT)

    with serving(fake) as target, Client(target) as client, ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(client)
        interrupting.result()
        assert fake.cancelled.get(timeout=10) == "mine"
        client.server_info()


def test_all_errors_have_one_base() -> None:
    """Every exported exception is an FdfoError."""
    exported = [getattr(fdfo_client, name) for name in fdfo_client.__all__]
    errors = [kind for kind in exported if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert len(errors) == 9
    assert all(issubclass(kind, FdfoError) for kind in errors)

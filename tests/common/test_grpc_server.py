"""The server frame: health, reflection, the address, the ways to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import ServiceError
from common.grpc_server import GrpcService, print_ready
from fdfo.worker.v1 import worker_pb2

NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _with_service(use: Callable[[GrpcService, grpc.aio.Channel], Awaitable[None]]) -> None:
    async def run() -> None:
        service = GrpcService("127.0.0.1", 0, [NAME])
        service.server.add_generic_rpc_handlers((_Echo(),))
        port = await service.start()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            await use(service, channel)
        await service.stop(0)

    asyncio.run(run())


class _Echo(grpc.GenericRpcHandler):
    """/test.Echo/Call returns what it is sent."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def echo(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo) if handler_call_details.method == "/test.Echo/Call" else None


async def _health(channel: grpc.aio.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)


def test_health_of_the_service_is_what_was_set() -> None:
    """The named service starts NOT_SERVING and follows set_serving at once; "" is SERVING all the time."""

    async def use(service: GrpcService, channel: grpc.aio.Channel) -> None:
        assert await _health(channel, NAME) == NOT_SERVING
        service.set_serving(True)
        assert await _health(channel, NAME) == SERVING
        service.set_serving(False)
        assert await _health(channel, NAME) == NOT_SERVING
        service.set_serving(False)
        service.set_serving(True)
        assert await _health(channel, NAME) == SERVING
        assert await _health(channel, "") == SERVING

    _with_service(use)


def test_a_watcher_of_health_is_told_of_the_stop() -> None:
    """A client that watches sees NOT_SERVING before its call ends."""

    async def use(service: GrpcService, channel: grpc.aio.Channel) -> None:
        service.set_serving(True)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        service.set_serving(False)
        assert (await watch.read()).status == NOT_SERVING

    _with_service(use)


def test_reflection_lists_the_services() -> None:
    """A client without the protos can list the services and fetch the descriptor of ours."""

    async def use(service: GrpcService, channel: grpc.aio.Channel) -> None:
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        stub = make_stub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {entry.name for entry in (await call.read()).list_services_response.service}
        assert listed == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        assert worker_pb2.DESCRIPTOR.serialized_pb in files
        await call.done_writing()

    _with_service(use)


def test_messages_above_the_default_limit_pass() -> None:
    """5 MiB go both ways; gRPC's own limit is 4."""

    async def use(service: GrpcService, channel: grpc.aio.Channel) -> None:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Call")
        sent = bytes(5 * 1024 * 1024)
        assert await call(sent) == sent

    _with_service(use)


def test_an_old_connection_takes_no_new_call_and_cuts_no_stream() -> None:
    """Calls go to new connections again and again; a stream that began on the first one lives on to its end."""

    class Slow(grpc.GenericRpcHandler):
        """/test.Slow/Call sends who calls, every 50 ms, as long as it is asked to."""

        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
                for _ in range(int(request)):
                    yield context.peer().encode()
                    await asyncio.sleep(0.05)

            return grpc.unary_stream_rpc_method_handler(call)

    async def run() -> None:
        service = GrpcService("127.0.0.1", 0, [NAME], max_connection_age_s=0.2)
        service.server.add_generic_rpc_handlers((Slow(),))
        port = await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_stream("/test.Slow/Call")
            long_stream = call(b"16")
            first = await long_stream.read()
            peers = {first}
            for _ in range(12):
                peers |= {peer async for peer in call(b"1")}
            assert len(peers) >= 3
            rest = [await long_stream.read() for _ in range(16)]
            assert rest == [first] * 15 + [grpc.aio.EOF]
        await service.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", None, "Address already in use; choose another --port, or 0 for a free one"),
        ("192.0.2.1", 0, "Cannot assign requested address"),
        ("no.such.host.invalid", 0, "no.such.host.invalid"),
    ],
)
def test_an_address_that_cannot_be_had_is_told(host: str, port: int | None, said: str) -> None:
    """A port in use, a foreign address and an unknown host each end in one line with address and reason."""

    async def run(port: int) -> None:
        await GrpcService(host, port, [NAME]).start()

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1] if port is None else port
        with pytest.raises(ServiceError) as caught:
            asyncio.run(run(taken))
    line = str(caught.value)
    assert line.startswith(f"cannot listen on {host}:{taken}: ")
    assert said in line
    assert "\n" not in line


def test_two_services_do_not_share_a_port() -> None:
    """The second service on a port is refused; with port sharing half of the calls would go astray."""

    async def run() -> None:
        first = GrpcService("127.0.0.1", 0, [NAME])
        port = await first.start()
        with pytest.raises(ServiceError, match="Address already in use"):
            await GrpcService("127.0.0.1", port, [NAME]).start()
        await first.stop(0)

    asyncio.run(run())


def test_ready_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line has event, target, process id and the fields given."""
    print_ready("127.0.0.1:5", worker_epoch="e1")
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    ready = json.loads(out)
    assert ready.pop("pid") > 0
    assert ready == {"event": "ready", "target": "127.0.0.1:5", "worker_epoch": "e1"}
    assert err == ""


# A service that drains until it is told to go on.
CHILD = f"""
import asyncio, sys
from common.grpc_server import GrpcService, print_ready
from fdfo.worker.v1 import worker_pb2

async def main():
    service = GrpcService("127.0.0.1", 0, [{NAME!r}])
    port = await service.start()
    service.set_serving(True)
    print_ready(f"127.0.0.1:{{port}}")
    cause = await service.wait_for_stop(exit_with_parent="with-parent" in sys.argv)
    service.set_serving(False)
    print(cause, flush=True)
    if "slow" in sys.argv:
        await asyncio.to_thread(sys.stdin.readline)
    await service.stop(1)

asyncio.run(main())
"""


@contextmanager
def _child(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running service and its target. Not left alive, however the test ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD, *words], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["pid"] == process.pid
            yield process, ready["target"]
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _health_at(target: str, name: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_process(number: signal.Signals) -> None:
    """SIGTERM and SIGINT end the process with status 0, the cause known."""
    with _child() as (process, _):
        process.send_signal(number)
        assert _line(process) == number.name
        assert process.wait(10) == 0


def test_the_end_of_stdin_stops_the_process() -> None:
    """With exit_with_parent the process stops when its parent closes the pipe or dies; input is not an end."""
    with _child("with-parent") as (process, target):
        assert process.stdin is not None
        process.stdin.write("not an end\n")
        process.stdin.flush()
        assert _health_at(target, NAME) == SERVING
        process.stdin.close()
        assert _line(process) == "stdin closed"
        assert process.wait(10) == 0


def test_the_end_of_stdin_means_nothing_by_itself() -> None:
    """Without exit_with_parent a closed standard input stops nothing."""
    with _child() as (process, target):
        assert process.stdin is not None
        process.stdin.close()
        assert _health_at(target, NAME) == SERVING
        process.send_signal(signal.SIGTERM)
        assert _line(process) == "SIGTERM"
        assert process.wait(10) == 0


def test_health_answers_during_the_drain_and_signals_do_not_cut_it() -> None:
    """While a stopped service drains it says NOT_SERVING, and more signals change nothing."""
    with _child("slow") as (process, target):
        process.send_signal(signal.SIGTERM)
        assert _line(process) == "SIGTERM"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert _health_at(target, NAME) == NOT_SERVING
        assert _health_at(target, "") == SERVING
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(10) == 0

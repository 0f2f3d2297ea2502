"""The two proxies: each fault does what its name says, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import Refused, abort_with, refusal_reason
from tests.chaos.grpc_proxy import WORKER_SERVICE, GrpcProxy
from tests.chaos.scenario import Rules
from tests.chaos.tcp_proxy import TcpProxy

METHOD = f"{WORKER_SERVICE}RunRound"


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[TcpProxy]:
    """A TCP proxy in front of an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
        writer.close()

    tasks = []
    server = await asyncio.start_server(lambda *ends: tasks.append(asyncio.create_task(echo(*ends))), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy = TcpProxy(f"{host}:{port}")
    try:
        yield proxy
    finally:
        await proxy.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)  # each has seen the end of its connection
        server.close()


@contextlib.asynccontextmanager
async def connected(target: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> bytes:
    writer.write(text)
    return await asyncio.wait_for(reader.readexactly(len(text)), 5)


async def echoed_anew(target: str, text: bytes) -> bytes:
    """What another connection sends back."""
    async with connected(target) as (reader, writer):
        return await echoed(reader, writer, text)


def test_a_cut_resets_both_sides_and_new_connections_work() -> None:
    """After a cut the client's next read fails with a reset; one that connects then is served."""

    async def scenario() -> None:
        async with echoing() as proxy:
            target = await proxy.start()
            async with connected(target) as (reader, writer):
                assert await echoed(reader, writer, b"hello") == b"hello"
                assert proxy.cut() == 1
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(reader.read(1), 5)
            assert await echoed_anew(target, b"again") == b"again"

    asyncio.run(scenario())


def test_a_stall_holds_everything_and_loses_nothing() -> None:
    """What is sent during a stall comes back after it, in order; nothing comes before."""

    async def scenario() -> None:
        async with echoing() as proxy, connected(await proxy.start()) as (reader, writer):
            assert await echoed(reader, writer, b"hello") == b"hello"
            stalled = asyncio.create_task(proxy.stall(0.15))
            await asyncio.sleep(0)
            answer = asyncio.create_task(echoed(reader, writer, b"one two"))
            done, _ = await asyncio.wait({answer, stalled}, return_when=asyncio.FIRST_COMPLETED)
            assert done == {stalled}
            assert await answer == b"one two"

    asyncio.run(scenario())


def test_a_half_open_connection_swallows_and_is_reset_at_the_end() -> None:
    """The client is not told that the far side is gone; it may write, hears nothing, and is reset in the end."""

    async def scenario() -> None:
        async with echoing() as proxy:
            target = await proxy.start()
            async with connected(target) as (reader, writer):
                assert await echoed(reader, writer, b"hello") == b"hello"
                open_half = asyncio.create_task(proxy.half_open(0.15))
                await asyncio.sleep(0)
                writer.write(b"lost")
                heard = asyncio.create_task(reader.read(1))
                assert await echoed_anew(target, b"other") == b"other"
                done, _ = await asyncio.wait({heard, open_half}, return_when=asyncio.FIRST_COMPLETED)
                assert done == {open_half}
                with pytest.raises(ConnectionResetError):
                    await heard

    asyncio.run(scenario())


class Behind:
    """What the gRPC proxy stands before: answers with what it got, or refuses."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    async def run_round(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.got.append(request)
        if request == b"stale":
            await abort_with(context, Refused("STALE_GENERATION", "an older one"))
        return b"reply to " + request


Call = Callable[[bytes], Awaitable[bytes]]


def through_proxy(rules: Rules, scenario: Callable[[Call, Behind, GrpcProxy], Awaitable[None]]) -> None:
    """Run a scenario with a call that goes through a proxy with these rules."""

    async def run() -> None:
        behind, server = Behind(), grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(behind.run_round)
        service = WORKER_SERVICE.strip("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"RunRound": method}),))
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        proxy = GrpcProxy(f"127.0.0.1:{port}", random.Random(1))
        proxy.rules = rules
        async with grpc.aio.insecure_channel(await proxy.start()) as channel:
            stub: Any = channel.unary_unary(METHOD)
            await scenario(lambda request: stub(request, timeout=5), behind, proxy)
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = await check.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await proxy.stop()
        await server.stop(0)

    asyncio.run(run())


def test_without_rules_calls_and_refusals_pass() -> None:
    """Replies, and a refusal with its reason, come through as they are."""

    async def scenario(call: Call, behind: Behind, proxy: GrpcProxy) -> None:
        assert await call(b"one") == b"reply to one"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"stale")
        assert refusal_reason(error.value) == "STALE_GENERATION"
        assert behind.got == [b"one", b"stale"]

    through_proxy(Rules(), scenario)


@pytest.mark.parametrize(("rules", "arrived"), [(Rules(drop_request=1), 0), (Rules(drop_reply=1), 1)])
def test_a_dropped_call_is_unavailable(rules: Rules, arrived: int) -> None:
    """A dropped request never arrives; of a dropped reply the work is done. The caller hears UNAVAILABLE."""

    async def scenario(call: Call, behind: Behind, proxy: GrpcProxy) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"one")
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refusal_reason(error.value) is None
        assert len(behind.got) == arrived
        assert sum(proxy.counts.values()) == 2  # the call and its fault

    through_proxy(rules, scenario)


def test_a_doubled_call_arrives_twice_and_is_answered_once() -> None:
    """The caller sees one reply."""

    async def scenario(call: Call, behind: Behind, proxy: GrpcProxy) -> None:
        assert await call(b"one") == b"reply to one"
        assert behind.got == [b"one", b"one"]

    through_proxy(Rules(duplicate=1), scenario)


def test_a_reordered_call_is_overtaken_by_the_next() -> None:
    """Of two calls the first arrives last; both are answered."""

    async def scenario(call: Call, behind: Behind, proxy: GrpcProxy) -> None:
        first = asyncio.ensure_future(call(b"first"))
        while not proxy.counts["reorder"]:
            await asyncio.sleep(0.001)
        proxy.rules = Rules()
        assert await call(b"second") == b"reply to second"
        assert await first == b"reply to first"
        assert behind.got == [b"second", b"first"]

    through_proxy(Rules(reorder=1), scenario)

"""Schedulers that take connections and say nothing more, as a frozen process does; and processes that fork."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import AsyncClient, Client, RetryPolicy, ServerUnavailable, UnexpectedServer, _async_client
from fdfo_client._channel import CHANNEL_OPTIONS
from fdfo_client.testing import FakeScheduler, serving


class Silent(FakeScheduler):
    """Holds every GetServerInfo."""

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> Any:  # noqa: N802
        await asyncio.Event().wait()


def test_a_silent_scheduler_hides_no_other() -> None:
    """server_info takes the first answer, and wait_ready the first scheduler that is ready, wherever they stand."""
    unready = FakeScheduler(infos=[pb.GetServerInfoResponse(scheduler_id="unready")])
    with serving(Silent()) as silent, serving(unready) as second, serving(FakeScheduler()) as third:
        with Client([silent, third]) as client:
            assert client.server_info(timeout=60).scheduler_id == "fake"
        with Client([silent, second, third]) as client:
            assert client.wait_ready(timeout=60).scheduler_id == "fake"
        with Client([silent, second]) as client, pytest.raises(ServerUnavailable) as caught:
            client.wait_ready(timeout=0.2)
    assert silent in str(caught.value) and f"{second} answers, but has no ready worker" in str(caught.value)


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


SETTINGS, HEADERS = http2_frame(4, 0, 0), 1
STATUS_200, STATUS_400 = b"\x88", b"\x8c"  # by HPACK's static table
HTML = b"\x5f\x09text/html"


@contextlib.asynccontextmanager
async def answering(greeting: bytes, answer: bytes) -> AsyncIterator[str]:
    """A server that says so: once connected, and to a call."""

    class Server(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.seen, self.transport = b"", transport
            connections.append(transport)
            transport.write(greeting)

        def data_received(self, data: bytes) -> None:
            self.seen += data
            place = 24  # behind that with which HTTP/2 begins
            while place + 9 <= len(self.seen):
                if self.seen[place + 3] == HEADERS:
                    self.transport.write(answer)
                    self.seen = b""
                place += 9 + int.from_bytes(self.seen[place : place + 3], "big")

    connections: list[Any] = []
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(3):  # connections that are on their way, then the end of all
        await asyncio.sleep(0)
        for connection in connections:
            connection.abort()


def test_a_connection_that_falls_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings find it, in a call that waits for its turn; within 16 s, here a fiftieth of that."""
    limits_ms = {name: int(value) for name, value in CHANNEL_OPTIONS if "keepalive_time" in name or "ping_time" in name}
    assert limits_ms["grpc.keepalive_time_ms"] > 10_000, "faster is refused by servers"
    keepalive_ms = limits_ms["grpc.keepalive_time_ms"] + limits_ms["grpc.keepalive_timeout_ms"]
    assert max(keepalive_ms, limits_ms["grpc.http2.ping_timeout_ms"]) <= 16_000
    quick = [(name, limits_ms[name] // 50 if name in limits_ms else value) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr(_async_client, "CHANNEL_OPTIONS", quick)

    async def run() -> None:
        async with answering(SETTINGS, b"") as target, AsyncClient(target, retry=RetryPolicy(max_retries=0)) as client:
            with pytest.raises(ServerUnavailable, match="ping"):
                await asyncio.wait_for(client.generate("x"), 10)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("greeting", "answer"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""),
        (SETTINGS, http2_frame(1, 4, 1, STATUS_200 + HTML) + http2_frame(0, 1, 1, b"<html>")),
        (SETTINGS, http2_frame(1, 4, 1, STATUS_400 + HTML) + http2_frame(0, 1, 1, b"<html>")),
    ],
    ids=["HTTP/1", "HTTP/2", "HTTP/2 error"],
)
def test_a_server_that_is_none_of_grpc(greeting: bytes, answer: bytes) -> None:
    """A port where HTTP is spoken, such as a gateway's, is told as what it is."""

    async def run() -> None:
        async with answering(greeting, answer) as target, AsyncClient(target) as client:
            with pytest.raises(UnexpectedServer, match="does not speak gRPC"):
                await client.server_info(timeout=5)

    asyncio.run(run())


# The alarm ends a child that hangs.
FORK = """
import os, signal
from fdfo_client import Client
from fdfo_client.testing import FakeScheduler, serving

def refused(call):
    try:
        call()
    except RuntimeError as error:
        return "fork" in str(error) and "spawn" in str(error)

with serving(FakeScheduler()) as target:
    with Client(target) as client:
        stream = client.stream("x")
        next(stream)
        child = os.fork()
        if not child:
            signal.alarm(10)
            calls = (lambda: client.generate("x"), lambda: next(stream), lambda: Client(target))
            all_refused = all(map(refused, calls))
            client.close()
            os._exit(0 if all_refused else 1)
        status = os.waitpid(child, 0)[1]
        assert client.generate("x").text == "Hello world"
assert status == 0, status
"""


def test_a_forked_process_is_told() -> None:
    """Where gRPC was in use before the fork its child gets an error instead of waiting for ever; the parent goes on."""
    # gRPC's own handlers of forks crash the child now and then where a server runs in the process.
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=30, env=environment)

"""A TCP proxy in this event loop whose connections can be cut, stalled or left half open.

`bench/delay.py` is another one: it adds a precise delay for measurements, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


@dataclass(eq=False)
class _Connection:
    """Both sides of one connection, and the tasks that pass bytes on."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_dead: bool = False  # half open: what the client sends goes nowhere, and nothing ever comes


class TcpProxy:
    """Passes on every connection to `to` (HOST:PORT)."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._connections: set[_Connection] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen on a free port; gives the target to use instead of `to`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self) -> int:
        """Reset every connection, on both sides. How many."""
        count = len(self._connections)
        for connection in list(self._connections):
            _reset(connection.client)
            _reset(connection.server)
        return count

    async def stall(self, seconds: float) -> None:
        """Pass nothing on for so long, in either direction; nothing is lost. New connections wait too."""
        self._flows.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._flows.set()

    async def half_open(self, seconds: float) -> None:
        """Every connection there is now loses its far side without a word to the client; after so long it is reset.

        Bytes of the client are swallowed meanwhile. New connections work.
        """
        dead = list(self._connections)
        for connection in dead:
            connection.is_dead = True
            _reset(connection.server)
        try:
            await asyncio.sleep(seconds)
        finally:
            for connection in dead:
                _reset(connection.client)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            from_server, to_server = await asyncio.open_connection(*self._to)
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, to_server)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pass_on(connection, reader, to_server), self._pass_on(connection, from_server, writer)
            )
        finally:
            self._connections.discard(connection)
            writer.transport.abort()
            to_server.transport.abort()

    async def _pass_on(self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK_BYTES):
                await self._flows.wait()
                if not connection.is_dead:
                    sink.write(chunk)
                    await sink.drain()
        if not connection.is_dead:
            sink.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    writer.transport.abort()

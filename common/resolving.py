"""The addresses behind a name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection

Resolve = Callable[[str, int], Awaitable[Collection[str]]]  # host and port to targets, address:port each


async def resolve(host: str, port: int) -> set[str]:
    """The targets behind a name, by the system's resolver, which sets the time limit. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }

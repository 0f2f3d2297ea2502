"""Where the workers are: fixed addresses, and names in DNS that are resolved again and again.

--workers a:50052,b:50052              fixed; each one is a target of gRPC, which resolves it
--workers dns:///workers:50052         one worker behind every address of the name, as long as it has it
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable

import structlog

from scheduler_svc.settings import split_target

RESOLVE_TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[Collection[str]]]  # host and port to targets, address:port each

log = structlog.get_logger()


async def resolve(host: str, port: int) -> set[str]:
    """The targets behind a name, by the system's resolver. Raises OSError, or TimeoutError, which is one."""
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }


async def follow(
    names: Iterable[str], interval_s: float, resolve: Resolve, on_targets: Callable[[set[str]], None]
) -> None:
    """For ever: resolve all names (host:port each) and tell their targets together, then wait.

    A name that does not resolve keeps the targets it had: a resolver that is down takes no worker away.
    """
    targets: dict[str, set[str]] = {name: set() for name in names}
    while True:
        for name in targets:
            try:
                targets[name] = set(await resolve(*split_target(name)))
            except OSError as error:
                log.warning("name_not_resolved", name=name, reason=str(error) or type(error).__name__)
        on_targets(set().union(*targets.values()))
        await asyncio.sleep(interval_s)

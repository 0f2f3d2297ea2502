"""Where the workers are: fixed addresses, and names in DNS that are resolved again and again.

--workers a:50052,b:50052              fixed; each one is a target of gRPC, which resolves it
--workers dns:///workers:50052         one worker behind every address of the name, as long as it has it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from common import resolving
from common.resolving import Resolve
from scheduler_svc.settings import split_target

RESOLVE_TIMEOUT_S = 5.0

log = structlog.get_logger()


async def resolve(host: str, port: int) -> set[str]:
    """See `resolving.resolve`. After `RESOLVE_TIMEOUT_S` it raises TimeoutError, which is an OSError."""
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        return await resolving.resolve(host, port)


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

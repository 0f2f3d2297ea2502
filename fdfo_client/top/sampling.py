"""Schedulers asked again and again, each for itself: one that is gone hides no other."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.resolving import Resolve, resolve
from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._errors import FdfoError
from fdfo_client._types import ServerInfo

# A name whose addresses are asked one by one; gRPC itself would ask one of them at a time.
_DNS_NAME = re.compile(r"dns:(?:///)?(?P<host>[^/]+):(?P<port>\d+)")


@dataclass(frozen=True)
class Sample:
    """A scheduler at one moment of a monotonic clock. `info` is None when it did not answer; `error` says why."""

    target: str
    at_s: float
    info: ServerInfo | None
    error: str = ""


class Sampler:
    """Asks all schedulers at `targets`; behind dns:///name:port those at every address that the name has now.

    Use it within one event loop and close it. A name that does not resolve keeps the addresses it had.
    """

    def __init__(
        self,
        targets: Sequence[str],
        access: Access = OPEN,
        *,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = targets
        self._access = access
        self._resolve = resolve
        self._clock = clock
        self._clients: dict[str, AsyncClient] = {}
        self._addresses: dict[str, list[str]] = {}

    async def sample(self, timeout_s: float) -> list[Sample]:
        """A sample of each scheduler, in the order of the targets, at the latest after `timeout_s`."""
        samples = await asyncio.gather(*(self._sample(target, timeout_s) for target in self._targets))
        one_each = {sample.target: sample for group in samples for sample in group}
        for target in self._clients.keys() - one_each.keys():
            await self._clients.pop(target).close()
        return list(one_each.values())

    async def close(self) -> None:
        """End the connections."""
        for client in self._clients.values():
            await client.close()

    async def _sample(self, target: str, timeout_s: float) -> list[Sample]:
        name = _DNS_NAME.fullmatch(target)
        if name is None:
            return [await self._ask(target, self._access, timeout_s)]
        error = "the name has no address"
        try:
            async with asyncio.timeout(timeout_s):
                self._addresses[target] = sorted(await self._resolve(name["host"], int(name["port"])))
        except OSError as failure:  # TimeoutError is one
            error = f"{target} does not resolve: {failure.strerror or type(failure).__name__}"
        if not self._addresses.get(target):
            return [Sample(target, self._clock(), None, error)]
        access = self._access
        if access.tls is not None and access.tls.server_name is None:  # the certificate is for the name
            access = access._replace(tls=dataclasses.replace(access.tls, server_name=name["host"]))
        return await asyncio.gather(*(self._ask(address, access, timeout_s) for address in self._addresses[target]))

    async def _ask(self, target: str, access: Access, timeout_s: float) -> Sample:
        if target not in self._clients:
            self._clients[target] = AsyncClient(target, tls=access.tls, api_key=access.api_key)
        try:
            info = await self._clients[target].server_info(timeout=timeout_s)
        except FdfoError as error:
            return Sample(target, self._clock(), None, str(error))
        return Sample(target, self._clock(), info)

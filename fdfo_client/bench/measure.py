"""A load run between two looks at the servers' counters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._errors import FdfoError, UnexpectedServer
from fdfo_client._retry import DEFAULT_RETRY, RetryPolicy
from fdfo_client._types import ServerCounters, ServerInfo
from fdfo_client._waiting import waiting
from fdfo_client.bench.load import Load, Record, Stream
from fdfo_client.bench.workload import Item


@dataclass(frozen=True)
class World:
    """What a load runs against: live schedulers (`connect`), or anything that streams and counts like them.

    counters: the sums over all schedulers. servers: each scheduler by its target, as it was at first.
    """

    stream: Stream
    counters: Callable[[], Awaitable[ServerCounters]]
    servers: Mapping[str, ServerInfo]

    @property
    def server(self) -> ServerInfo:
        """One of the servers; all serve the same model."""
        return next(iter(self.servers.values()))

    @property
    def num_workers(self) -> int:
        """Workers that were ready; one that several schedulers use counts once."""
        return len({worker.target for info in self.servers.values() for worker in info.workers if worker.ready})


@dataclass(frozen=True)
class Measurement:
    """What a load brought, and the counters before and after; `counters_error` says why there are none after."""

    records: Sequence[Record]
    wall_s: float
    was_cut_short: bool
    before: ServerCounters
    after: ServerCounters | None
    counters_error: str | None = None


@contextlib.asynccontextmanager
async def connect(targets: Sequence[str], access: Access = OPEN) -> AsyncIterator[World]:
    """The schedulers at these targets. Requests go to each in turn. Raises FdfoError if one does not answer."""
    async with contextlib.AsyncExitStack() as stack:

        def client(targets: str | Sequence[str], retry: RetryPolicy = DEFAULT_RETRY) -> AsyncClient:
            return AsyncClient(targets, retry=retry, tls=access.tls, api_key=access.api_key)

        # A load shows what a scheduler refuses, so nothing is tried again.
        sender = await stack.enter_async_context(client(targets, RetryPolicy(max_retries=0)))
        clients = {target: await stack.enter_async_context(client(target)) for target in targets}
        with waiting(f"waiting for {', '.join(targets)}"):
            servers = {target: await client.server_info() for target, client in clients.items()}
        for target, info in servers.items():
            if info.block_size < 1 or info.num_tokens < 1 or info.context_length < 2:
                raise UnexpectedServer(f"{target} does not say what model it serves; is it of an older version?")
        if len({info.fingerprint for info in servers.values()}) > 1:
            raise UnexpectedServer(f"{', '.join(targets)} serve different models; measure them one by one")

        async def counters() -> ServerCounters:
            return add_counters([(await client.server_info()).counters for client in clients.values()])

        yield World(lambda options: sender.stream(**options), counters, servers)


async def measure(
    world: World, load: Load, items: Iterable[Item], *, concurrency: int | None, duration_s: float | None = None
) -> Measurement:
    """Run `load` (see `Load.run`) and give what it brought. Servers that are gone at its end cost their counters."""
    before = await world.counters()
    await load.run(items, concurrency=concurrency, duration_s=duration_s)
    after, problem = None, None
    try:
        after = await world.counters()
    except FdfoError as error:
        problem = str(error)
    return Measurement(load.records, load.wall_s, load.was_cut_short, before, after, problem)


def add_counters(parts: Iterable[ServerCounters]) -> ServerCounters:
    """Each counter's sum."""
    return ServerCounters(*(sum(values) for values in zip(*map(dataclasses.astuple, parts), strict=True)))

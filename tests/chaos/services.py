"""The processes of a run: workers, schedulers and what stands between them, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc.aio

from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from fdfo_client import AsyncClient, FdfoError, ServerInfo
from fdfo_client.child_process import Child
from fdfo_client.serve import Progress, wait_for_workers
from tests.chaos.grpc_proxy import GrpcProxy
from tests.chaos.scenario import Event, Services
from tests.chaos.tcp_proxy import TcpProxy

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"tiny": ROOT / "models/tiny-llada2", "simulated": ROOT / "models/simulated-h200-llada2-mini"}
PREVIOUS = Path(__file__).parent / "previous.txt"
READY_S, BACK_S, RESTART_AFTER_S, POLL_S = 40.0, 30.0, 0.2, 0.05

Say = Callable[[str], None]


class Refused(Exception):
    """A scheduler does not take a worker, and says why."""


class Skipped(Exception):
    """This run cannot be made here; one line says why."""


class World:
    """Running services of one run. Made by `running`."""

    def __init__(self, services: Services, log: Path, say: Say, draws: random.Random) -> None:
        self.services = services
        self.log = log
        self.workers: list[Child] = []
        self.schedulers: list[Child] = []
        self.proxies: list[GrpcProxy | TcpProxy] = []
        self._say = say
        self._draws = draws
        self._turns: Counter[str] = Counter()
        self._gone: set[Child] = set()  # killed for good

    @property
    def targets(self) -> list[str]:
        """Of the schedulers, for clients."""
        return [child.target for child in self.schedulers]

    @property
    def children(self) -> list[Child]:
        """All that are meant to run."""
        return [child for child in (*self.workers, *self.schedulers) if child not in self._gone]

    async def start(self, log_descriptor: int, previous_root: Path | None) -> None:
        """Start workers, proxies and schedulers; returns when all workers are ready at all schedulers."""
        services = self.services

        def child(kind: str, index: int, *flags: str) -> Child:
            root = ROOT if kind not in services.previous else previous_root
            model = ("--model-path", str(MODELS[services.model]))
            # -P: not the code of the current folder, but that of PYTHONPATH.
            words = (sys.executable, "-P", "-m", f"{kind}_svc", *model, "--exit-with-parent", *flags)
            environment = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
            return Child(
                f"{kind} {index}",
                lambda port: (*words, "--port", str(port)),
                0,
                {**os.environ, **environment, **services.environment, "PYTHONPATH": str(root)},
                stderr=log_descriptor,
                max_delay_s=RESTART_AFTER_S,
            )

        self.workers = [child("worker", index, *services.worker_flags) for index in range(services.workers)]
        await asyncio.gather(*(worker.start() for worker in self.workers))
        targets = [worker.target for worker in self.workers]
        if services.proxy:
            for target in targets:
                self.proxies.append(TcpProxy(target) if services.proxy == "tcp" else GrpcProxy(target, self._draws))
            targets = [await proxy.start() for proxy in self.proxies]
        flags = ("--workers", ",".join(targets), *services.scheduler_flags)
        self.schedulers = [child("scheduler", index, *flags) for index in range(services.schedulers)]
        await asyncio.gather(*(scheduler.start() for scheduler in self.schedulers))
        try:
            async with asyncio.timeout(READY_S):
                await wait_for_workers(self.targets, services.workers, Progress(""))
        except TimeoutError:
            info = await self.scheduler_info(self.schedulers[0])
            reasons = "; ".join(worker.last_error for worker in info.workers)
            raise Refused(reasons) from None

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not end."""
        hurry = asyncio.Event()
        for group in (self.schedulers, self.workers):
            await asyncio.gather(*(child.stop(hurry) for child in group))
            hurry.set()
        for proxy in self.proxies:
            await proxy.stop()

    async def scheduler_info(self, child: Child) -> ServerInfo:
        async with AsyncClient(child.target) as client:
            return await client.server_info(timeout=5)

    async def worker_info(self, child: Child) -> pb.GetWorkerInfoResponse:
        """Of the worker itself, past any proxy."""
        async with grpc.aio.insecure_channel(child.target) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info: pb.GetWorkerInfoResponse = await stub.GetWorkerInfo(pb.GetWorkerInfoRequest(), timeout=5)
            return info

    async def do(self, event: Event) -> None:
        """Make the event happen once, and wait for its end."""
        for child in self._whom(event):
            await self._do_to(event, child)

    def _whom(self, event: Event) -> Iterator[Child]:
        kind, _, number = event.who.removeprefix("each").strip().partition(" ")
        group = {"worker": self.workers, "scheduler": self.schedulers}.get(kind, [*self.workers, *self.schedulers])
        if number:
            yield group[int(number)]
        elif event.who.startswith("each"):
            yield from group
        else:
            yield group[self._turns[kind] % len(group)]
            self._turns[kind] += 1

    async def _do_to(self, event: Event, child: Child) -> None:
        pid = child.pid
        self._say(f"{event.do} {child.name}" + (f" for {event.for_s:g} s" if event.for_s else ""))
        match event.do:
            case "kill" | "terminate":
                if not event.restart and child.keeper is not None:
                    self._gone.add(child)
                    child.keeper.cancel()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if event.do == "kill" else signal.SIGTERM)
                if event.who.startswith("each"):
                    await self._wait_back(child, pid)
            case "pause":
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(event.for_s)
                finally:
                    os.kill(pid, signal.SIGCONT)
            case _:
                await self._do_at_proxy(event, self.proxies[self.workers.index(child)])

    async def _do_at_proxy(self, event: Event, proxy: GrpcProxy | TcpProxy) -> None:
        if isinstance(proxy, GrpcProxy):
            proxy.rules = event.rules
            await asyncio.sleep(event.for_s)
            proxy.rules = type(event.rules)()
        elif event.do == "stall":
            await proxy.stall(event.for_s)
        elif event.do == "half-open":
            await proxy.half_open(event.for_s)
        else:
            proxy.cut()

    async def _wait_back(self, child: Child, old_pid: int) -> None:
        """Until another process of the child serves: a worker at every scheduler, a scheduler with every worker."""
        async with asyncio.timeout(BACK_S):
            while child.pid == old_pid:
                await asyncio.sleep(POLL_S)
            while True:
                with contextlib.suppress(FdfoError, grpc.aio.AioRpcError):
                    if child in self.schedulers:
                        if all(worker.ready for worker in (await self.scheduler_info(child)).workers):
                            return
                    elif await self._is_known(child):
                        return
                await asyncio.sleep(POLL_S)

    async def _is_known(self, worker: Child) -> bool:
        epoch = (await self.worker_info(worker)).worker_epoch
        infos = [await self.scheduler_info(child) for child in self.schedulers]
        return all(any(each.ready and each.worker_epoch == epoch for each in info.workers) for info in infos)

    async def wait_idle(self, limit_s: float) -> str:
        """Until nothing is queued, running or held, with all pages there; what is left after the limit, else ""."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            try:
                left = await self._what_is_left()
            except (FdfoError, grpc.aio.AioRpcError) as error:
                left = " ".join(str(error).split())[:200]
            if not left or loop.time() > deadline:
                return left
            await asyncio.sleep(POLL_S)

    async def _what_is_left(self) -> str:
        left = []
        for child in self.children:
            if child in self.schedulers:
                server = await self.scheduler_info(child)
                if server.queued or server.running:
                    left.append(f"{child.name}: {server.queued} queued, {server.running} running")
                if waiting := [worker.target for worker in server.workers if not worker.ready]:
                    left.append(f"{child.name}: {len(waiting)} workers not ready")
            else:
                info = await self.worker_info(child)
                pages = info.pages
                if pages.held or info.slots_used:
                    left.append(f"{child.name}: {pages.held} pages held, {info.slots_used} slots used")
                if pages.free + pages.cached + pages.held != pages.total or not pages.total:
                    left.append(f"{child.name}: pages are lost: {pages}")
        return "; ".join(left)


@contextlib.asynccontextmanager
async def running(services: Services, log: Path, say: Say, draws: random.Random) -> AsyncIterator[World]:
    """The services of a run, from their start to their end. Raises Refused or Skipped."""
    world = World(services, log, say, draws)
    with log.open("ab") as file, contextlib.ExitStack() as stack:
        previous_root = stack.enter_context(previous_release()) if services.previous else None
        try:
            await world.start(file.fileno(), previous_root)
            yield world
        finally:
            await world.stop()


@contextlib.contextmanager
def previous_release() -> Iterator[Path]:
    """A folder with the code of the last release: the commit that previous.txt names. Raises Skipped."""
    commit = PREVIOUS.read_text().split()[0]
    with tempfile.TemporaryDirectory(prefix="fdfo-previous-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise Skipped(f"the code of the previous release ({commit[:9]}) is not in this checkout's history")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)

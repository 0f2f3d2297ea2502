"""A scheduler and workers in one thread: the real scheduler core over real denoise loops, no network, no time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from common.model_folder import ModelFolder, read_model_folder
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo_client.bench.virtual import LoopLink
from fdfo_client.bench.virtual_time import run_virtually
from scheduler_svc.core import Scheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.stream import Stream
from scheduler_svc.workers import WorkerLost
from tests.worker.scripted import BLOCK, FILL, VOCAB, ScriptedRunner
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

EVENT_LOOP_PASSES_A_FORWARD = 12
FORWARD_S = 0.05
FOLDER = dataclasses.replace(read_model_folder("models/tiny-llada2"), fingerprint="scripted", context_length=1024)


class InMemoryLink(LoopLink):
    """A link to a worker that a test can kill. It keeps what went over it."""

    def __init__(self, loop: DenoiseLoop, scheduler_id: str, context_length: int, target: str = "memory") -> None:
        super().__init__(loop, target, scheduler_id)
        self.context_length = context_length
        self.is_dead = False
        self.requests: list[pb.RunRoundRequest] = []
        self.replies: list[pb.RunRoundResponse] = []

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        while self.is_dead:
            await asyncio.sleep(0)
        info = await super().get_info()
        info.context_length = self.context_length
        return info

    async def probe(self) -> pb.GetWorkerInfoResponse:
        if self.is_dead:
            raise WorkerLost("dead", is_death=True)
        return await super().get_info()

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        self.requests.append(request)
        call = asyncio.create_task(super().run_round(request, timeout_s))
        try:
            while not call.done():
                if self.is_dead:
                    raise WorkerLost("dead", is_death=True)
                await asyncio.sleep(0)
            self.replies.append(call.result())
            return call.result()
        finally:
            call.cancel()

    async def release(self, generation: int, rows: pb.RowNames) -> None:
        if self.is_dead:
            raise WorkerLost("dead")
        await super().release(generation, rows)

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        if self.is_dead:
            raise WorkerLost("dead", is_death=True)
        return await super().heartbeat(generation)

    async def drive(self) -> None:
        """The device: a forward takes longer than what the scheduler does between two of them."""
        while True:
            if not self.is_dead:
                self.loop.tick()
            for _ in range(EVENT_LOOP_PASSES_A_FORWARD):
                await asyncio.sleep(0)


class TimedLink(InMemoryLink):
    """A link for `play_timed`: a forward takes FORWARD_S of a clock that jumps. A test can stop the worker for a time:
    it takes what comes and answers nothing."""

    is_stopped = False

    def stop(self, is_stopped: bool = True) -> None:
        self.is_stopped = is_stopped

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        while self.is_stopped or self.is_dead:
            await asyncio.sleep(FORWARD_S)
        return await super().get_info()

    async def probe(self) -> pb.GetWorkerInfoResponse:
        if self.is_stopped:
            await asyncio.sleep(2.0)
            raise WorkerLost("no answer")
        return await super().probe()

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        self.requests.append(request)
        return await LoopLink.run_round(self, request, timeout_s)

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        if self.is_stopped:
            await asyncio.sleep(5.0)
            raise WorkerLost("no answer")
        return await super().heartbeat(generation)

    async def drive(self) -> None:
        while True:
            if not (self.is_stopped or self.is_dead):
                self.loop.tick()
            await asyncio.sleep(FORWARD_S)


class Bench:
    """A scheduler and its workers, for the time of one test. `names`: what DNS says, for --workers dns:///..."""

    def __init__(
        self,
        *loops: DenoiseLoop,
        folder: ModelFolder = FOLDER,
        link_type: type[InMemoryLink] = InMemoryLink,
        **settings: object,
    ) -> None:
        targets = ",".join(f"127.0.0.1:{number + 1}" for number in range(len(loops)))
        values = {"model_path": Path("models/tiny-llada2"), "workers": targets, **settings}
        self.links: list[InMemoryLink] = []
        self.names: dict[str, set[str]] = {}

        def connect(target: str, scheduler_id: str) -> InMemoryLink:
            loop = loops[int(target.rpartition(":")[2]) - 1]
            self.links.append(link_type(loop, scheduler_id, folder.context_length, target))
            return self.links[-1]

        async def resolve(host: str, port: int) -> set[str]:
            if host not in self.names:
                raise OSError("no such name")
            return self.names[host]

        self.scheduler = Scheduler(
            folder,
            SchedulerSettings(**values),  # type: ignore[arg-type]
            {},
            connect,
            0.0,
            resolve,
        )

    async def submit(self, request_id: str, prompt: list[int], max_new_tokens: int = 40, **fields: object) -> Stream:
        """`fields`: of the message, and `client`."""
        client = str(fields.pop("client", ""))
        message = api.GenerateRequest(
            request_id=request_id,
            prompt_ids=api.TokenIds(ids=prompt),
            max_new_tokens=max_new_tokens,
            **fields,  # type: ignore[arg-type]
        )
        return await self.scheduler.submit(message, client)

    async def read(self, stream: Stream) -> tuple[list[int], api.Finished]:
        """All published ids and the last event of a request with one sample."""
        (answer,) = await self.read_all(stream)
        return answer

    async def read_all(self, stream: Stream) -> list[tuple[list[int], api.Finished]]:
        """The same of all samples."""
        ids: list[list[int]] = [[] for _ in stream.samples]
        finished: dict[int, api.Finished] = {}
        try:
            async for event in stream.read():
                if event.HasField("committed"):
                    assert event.committed.token_ids or event.committed.text, "an empty message"
                    assert event.committed.sample_index not in finished
                    ids[event.committed.sample_index] += event.committed.token_ids
                if event.HasField("finished"):
                    finished[event.finished.sample_index] = event.finished
        finally:
            self.scheduler.leave(stream)
        return [(ids[index], finished[index]) for index in range(len(ids))]


async def _play(bench: Bench, scene: Callable[[], Awaitable[None]], limit_s: float) -> None:
    tasks = [asyncio.create_task(bench.scheduler.run())]
    tasks += [asyncio.create_task(link.drive()) for link in bench.links]
    scene_task = asyncio.ensure_future(scene())
    await asyncio.wait_for(asyncio.wait({scene_task, *tasks}, return_when=asyncio.FIRST_COMPLETED), limit_s)
    for task in tasks:
        assert not task.done(), task.exception()
        task.cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    await scene_task


def play(bench: Bench, scene: Callable[[], Awaitable[None]]) -> None:
    """Run the scene with scheduler and devices going."""
    asyncio.run(_play(bench, scene, 20))


def play_timed(bench: Bench, scene: Callable[[], Awaitable[None]], limit_s: float = 600) -> None:
    """The same for TimedLinks, under a clock that jumps."""
    run_virtually(_play(bench, scene, limit_s))


def expected(prompt_length: int, count: int) -> list[int]:
    return [FILL + position % 8 for position in range(prompt_length, prompt_length + count)]


class ContextRunner(ScriptedRunner):
    """Logits that depend on every token before and in the block, by way of the pool: a wrong page or a lost token
    changes all that follows."""

    _table = torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(1)) * 3

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        for unit, (slot, block) in enumerate(zip(inputs.slots.tolist(), inputs.block_index.tolist(), strict=True)):
            self._flat(kv, slot, block)[:] = inputs.ids[unit].float()
        logits = []
        for unit in inputs.logits_units.tolist():
            blocks = [self._flat(kv, int(inputs.slots[unit]), block) for block in range(int(inputs.block_index[unit]))]
            seen = torch.cat([*blocks, inputs.ids[unit].float()]).long()
            number = int((seen * torch.arange(3, 3 + len(seen))).sum())
            logits.append(self._table[(number + torch.arange(BLOCK)) % len(self._table)])
        return torch.stack(logits) if logits else torch.zeros(0, BLOCK, VOCAB)

    @staticmethod
    def _flat(kv: KVStore, slot: int, block: int) -> torch.Tensor:
        """Where the pool keeps the block of a slot."""
        page = int(kv.page_table[slot, block * BLOCK // kv.page_size])
        assert page != 0, "a block without a page"
        first = block * BLOCK % kv.page_size
        return kv.k[0, page, first : first + BLOCK, 0, 0]

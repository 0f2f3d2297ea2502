"""A scheduler and workers in one thread: the real scheduler core over real denoise loops, no network, no time."""

from __future__ import annotations

import asyncio

from fdfo.worker.v1 import worker_pb2 as pb
from fdfo_client.bench.virtual import LoopLink
from scheduler_svc.workers import WorkerLost
from worker_svc.denoise import DenoiseLoop

EVENT_LOOP_PASSES_A_FORWARD = 12


class InMemoryLink(LoopLink):
    """A link to a worker that a test can kill. It keeps what went over it."""

    def __init__(self, loop: DenoiseLoop, scheduler_id: str, context_length: int) -> None:
        super().__init__(loop, "memory", scheduler_id)
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

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        self.requests.append(request)
        call = asyncio.create_task(super().run_round(request, timeout_s))
        try:
            while not call.done():
                if self.is_dead:
                    raise WorkerLost("dead")
                await asyncio.sleep(0)
            self.replies.append(call.result())
            return call.result()
        finally:
            call.cancel()

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        if self.is_dead:
            raise WorkerLost("dead")
        return await super().heartbeat(generation)

    async def drive(self) -> None:
        """The device: a forward takes longer than what the scheduler does between two of them."""
        while True:
            if not self.is_dead:
                self.loop.tick()
            for _ in range(EVENT_LOOP_PASSES_A_FORWARD):
                await asyncio.sleep(0)

"""A scheduler and workers in one thread: the real scheduler core over real denoise loops, no network, no time."""

from __future__ import annotations

import asyncio

from common.errors import Refused, ServiceError
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.workers import WorkerLost
from worker_svc.denoise import DenoiseLoop, page_usage_message
from worker_svc.rounds import RoundRequest
from worker_svc.server import algorithm_infos
from worker_svc.wire import decode_round

EVENT_LOOP_PASSES_A_FORWARD = 12


class InMemoryLink:
    """Takes the place of a WorkerLink. Every message is serialised on its way, as over a network."""

    def __init__(self, loop: DenoiseLoop, scheduler_id: str, context_length: int) -> None:
        self.loop = loop
        self.scheduler_id = scheduler_id
        self.target = "memory"
        self.last_error = ""
        self.context_length = context_length
        self.is_dead = False
        self.requests: list[pb.RunRoundRequest] = []
        self.replies: list[pb.RunRoundResponse] = []

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        while self.is_dead:
            await asyncio.sleep(0)
        config = self.loop.config
        return pb.GetWorkerInfoResponse(
            worker_epoch=self.loop.epoch,
            fingerprint=config.fingerprint,
            block_size=config.block_size,
            page_size=config.page_size,
            context_length=self.context_length,
            max_running_requests=config.num_slots,
            pages=page_usage_message(self.loop.pool.usage()),
            algorithms=algorithm_infos(),
        )

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        self.requests.append(request)
        decoded: RoundRequest = decode_round(pb.RunRoundRequest.FromString(request.SerializeToString()))
        results: list[pb.RunRoundResponse | ServiceError] = []
        self.loop.submit(decoded, results.append)
        while not results:
            if self.is_dead:
                raise WorkerLost("dead")
            await asyncio.sleep(0)
        if isinstance(results[0], Refused):
            raise WorkerLost(str(results[0]))
        assert isinstance(results[0], pb.RunRoundResponse), results[0]
        reply = pb.RunRoundResponse.FromString(results[0].SerializeToString())
        self.replies.append(reply)
        return reply

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        if self.is_dead:
            raise WorkerLost("dead")
        session = self.loop.touch(self.scheduler_id, generation)
        return pb.HeartbeatResponse(
            worker_epoch=self.loop.epoch,
            pages=page_usage_message(self.loop.pool.usage()),
            allowance=self.loop.allowance(session),
        )

    async def drive(self) -> None:
        """The device: a forward takes longer than what the scheduler does between two of them."""
        while True:
            if not self.is_dead:
                self.loop.tick()
            for _ in range(EVENT_LOOP_PASSES_A_FORWARD):
                await asyncio.sleep(0)

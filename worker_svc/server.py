"""The gRPC face of the worker: decode, hand to the device thread, answer."""

from __future__ import annotations

from typing import Any

import grpc

from common import __version__
from common.errors import Refused, ServiceError, abort_with
from common.model_folder import ModelFolder
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from worker_svc.algorithms import algorithms_for
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.loop_state import page_usage_message
from worker_svc.metrics import WorkerMetrics
from worker_svc.settings import WorkerSettings
from worker_svc.wire import check_scheduler_id, decode_names, decode_round

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


def algorithm_infos(logit_shift: int = 0) -> list[pb.AlgorithmInfo]:
    """What this worker's algorithms take; those that can run on such a model."""
    return [
        pb.AlgorithmInfo(
            name=algorithm.name,
            edits=algorithm.edits,
            params=[
                pb.AlgorithmParam(
                    name=param.name,
                    default_value=param.default,
                    min_value=param.min_value,
                    max_value=param.max_value,
                    is_integer=param.is_integer,
                )
                for param in algorithm.params
            ],
        )
        for algorithm in algorithms_for(logit_shift).values()
    ]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService over one Executor; see worker.proto for the meaning of each call."""

    def __init__(
        self,
        executor: Executor,
        loop: DenoiseLoop,
        folder: ModelFolder,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
    ) -> None:
        self._executor = executor
        self._metrics = metrics
        self._epoch = loop.epoch
        self._start_rules = loop.start_rules
        self._info = pb.GetWorkerInfoResponse(
            worker_epoch=loop.epoch,
            fingerprint=folder.fingerprint,
            version=__version__,
            model_architecture=folder.architecture,
            block_size=folder.block_size,
            page_size=loop.config.page_size,
            vocab_size=folder.vocab_size,
            mask_token_id=folder.mask_token_id,
            context_length=folder.context_length,
            max_running_requests=settings.max_running_requests,
            chunked_prefill_size=loop.config.chunked_prefill_size,
            dtype=str(loop.runner.dtype).removeprefix("torch."),
            device=str(loop.runner.device),
            attention_backend=settings.attention_backend,
            batch_invariant=settings.batch_invariant,
            algorithms=algorithm_infos(loop.config.logit_shift),
        )

    async def RunRound(self, request: pb.RunRoundRequest, context: Context) -> pb.RunRoundResponse:
        try:
            reply = await self._executor.run_round(decode_round(request, self._start_rules))
        except ServiceError as error:
            await abort_with(context, error)
        self._metrics.round_replied(reply.work)
        return reply

    async def ReleaseRequests(self, request: pb.ReleaseRequestsRequest, context: Context) -> pb.ReleaseRequestsResponse:
        try:
            check_scheduler_id(request.scheduler_id)
            names = decode_names(request.rows, "rows")

            def release(loop: DenoiseLoop) -> None:
                loop.release(loop.leases.touch(request.scheduler_id, request.generation), names)

            await self._executor.call(release)
        except ServiceError as error:
            await abort_with(context, error)
        return pb.ReleaseRequestsResponse(pages=page_usage_message(self._executor.state.pages))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        try:
            check_scheduler_id(request.scheduler_id)
            allowance = await self._executor.call(
                lambda loop: loop.allowance(loop.leases.touch(request.scheduler_id, request.generation))
            )
        except ServiceError as error:
            await abort_with(context, error)
        state = self._executor.state
        return pb.HeartbeatResponse(
            worker_epoch=self._epoch,
            draining=state.draining,
            pages=page_usage_message(state.pages),
            allowance=allowance,
        )

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Context) -> pb.GetWorkerInfoResponse:
        if request.scheduler_id:
            self._executor.post(lambda loop: loop.leases.renew(request.scheduler_id))
        state = self._executor.state
        info = pb.GetWorkerInfoResponse()
        info.CopyFrom(self._info)
        info.pages.CopyFrom(page_usage_message(state.pages))
        info.counters.CopyFrom(state.counters)
        info.draining = state.draining
        info.slots_used = state.slots_used
        return info


class LoadingServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Refuses all calls until `servicer` is set. A server takes its servicers before it starts, and it starts before
    the model loads so that probes are answered."""

    def __init__(self) -> None:
        self.servicer: WorkerServicer | None = None

    async def RunRound(self, request: pb.RunRoundRequest, context: Context) -> pb.RunRoundResponse:
        return await (await self._loaded(context)).RunRound(request, context)

    async def ReleaseRequests(self, request: pb.ReleaseRequestsRequest, context: Context) -> pb.ReleaseRequestsResponse:
        return await (await self._loaded(context)).ReleaseRequests(request, context)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        return await (await self._loaded(context)).Heartbeat(request, context)

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Context) -> pb.GetWorkerInfoResponse:
        return await (await self._loaded(context)).GetWorkerInfo(request, context)

    async def _loaded(self, context: Context) -> WorkerServicer:
        if self.servicer is None:  # what an earlier process at this address held is gone, and its epoch with it
            await abort_with(context, Refused("EPOCH_CHANGED", "this worker is loading its model; ask again"))
        return self.servicer

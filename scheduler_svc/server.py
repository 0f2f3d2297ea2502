"""The gRPC face of the scheduler."""

from __future__ import annotations

from typing import Any

import grpc
import structlog

from common import __version__
from common.callers import current_caller
from common.errors import ServiceError, abort_with
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from scheduler_svc.core import Scheduler
from scheduler_svc.validation import check_abort

SERVICE_NAME = api.DESCRIPTOR.services_by_name["SchedulerService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger()


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """SchedulerService over one Scheduler; see scheduler.proto for the meaning of each call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def Generate(self, message: api.GenerateRequest, context: Context) -> None:
        try:
            stream = await self._scheduler.submit(message, current_caller())
        except ServiceError as error:
            await abort_with(context, error)
        self._scheduler.end_within(stream, context.time_remaining())
        structlog.contextvars.bind_contextvars(request_id=stream.request_id)
        spec, samples = stream.samples[0].spec, stream.samples
        log.info("request_queued", prompt_tokens=len(spec.prompt_ids), algorithm=spec.algorithm, samples=len(samples))
        try:
            async for event in stream.read():
                await context.write(event)
        except ServiceError as error:
            await abort_with(context, error)
        finally:  # also when the client is gone
            self._scheduler.leave(stream)
            log.info("request_left", **stream.cost())

    async def Abort(self, message: api.AbortRequest, context: Context) -> api.AbortResponse:
        try:
            check_abort(message)
        except ServiceError as error:
            await abort_with(context, error)
        client = current_caller()
        return api.AbortResponse(aborted=sum(self._scheduler.abort(name, client) for name in message.request_ids))

    async def GetServerInfo(self, message: api.GetServerInfoRequest, context: Context) -> api.GetServerInfoResponse:
        info = self._scheduler.info()
        info.version = __version__
        return info

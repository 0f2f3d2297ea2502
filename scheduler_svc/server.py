"""The gRPC face of the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message

from common import __version__
from common.callers import current_caller
from common.errors import ServiceError, SlowReader, abort_with
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from scheduler_svc.core import Scheduler
from scheduler_svc.stream import Stream
from scheduler_svc.traces import note_stream
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
            async with reading(self._scheduler, stream, context):
                async for event in stream.read():
                    await write(self._scheduler, event, context)
        except ServiceError as error:
            await abort_with(context, error)

    async def Abort(self, message: api.AbortRequest, context: Context) -> api.AbortResponse:
        try:
            check_abort(message)
        except ServiceError as error:
            await abort_with(context, error)
        client = current_caller()
        return api.AbortResponse(aborted=sum(self._scheduler.abort(name, client) for name in message.request_ids))

    async def WatchRounds(self, message: api.WatchRoundsRequest, context: Context) -> None:
        try:
            with self._scheduler.watches.watch(current_caller()) as watcher:
                await context.send_initial_metadata(())
                async for round_ in watcher.read():
                    await context.write(round_)
        except grpc.aio.InternalError:  # the client is gone
            raise asyncio.CancelledError from None
        except ServiceError as error:
            await abort_with(context, error)

    async def GetServerInfo(self, message: api.GetServerInfoRequest, context: Context) -> api.GetServerInfoResponse:
        info = self._scheduler.info()
        info.version = __version__
        return info


@contextlib.asynccontextmanager
async def reading(scheduler: Scheduler, stream: Stream, context: Context) -> AsyncIterator[None]:
    """The time in which a client reads. Its request ends at its deadline, and with this time however that ends;
    the status may still wait for the client then."""
    scheduler.end_within(stream, context.time_remaining())
    structlog.contextvars.bind_contextvars(request_id=stream.request_id)
    note_stream(stream)
    spec, samples = stream.samples[0].spec, stream.samples
    log.info("request_queued", prompt_tokens=len(spec.prompt_ids), algorithm=spec.algorithm, samples=len(samples))
    try:
        await context.send_initial_metadata(())  # no status can be sent while a first write with them is blocked
        yield
    except grpc.aio.InternalError:  # the client is gone; gRPC's own word of it comes a moment later
        raise asyncio.CancelledError from None
    finally:  # also when the client is gone
        scheduler.leave(stream)
        log.info("request_left", **stream.cost())


async def write(scheduler: Scheduler, message: Message, context: Context) -> None:
    """Returns when gRPC has room for more. Raises SlowReader."""
    limit_s = scheduler.settings.slow_reader_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            await context.write(message)
    except TimeoutError:
        raise SlowReader(f"the client read nothing for {limit_s:g} s; send the request again") from None

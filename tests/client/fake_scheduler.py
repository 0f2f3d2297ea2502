"""A scheduler in this process that answers as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

HOLD = "hold"

# A response is sent. A status ends the call with it. HOLD waits until the request is aborted or its call cancelled.
Step: TypeAlias = pb.GenerateResponse | status_pb2.Status | str


def started(
    request_id: str = "r1", seed: int = 7, queue_position: int = 0, prompt_tokens: int = 3, resume: bytes = b""
) -> pb.GenerateResponse:
    """Without `resume` as of a scheduler whose requests cannot be resumed."""
    message = pb.Started(
        request_id=request_id, seed=seed, queue_position=queue_position, prompt_tokens=prompt_tokens, resume=resume
    )
    return pb.GenerateResponse(started=message)


def committed(text: str, token_ids: Sequence[int], forwards: int = 0, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(committed=pb.Committed(text=text, token_ids=token_ids, forwards=forwards, **fields))


def finished(reason: pb.FinishReason = pb.FINISH_REASON_LENGTH, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, **fields))


def failure(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    """A google.rpc.Status to end a call with."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def answer(*texts: str) -> Callable[[pb.GenerateRequest], list[Step]]:
    """A script that commits these texts, the token ids being those of the characters."""

    def script(request: pb.GenerateRequest) -> list[Step]:
        blocks = [committed(text, [ord(char) for char in text]) for text in texts]
        usage = pb.Usage(prompt_tokens=3, completion_tokens=sum(map(len, texts)), forwards=5, rounds=2)
        return [started(request.request_id or "drawn", request.sampling.seed), *blocks, finished(usage=usage)]

    return script


def holding(request: pb.GenerateRequest) -> list[Step]:
    """A script that commits one text and then waits to be aborted or cancelled."""
    return [started(request.request_id or "drawn"), committed("first", [1]), HOLD, finished(pb.FINISH_REASON_ABORT)]


class FakeScheduler(pb_grpc.SchedulerServiceServicer):
    """Answers each Generate with the steps of `script`, and each GetServerInfo with the next of `infos`.

    The last of `infos` stays. `requests` holds what came; `held` and `cancelled` are queues of request ids.
    """

    def __init__(
        self,
        script: Callable[[pb.GenerateRequest], Sequence[Step]] | None = None,
        infos: Sequence[pb.GetServerInfoResponse] = (),
    ) -> None:
        self.script = script or answer("Hello", " world")
        self.infos = list(infos) or [pb.GetServerInfoResponse()]
        self.requests: list[pb.GenerateRequest] = []
        self.held: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._holds: dict[str, asyncio.Event] = {}

    async def Generate(  # noqa: N802 (the name in the proto)
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        for step in self.script(request):
            if isinstance(step, pb.GenerateResponse):
                yield step
            elif isinstance(step, status_pb2.Status):
                code = next(code for code in grpc.StatusCode if code.value[0] == step.code)
                await context.abort(code, step.message, (("grpc-status-details-bin", step.SerializeToString()),))
            else:
                await self._hold(request.request_id)

    async def _hold(self, request_id: str) -> None:
        self._holds[request_id] = asyncio.Event()
        self.held.put(request_id)
        try:
            await self._holds[request_id].wait()
        except asyncio.CancelledError:
            self.cancelled.put(request_id)
            raise
        finally:
            del self._holds[request_id]

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        live = [self._holds[request_id] for request_id in request.request_ids if request_id in self._holds]
        for hold in live:
            hold.set()
        return pb.AbortResponse(aborted=len(live))

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        return self.infos.pop(0) if len(self.infos) > 1 else self.infos[0]


@contextlib.contextmanager
def serving(scheduler: FakeScheduler, port: int = 0) -> Iterator[str]:
    """Serve it from a thread; gives the target."""
    running: queue.SimpleQueue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
        bound_port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        stop = asyncio.Event()
        running.put((bound_port, asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop(grace=0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="fake-scheduler")
    thread.start()
    bound_port, loop, stop = running.get(timeout=10)
    try:
        yield f"127.0.0.1:{bound_port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

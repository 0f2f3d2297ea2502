"""A fake scheduler for tests of code that uses this library: scripted answers and faults, no model, no torch.

scheduler = FakeScheduler(["one ", "two ", "three"], faults=[lose_connection(after_blocks=2)])
with serving(scheduler) as target, Client(target) as client:
    completion = client.generate("Count to three.")
assert completion.text == "one two three" and completion.resumes == 1

It is a gRPC server on a free port of this machine, so that all of the library is used as it is. It reads neither the
prompt nor most options: an answer is a list of texts, one for each block, whose token ids are the code points of their
characters. For full control give it a script, a function that makes the steps of a call from its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

__all__ = [
    "HOLD",
    "FakeScheduler",
    "Fault",
    "Script",
    "Step",
    "answer",
    "committed",
    "exceed_deadline",
    "failure",
    "finished",
    "lose_connection",
    "overload",
    "serving",
    "stall",
    "started",
]

HOLD = "hold"

# A response is sent. A status ends the call with it. HOLD waits until the request is aborted or its call cancelled.
Step: TypeAlias = pb.GenerateResponse | status_pb2.Status | str
# The steps of the answer to a request.
Script: TypeAlias = Callable[[pb.GenerateRequest], Sequence[Step]]
# Of the steps that a call would have, those that it gets.
Fault: TypeAlias = Callable[[Sequence[Step]], Sequence[Step]]

READY = pb.GetServerInfoResponse(
    scheduler_id="fake",
    served_model_name="fake",
    block_size=32,
    num_tokens=0x110000,
    context_length=4096,
    workers=[pb.WorkerState(target="fake:1", ready=True)],
)


def started(
    request_id: str = "r1", seed: int = 7, queue_position: int = 0, prompt_tokens: int = 3, resume: bytes = b""
) -> pb.GenerateResponse:
    """Without `resume` as of a scheduler whose requests cannot be resumed."""
    message = pb.Started(
        request_id=request_id, seed=seed, queue_position=queue_position, prompt_tokens=prompt_tokens, resume=resume
    )
    return pb.GenerateResponse(started=message)


def committed(text: str, token_ids: Sequence[int], forwards: int = 0, **fields: Any) -> pb.GenerateResponse:
    """A block, or several. `fields` are further ones of the message `Committed`."""
    return pb.GenerateResponse(committed=pb.Committed(text=text, token_ids=token_ids, forwards=forwards, **fields))


def finished(reason: pb.FinishReason = pb.FINISH_REASON_LENGTH, **fields: Any) -> pb.GenerateResponse:
    """The end of a sample. `fields` are further ones of the message `Finished`."""
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, **fields))


def failure(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    """The end of a call, with details of google.rpc.error_details such as BadRequest."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def lose_connection(after_blocks: int = 0) -> Fault:
    """A call that ends as one whose scheduler died, once it has sent so many blocks."""
    lost = failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    return lambda steps: [*_up_to(steps, after_blocks), lost]


def exceed_deadline(after_blocks: int = 0) -> Fault:
    """A call that ends as one whose timeout passed, once it has sent so many blocks."""
    late = failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")

    def fault(steps: Sequence[Step]) -> list[Step]:
        sent = _up_to(steps, after_blocks)
        ends = [step.finished for step in steps if isinstance(step, pb.GenerateResponse) and step.HasField("finished")]
        return [*sent, *(_interrupted(sent, end) for end in ends), late]

    return fault


def _interrupted(sent: Sequence[pb.GenerateResponse], end: pb.Finished) -> pb.GenerateResponse:
    """What the sample that would have had this end had cost."""
    blocks = [step.committed for step in sent if step.HasField("committed")]
    blocks = [block for block in blocks if block.sample_index == end.sample_index]
    usage = pb.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=sum(len(block.token_ids) for block in blocks),
        forwards=max((block.forwards for block in blocks), default=0),
        rounds=len(blocks),
    )
    return pb.GenerateResponse(interrupted=pb.Interrupted(usage=usage, sample_index=end.sample_index))


def stall(after_blocks: int = 0) -> Fault:
    """A call that sends so many blocks and then nothing, until it is cancelled or its request aborted."""
    return lambda steps: [*_up_to(steps, after_blocks), HOLD, finished(pb.FINISH_REASON_ABORT)]


def overload(retry_after_s: float | None = None) -> Fault:
    """A call that is refused because the queue is full, with a hint when to come back or without."""
    details = []
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", *details)
    return lambda steps: [full]


def _up_to(steps: Sequence[Step], num_blocks: int) -> list[pb.GenerateResponse]:
    """Started and so many blocks."""
    kept = [step for step in steps if isinstance(step, pb.GenerateResponse) and not step.HasField("finished")]
    return list(kept[: 1 + num_blocks])


def answer(*texts: str) -> Script:
    """A script that commits these texts one by one, for every sample, and goes on after those that a request has."""

    def script(request: pb.GenerateRequest) -> list[Step]:
        num_done = [0] * (request.n or 1)
        for resume in request.resumes:
            sample, num_blocks = map(int, resume.value.split(b":"))
            if list(resume.committed_ids) != [ord(char) for text in texts[:num_blocks] for char in text]:
                return [failure(grpc.StatusCode.INVALID_ARGUMENT, "resumes: other tokens than those sent")]
            num_done[sample] = num_blocks
        prompt_tokens = len(request.text or request.prompt_ids.ids or request.messages.messages)
        steps: list[Step] = [
            started(request.request_id, request.sampling.seed, prompt_tokens=prompt_tokens, resume=b"0:0")
        ]
        for number, text in enumerate(texts, start=1):
            token_ids = [ord(char) for char in text]
            steps += [
                committed(
                    text,
                    token_ids,
                    forwards=number,
                    committed_ids=token_ids,
                    resume=b"%d:%d" % (sample, number),
                    sample_index=sample,
                    logprobs=[0.0] * len(text) if request.logprobs else [],
                    first_unmask_steps=[0] * len(text) if request.first_unmask_steps else [],
                )
                for sample in range(len(num_done))
                if num_done[sample] < number
            ]
        usage = pb.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(map(len, texts)),
            forwards=len(texts),
            rounds=len(texts),
        )
        ends = [
            finished(usage=usage, sample_index=sample, resume=b"%d:%d" % (sample, len(texts)))
            for sample in range(len(num_done))
        ]
        return [*steps, *ends]

    return script


class FakeScheduler(pb_grpc.SchedulerServiceServicer):
    """Answers every request with `blocks`, a text each, or with the steps of a script.

    faults: one for each call, in order; later calls have none. More may be added to `FakeScheduler.faults`.
    infos: the answers to `server_info`, in order; the last one stays. By default that of a scheduler that is ready.

    `requests` has what came. `held` and `cancelled` are queues of the ids of requests that hold now, and of those that
    held and whose call was cancelled: `held.get(timeout=10)` waits for one.
    """

    def __init__(
        self,
        blocks: Sequence[str] | Script = ("Hello", " world"),
        *,
        faults: Iterable[Fault] = (),
        infos: Sequence[pb.GetServerInfoResponse] = (READY,),
    ) -> None:
        self.script: Script = blocks if callable(blocks) else answer(*blocks)
        self.faults = list(faults)
        self.infos = list(infos)
        self.requests: list[pb.GenerateRequest] = []
        self.held: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._holds: dict[str, asyncio.Event] = {}

    async def Generate(  # noqa: N802 (the name in the proto)
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """As the proto has it. A script sees the request with an id, drawn where it had none."""
        self.requests.append(request)
        named = pb.GenerateRequest()
        named.CopyFrom(request)
        named.request_id = request.request_id or f"fake-{len(self.requests)}"
        steps = self.script(named)
        if self.faults:
            steps = self.faults.pop(0)(steps)
        for step in steps:
            if isinstance(step, pb.GenerateResponse):
                yield step
            elif isinstance(step, status_pb2.Status):
                code = next(code for code in grpc.StatusCode if code.value[0] == step.code)
                await context.abort(code, step.message, (("grpc-status-details-bin", step.SerializeToString()),))
            else:
                await self._hold(named.request_id)

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
        """Ends what holds; nothing else is live for long."""
        live = [self._holds[request_id] for request_id in request.request_ids if request_id in self._holds]
        for hold in live:
            hold.set()
        return pb.AbortResponse(aborted=len(live))

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        """The next of `infos`."""
        return self.infos.pop(0) if len(self.infos) > 1 else self.infos[0]


@contextlib.contextmanager
def serving(scheduler: FakeScheduler, port: int = 0, *, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve it from a thread of this process; gives the target. Raises RuntimeError for a port that is taken."""
    running: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event] | Exception] = queue.SimpleQueue()

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
        try:
            target = f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
        except RuntimeError as error:
            running.put(error)
            return
        await server.start()
        stop = asyncio.Event()
        running.put((target, asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop(grace=0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="fake-scheduler")
    thread.start()
    state = running.get()
    if isinstance(state, Exception):
        thread.join()
        raise state
    target, loop, stop = state
    try:
        yield target
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

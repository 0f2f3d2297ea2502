"""Sends prompts to one scheduler, all at once, and keeps what came back beside every round that it ran meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._channel import CHANNEL_OPTIONS, Connection
from fdfo_client._errors import FdfoError, UnexpectedServer, error_from_rpc
from fdfo_client._retry import RetryPolicy
from fdfo_client._types import Committed, Event, Finished, ServerInfo, Started

Stream = Callable[[dict[str, Any]], AsyncIterator[Event]]
LAST_ROUNDS_S = 2.0  # a round is told on a stream of its own, so it may come after the text that it brought
POLL_S = 0.01


@dataclass
class Answer:
    """What one sample brought. Times are seconds of `clock`; token ids and steps are those that were published."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_unmask_steps: list[int] = field(default_factory=list)
    first_text_s: float | None = None
    ended_s: float | None = None
    reason: str = ""
    forwards: int = 0


@dataclass
class Sent:
    """A request from its sending to its end; `error` is one line."""

    options: dict[str, Any]
    sent_s: float
    request_id: str = ""
    prompt_tokens: int = 0
    ended_s: float | None = None
    error: str = ""
    samples: dict[int, Answer] = field(default_factory=dict)


@dataclass
class Recording:
    """One run. `rounds` are as the scheduler told them; their times are those of its clock and of its workers'."""

    name: str
    server: ServerInfo
    requests: list[Sent]
    rounds: list[pb.WatchRoundsResponse]
    is_complete: bool = True  # every forward of every answer stands in a round


@dataclass
class Recorder:
    """Records requests to one scheduler. `clock` gives seconds."""

    stream: Stream
    on_event: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    requests: list[Sent] = field(default_factory=list)
    rounds: list[pb.WatchRoundsResponse] = field(default_factory=list)

    async def run(self, prompts: Sequence[dict[str, Any]]) -> bool:
        """Send all at once and wait for their ends; then until every forward is told of, and whether that was so."""
        async with asyncio.TaskGroup() as group:
            for options in prompts:
                group.create_task(self._send(options))
        deadline = self.clock() + LAST_ROUNDS_S
        while not self.is_complete and self.clock() < deadline:
            await asyncio.sleep(POLL_S)
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the rounds account for all forwards that the answers cost."""
        told: dict[tuple[str, int], int] = {}
        for round_ in self.rounds:
            for row in round_.rows:
                key = (row.request_id, row.sample_index)
                told[key] = told.get(key, 0) + row.forwards
        answers = [
            (request.request_id, index, answer)
            for request in self.requests
            for index, answer in request.samples.items()
        ]
        return all(told.get((name, index), 0) >= answer.forwards for name, index, answer in answers)

    @property
    def num_ended(self) -> int:
        return sum(request.ended_s is not None for request in self.requests)

    async def _send(self, options: dict[str, Any]) -> None:
        request = Sent(options, self.clock())
        self.requests.append(request)
        try:
            async for event in self.stream(options | {"first_unmask_steps": True}):
                self._note(request, event)
        except FdfoError as error:
            request.error = " ".join(str(error).split())
        request.ended_s = self.clock()
        self.on_event()

    def _note(self, request: Sent, event: Event) -> None:
        now = self.clock()
        match event:
            case Started():
                request.request_id, request.prompt_tokens = event.request_id, event.prompt_tokens
            case Committed():
                answer = request.samples.setdefault(event.sample_index, Answer())
                answer.text += event.text
                answer.token_ids += event.token_ids
                answer.first_unmask_steps += event.first_unmask_steps or ()
                answer.first_text_s = now if answer.first_text_s is None else answer.first_text_s
            case Finished():
                answer = request.samples.setdefault(event.sample_index, Answer())
                answer.ended_s, answer.reason, answer.forwards = now, event.reason, event.usage.forwards


async def record(
    name: str,
    target: str,
    prompts: Sequence[dict[str, Any]],
    *,
    access: Access = OPEN,
    is_cold: bool = False,
    on_progress: Callable[[int, int], None] = lambda ended, total: None,
) -> Recording:
    """Record `prompts` (options of `AsyncClient.stream`, the prompt among them) at the scheduler `target`.

    `is_cold`: the server was just started, so a request that is not recorded goes before. Requests that fail are in the
    recording with their error. Raises FdfoError when the rounds cannot be watched.
    """
    retry = RetryPolicy(max_retries=0)  # the picture shows what a scheduler refuses
    async with AsyncClient(target, retry=retry, tls=access.tls, api_key=access.api_key) as client:
        server = await client.server_info()
        if is_cold:
            await client.generate(prompt_ids=[0], max_new_tokens=2 * server.block_size, ignore_eos=True)
        recorder = Recorder(lambda options: client.stream(**options))
        recorder.on_event = lambda: on_progress(recorder.num_ended, len(prompts))
        async with watching(target, access, recorder.rounds):
            is_complete = await recorder.run(prompts)
    return Recording(name, server, recorder.requests, recorder.rounds, is_complete)


@contextlib.asynccontextmanager
async def watching(target: str, access: Access, rounds: list[pb.WatchRoundsResponse]) -> AsyncIterator[None]:
    """Appends every round that the scheduler runs to `rounds`, from the entry on."""
    stub = pb_grpc.SchedulerServiceStub
    connection = Connection(target, stub, CHANNEL_OPTIONS, tls=access.tls, api_key=access.api_key)
    call = connection.stub.WatchRounds(pb.WatchRoundsRequest())

    async def read() -> None:
        async for round_ in call:
            rounds.append(round_)

    reading = asyncio.create_task(read())
    try:
        await call.initial_metadata()
        if call.done():  # refused
            await reading
        yield
        if reading.done():
            await reading
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise UnexpectedServer(f"{target} does not tell of its rounds: it is of an older version") from error
        raise error_from_rpc(error, target, connection.explain) from error
    finally:
        reading.cancel()
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await connection.close()

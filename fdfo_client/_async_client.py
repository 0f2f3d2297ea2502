"""The client. The blocking one is made from it: run `make sync-client` after a change of its methods."""

# ruff: noqa: ASYNC109 (a timeout here is a deadline that the server is told, so that it stops work too)

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from fdfo_client._channel import CHANNEL_OPTIONS, Connection, Tls, check_access, parse_targets
from fdfo_client._errors import (
    DeadlineExceeded,
    FdfoError,
    InvalidRequest,
    RequestFailed,
    ServerUnavailable,
    UnexpectedServer,
    error_from_rpc,
)
from fdfo_client._options import GenerateOptions, build_request
from fdfo_client._progress import Progress
from fdfo_client._retry import DEFAULT_RETRY, Attempts, RetryPolicy
from fdfo_client._timeout import Timeout, Watch
from fdfo_client._tracing import trace_metadata
from fdfo_client._types import Committed, Completion, Event, Finished, ServerInfo, Started, server_info_from_proto

_POLL_S = 0.1


class AsyncClient:
    """Talks to one or several schedulers from asyncio code. Use it in one event loop.

    target: "host:port", several of them as a list or with commas, or a gRPC name such as "dns:///schedulers:50051".
        Of a list, requests go to each in turn, past those that do not answer. A name with several addresses is
        balanced by gRPC itself; `abort` then reaches only one of them, so give a list where you need it.
    retry: how long to go on when a scheduler is lost or full.

    tls: connect with TLS, see `Tls`; None is plaintext.
    api_key: the key that schedulers may ask for, or the path of a file that holds it.

    Nothing is connected before the first call. All methods raise the errors of `FdfoError`. A client that no scheduler
    has ever answered does not wait for one: its target may be wrong (`wait_ready` waits).
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:50051",
        *,
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: Tls | None = None,
        api_key: str | Path | None = None,
    ) -> None:
        self._targets = parse_targets(target)
        self._retry = retry
        self._tls = tls
        self._api_key = api_key
        check_access(tls, api_key)
        self._was_answered = False
        self._sleeps: set[asyncio.Future[object]] = set()
        self._turn = random.randrange(len(self._targets))  # so that many small clients do not all begin with the first
        self._endpoints: list[Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The schedulers, as they were named."""
        return self._targets

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt` (plain text), `prompt_ids=` or `messages=`; exactly one of them.

        See `GenerateOptions` for the rest. A cancelled task, or an exception such as Ctrl-C, aborts the request.
        """
        if options.get("provisional_every_forwards") is not None:
            name = "provisional_every_forwards"
            raise InvalidRequest(f"{name}: only `stream` gives provisional events; leave it out", name)
        events = self.stream(prompt, **options)
        started: Started | None = None
        parts: dict[int, list[Committed]] = {}
        samples: dict[int, Completion] = {}
        async with contextlib.aclosing(events):
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Committed():
                        parts.setdefault(event.sample_index, []).append(event)
                    case Finished():
                        assert started is not None, "Progress refuses such a stream"
                        samples[event.sample_index] = _completion(
                            started, parts.get(event.sample_index, ()), event, options
                        )
        return dataclasses.replace(samples[0], others=tuple(samples[index] for index in range(1, len(samples))))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """The same, event by event: one `Started`, a `Committed` per group of done blocks, one `Finished` a sample;
        with `provisional_every_forwards`, a `Provisional` now and then while a block is incomplete.

        When a scheduler is lost in between, another one goes on: each token comes once (`Finished.resumes`).
        Leaving the loop early aborts the request; of an async generator, when it is closed (`contextlib.aclosing`).
        """
        request, timeout = build_request(prompt, options)
        return self._events(request, timeout, trace_metadata())

    async def abort(self, request_id: str, *, timeout: float | None = 10.0) -> bool:
        """End a request, of this client or another; its stream finishes with reason "abort".

        Returns whether it was live. All targets are asked, as a request may be at any.
        """
        answers = await asyncio.gather(
            *(self._abort_at(endpoint, request_id, timeout) for endpoint in self._connected()), return_exceptions=True
        )
        if any(answer is True for answer in answers):
            return True
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return False

    async def server_info(self, *, timeout: float | None = 10.0) -> ServerInfo:
        """What the server runs and how busy it is; all targets are asked, and the first that answers is taken."""
        return await _first_answer(self._info_of(endpoint, timeout) for endpoint in self._connected())

    async def wait_ready(self, timeout: float = 60.0) -> ServerInfo:
        """Wait until a scheduler answers and has a ready worker. Raises ServerUnavailable after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        problems: dict[str, str] = {}
        try:
            return await _first_answer(self._ready(endpoint, deadline, problems) for endpoint in self._connected())
        except ServerUnavailable:
            raise ServerUnavailable(f"not ready after {timeout:g} s: {'; '.join(problems.values())}") from None

    async def close(self) -> None:
        """End what is running and close the connections. May be called twice."""
        self._closed = True
        for sleep in tuple(self._sleeps):
            sleep.cancel()
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _events(
        self, request: pb.GenerateRequest, timeout: Timeout, metadata: tuple[tuple[str, str], ...]
    ) -> AsyncGenerator[Event, None]:
        deadline = None if timeout.total is None else time.monotonic() + timeout.total
        endpoints = self._in_turn()
        progress, attempts = Progress(request), Attempts(self._retry, len(endpoints), deadline)
        with Watch(timeout, self._sleep) as watch:
            for endpoint in itertools.cycle(endpoints):
                remaining = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                call = endpoint.stub.Generate(progress.next_request(), timeout=remaining, metadata=metadata)
                try:
                    with self._typed_errors(endpoint):
                        await watch.connect(call)
                        while (response := await watch.wait(call.read())) is not grpc.aio.EOF:
                            self._was_answered = True
                            event = progress.take(response, endpoint.target)
                            if event is not None:
                                yield event
                                watch.took(event)
                    if not progress.is_complete:
                        raise UnexpectedServer(f"{endpoint.target} ended the stream before Finished")
                    return
                except UnexpectedServer:
                    raise
                except FdfoError as error:
                    if progress.is_complete:  # the end of the call was lost, but nothing of the answer
                        return
                    if isinstance(error, DeadlineExceeded):
                        error.usage = tuple(usage for _, usage in sorted(progress.usage.items()))
                    delay_s = attempts.delay_s(error, progress, may_wait=self._was_answered)
                finally:
                    call.cancel()  # nothing, once the call has ended
                await watch.wait(self._pause(delay_s))

    async def _pause(self, delay_s: float) -> None:
        """Wait, or until the client is closed."""
        pause = self._sleep(delay_s)
        try:
            await asyncio.wait({pause})
        finally:
            pause.cancel()
        if self._closed:
            raise RequestFailed("the client was closed during the call", "CANCELLED")

    def _sleep(self, seconds: float) -> asyncio.Future[object]:
        """Done after so long, or cancelled when the client is closed."""
        sleep = asyncio.ensure_future(self._retry.sleep(seconds))
        self._sleeps.add(sleep)
        sleep.add_done_callback(self._sleeps.discard)
        return sleep

    async def _info_of(self, endpoint: Connection, timeout: float | None) -> ServerInfo:
        with self._typed_errors(endpoint):
            info = await endpoint.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout)
        self._was_answered = True
        return server_info_from_proto(info)

    async def _ready(self, endpoint: Connection, deadline: float, problems: dict[str, str]) -> ServerInfo:
        """Wait for this one. `problems` has, by target, why it is not ready."""
        while True:
            try:
                info = await self._info_of(endpoint, max(deadline - time.monotonic(), 0.001))
                if any(worker.ready for worker in info.workers):
                    return info
                problem = f"{endpoint.target} answers, but has no ready worker"
                problem += "".join(f"; {worker.target}: {worker.last_error}" for worker in info.workers)
            except (ServerUnavailable, DeadlineExceeded) as error:
                problem = str(error)
            problems[endpoint.target] = problem
            if time.monotonic() + _POLL_S > deadline:
                raise ServerUnavailable(problem)
            await self._pause(_POLL_S)

    async def _abort_at(self, endpoint: Connection, request_id: str, timeout: float | None) -> bool:
        with self._typed_errors(endpoint):
            answer = await endpoint.stub.Abort(pb.AbortRequest(request_ids=[request_id]), timeout=timeout)
        return bool(answer.aborted)

    def _connected(self) -> list[Connection]:
        """The endpoints. Made on first use: a channel belongs to the event loop that runs when it is made."""
        if self._closed:
            raise RuntimeError("this client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for target in self.targets:
                stub, tls, api_key = pb_grpc.SchedulerServiceStub, self._tls, self._api_key
                self._endpoints.append(Connection(target, stub, CHANNEL_OPTIONS, tls=tls, api_key=api_key))
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop it was first used in; make one for each loop")
        return self._endpoints

    def _in_turn(self) -> list[Connection]:
        endpoints = self._connected()
        first = self._turn % len(endpoints)
        self._turn += 1
        return endpoints[first:] + endpoints[:first]

    @contextlib.contextmanager
    def _typed_errors(self, endpoint: Connection) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, endpoint.target, endpoint.explain) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also for a call that the server cancelled. A task that is itself being cancelled
            # must see it; any other would be taken for cancelled when it is not.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._ended_early(endpoint.target) from None

    def _ended_early(self, target: str) -> FdfoError:
        if self._closed:
            return RequestFailed("the client was closed during the call", "CANCELLED")
        return ServerUnavailable(f"the scheduler at {target} ended the call; send the request again")


async def _first_answer(works: Iterable[Awaitable[ServerInfo]]) -> ServerInfo:
    """Of those that run at once. When nobody answers the last error is raised; an error that is an answer, at once."""
    tasks = [asyncio.ensure_future(work) for work in works]
    failure: FdfoError | None = None
    try:
        for task in asyncio.as_completed(tasks):
            try:
                return await task
            except (ServerUnavailable, DeadlineExceeded) as error:
                failure = error
    finally:
        for unheard in tasks:
            unheard.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert failure is not None, "there is at least one target"
    raise failure


def _completion(
    started: Started, parts: Sequence[Committed], finished: Finished, options: GenerateOptions
) -> Completion:
    logprobs = tuple(value for part in parts for value in part.logprobs or ())
    steps = tuple(step for part in parts for step in part.first_unmask_steps or ())
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        finish_reason=finished.reason,
        usage=finished.usage,
        request_id=started.request_id,
        seed=started.seed,
        stop_token_id=finished.stop_token_id,
        stop_string=finished.stop_string,
        logprobs=logprobs if options.get("logprobs") else None,
        first_unmask_steps=steps if options.get("first_unmask_steps") else None,
        sample_index=finished.sample_index,
        resumes=finished.resumes,
    )

"""More load than a scheduler takes, over real connections on loopback."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
import torch
from google.rpc import error_details_pb2, status_pb2

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from tests.scheduler.in_memory import expected
from tests.security.services import Running, scheduler_and_worker
from tests.worker.scripted import ScriptedRunner
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

BURST = 2500  # gRPC drops some from 1000 calls on that wait, and all from 3000 on
BUFFER_BYTES = 400
# A client whose gRPC takes one message beyond what was read.
SLOW_CLIENT = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1))

Call = grpc.aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]


def generate(channel: grpc.aio.Channel, max_new_tokens: int, timeout_s: float | None = 20.0) -> Call:
    message = api.GenerateRequest(prompt_ids=api.TokenIds(ids=[5]), max_new_tokens=max_new_tokens)
    call: Call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(message, timeout=timeout_s)
    return call


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def has_no_row(running: Running) -> bool:
    return not any(session.rows for session in running.loop.sessions.values())


async def rest_of(call: Call) -> tuple[list[api.GenerateResponse], grpc.aio.AioRpcError | None]:
    events = []
    try:
        async for event in call:
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, error
    return events, None


def token_ids(events: list[api.GenerateResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.committed.token_ids]


def test_in_a_burst_each_call_gets_its_answer_or_when_to_come_back() -> None:
    """Thousands at one time: none is dropped, and a refusal has RetryInfo and ErrorInfo."""

    async def run() -> None:
        async with (
            scheduler_and_worker(max_queued_requests=4) as running,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            outcomes: Counter[str] = Counter()

            async def ask() -> None:
                events, error = await rest_of(generate(channel, 3, timeout_s=60.0))
                if error is None:
                    outcomes["answer"] += events[-1].HasField("finished")
                    return
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
                delay, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
                assert status.details[0].Unpack(delay) and 1 <= delay.retry_delay.seconds <= 60
                assert status.details[1].Unpack(info) and info.reason == "QUEUE_FULL"
                outcomes["refusal"] += 1

            await asyncio.gather(*(ask() for _ in range(BURST)))
            assert outcomes.total() == BURST and outcomes["answer"] >= 4
            assert running.scheduler.info().counters.requests_rejected == outcomes["refusal"] > 0
            await until(lambda: not running.scheduler.live)

    asyncio.run(run())


def test_a_client_that_stops_reading_is_parked_and_goes_on_when_it_reads() -> None:
    """What waits for it in the scheduler is bounded, another stream runs to its end, and no token is lost."""

    async def run() -> None:
        async with (
            scheduler_and_worker(max_stream_buffer_bytes=BUFFER_BYTES) as running,
            grpc.aio.insecure_channel(running.target, options=SLOW_CLIENT) as slow_channel,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            slow = generate(slow_channel, 900)
            events = aiter(slow)
            assert (await anext(events)).HasField("started")
            (stream,) = running.scheduler.live.values()
            await until(lambda: stream.is_parked)
            others, error = await rest_of(generate(channel, 900))
            assert error is None and token_ids(others) == expected(1, 900)
            assert stream.is_parked and stream.buffered_bytes < 2 * BUFFER_BYTES
            assert len(stream.samples[0].committed_ids) < 500
            assert token_ids([event async for event in events]) == expected(1, 900)

    asyncio.run(run())


def test_a_client_that_never_reads_loses_its_request() -> None:
    """Its row and its buffer are freed though nothing was read; when it reads at last, it gets ABORTED."""

    async def run() -> None:
        async with (
            scheduler_and_worker(max_stream_buffer_bytes=BUFFER_BYTES, slow_reader_timeout_s=0.1) as running,
            grpc.aio.insecure_channel(running.target, options=SLOW_CLIENT) as channel,
        ):
            call = generate(channel, 900)
            await until(lambda: running.scheduler.counters.times_parked)
            await until(lambda: not running.scheduler.live)
            await until(lambda: has_no_row(running))
            events, error = await rest_of(call)
            assert error is not None and error.code() is grpc.StatusCode.ABORTED
            assert error.details() == "the client read nothing for 0.1 s; send the request again"
            assert token_ids(events) == expected(1, len(token_ids(events)))

    asyncio.run(run())


def test_at_its_deadline_a_client_hears_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler ends the stream before the client's timer: usage, then DEADLINE_EXCEEDED; no row is left."""
    forward = ScriptedRunner.forward

    def slow_forward(runner: ScriptedRunner, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        time.sleep(0.005)
        return forward(runner, inputs, kv)

    monkeypatch.setattr(ScriptedRunner, "forward", slow_forward)

    async def run() -> None:
        async with scheduler_and_worker() as running, grpc.aio.insecure_channel(running.target) as channel:
            events, error = await rest_of(generate(channel, 900, timeout_s=0.3))
            assert error is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "what was done is in the messages before" in (error.details() or "")
            usage = events[-1].interrupted.usage
            assert usage.completion_tokens == len(token_ids(events)) > 0 and usage.forwards > 0
            await until(lambda: has_no_row(running))

    asyncio.run(run())

"""What is too large is refused before it costs much, and disturbs nobody."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo_client import AsyncClient, RequestFailed
from tests.security.services import scheduler_and_worker


def test_too_much_is_refused_and_others_go_on() -> None:
    """Of a message over the limit, metadata over the limit and too many ids to abort, each gets its own error, while a
    request beside them runs to its end."""

    async def run() -> None:
        async with (
            scheduler_and_worker() as running,
            AsyncClient(running.target) as client,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            good = asyncio.create_task(client.generate(prompt_ids=[30], max_new_tokens=200, timeout=20))
            with pytest.raises(RequestFailed, match="too large"):
                await client.generate("a" * 5_000_000)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetServerInfo(api.GetServerInfoRequest(), metadata=(("x", "y" * 100_000),))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Abort(api.AbortRequest(request_ids=["r"] * 4097))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "request_ids: must have at most 4096 ids; it has 4097"
            assert len((await good).token_ids) == 200

    asyncio.run(run())


def test_nesting_without_end_is_refused() -> None:
    """A message of groups in groups does not reach the service."""

    async def run() -> None:
        async with scheduler_and_worker() as running, grpc.aio.insecure_channel(running.target) as channel:
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                "/fdfo.scheduler.v1.SchedulerService/Generate"
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xfb\x07" * 1_000_000 + b"\xfc\x07" * 1_000_000).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not running.scheduler.live
            async with AsyncClient(running.target) as client:
                assert (await client.generate(prompt_ids=[5], max_new_tokens=3)).token_ids

    asyncio.run(run())

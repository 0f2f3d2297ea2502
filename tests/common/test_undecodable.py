"""Bytes that are no message, at a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from common.grpc_server import GrpcService


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_undecodable_bytes_are_an_invalid_argument(method: str) -> None:
    """With one reply or many: INVALID_ARGUMENT with the field `request`, and the next good call is served."""

    async def scenario() -> grpc.aio.AioRpcError:
        service = GrpcService("127.0.0.1", 0, [])
        port = await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            streams: Any = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await streams(b"\xff\xff\xff", timeout=5).read()
            answer = await streams(b"", timeout=5).read()
            assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING
        await service.stop(0)
        return failure.value

    error = asyncio.run(scenario())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    assert detail.field_violations[0].field == "request"

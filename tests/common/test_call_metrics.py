"""The series of a gRPC server and the HTTP port they are read from."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from common.call_metrics import CallMetrics
from common.errors import AlreadyLive, ServiceError, abort_with
from common.grpc_server import GrpcService
from common.metrics import OnEventLoop, gauge, listen, new_registry
from common.security_settings import SecuritySettings
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc

NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """One method for each way in which a call ends."""

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetWorkerInfoResponse()

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        await abort_with(context, AlreadyLive("a"))

    async def RunRound(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise ValueError("a bug")

    async def ReleaseRequests(self, request: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.Event().wait()


def _serving(
    use: Callable[[Any, grpc.aio.Channel], Awaitable[None]], security: SecuritySettings | None = None
) -> CollectorRegistry:
    """What was counted while `use` called a server."""
    registry = CollectorRegistry()
    now = iter(range(0, 1000, 2))

    async def run() -> None:
        metrics = CallMetrics(registry, lambda: float(next(now)))
        service = GrpcService("127.0.0.1", 0, [NAME], security=security, call_metrics=metrics)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Servicer(), service.server)
        port = await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await use(worker_pb2_grpc.WorkerServiceStub(channel), channel)
        await service.stop(0)

    asyncio.run(run())
    return registry


def _handled(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Ended calls by method and status."""
    return {
        (sample.labels["grpc_method"], sample.labels["grpc_code"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "grpc_server_handled_total"
    }


def test_calls_are_counted_by_how_they_end() -> None:
    """A reply, a status of ours, a bug, a call given up by its client, and a stream of replies each have their code."""

    async def use(stub: Any, channel: grpc.aio.Channel) -> None:
        await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        for call in (stub.Heartbeat(pb.HeartbeatRequest()), stub.RunRound(pb.RunRoundRequest())):
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ReleaseRequests(pb.ReleaseRequestsRequest(), timeout=0.2)
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        listing = make_stub(channel).ServerReflectionInfo()
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await listing.done_writing()
        assert len([reply async for reply in listing]) == 1
        health: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service="unknown"))

    registry = _serving(use)
    assert _handled(registry) == {
        ("GetWorkerInfo", "OK"): 2,
        ("Heartbeat", "AlreadyExists"): 1,
        ("RunRound", "Unknown"): 1,
        ("ReleaseRequests", "Canceled"): 1,
        ("ServerReflectionInfo", "OK"): 1,
        ("Check", "NotFound"): 1,
    }
    labels = {"grpc_type": "unary", "grpc_service": NAME, "grpc_method": "GetWorkerInfo"}
    assert registry.get_sample_value("grpc_server_started_total", labels) == 2
    assert registry.get_sample_value("grpc_server_handling_seconds_sum", labels) == 4, "two seconds each"
    labels = {"grpc_type": "bidi_stream", "grpc_method": "ServerReflectionInfo"}
    assert registry.get_sample_value(
        "grpc_server_started_total", labels | {"grpc_service": "grpc.reflection.v1alpha.ServerReflection"}
    )


def test_refused_keys_are_counted_and_made_up_methods_are_not(tmp_path: Path) -> None:
    """A refusal before the servicer has its code; a name that a caller thinks up never becomes a label."""
    keys = tmp_path / "keys"
    keys.write_text("a:0123456789abcdef0123\n")

    async def use(stub: Any, channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        for path in ("/made.up/Method", f"/{NAME}/MadeUp", "/x"):
            call: Any = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"")

    registry = _serving(use, SecuritySettings(api_keys_file=keys))
    assert _handled(registry) == {("GetWorkerInfo", "Unauthenticated"): 1}


def test_a_scrape_reads_on_the_event_loop_and_has_the_process() -> None:
    """What a collector reads is read in the loop's thread, and the port serves it as text with the process's series."""

    async def run() -> str:
        loop = asyncio.get_running_loop()
        registry = new_registry()
        registry.register(OnEventLoop(lambda: [gauge("a_thing", "It.", asyncio.get_running_loop() is loop)]))
        port = listen("127.0.0.1", 0, registry)

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                return str(page.read().decode())

        return await asyncio.to_thread(scrape)

    page = asyncio.run(run())
    assert "# TYPE a_thing gauge\na_thing 1.0\n" in page
    assert "process_resident_memory_bytes" in page


def test_a_metrics_port_in_use_is_told() -> None:
    """One line that names the flag, the address and what to do."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServiceError, match=f"--metrics-port: .* 127.0.0.1:{port}: Address already in use; choose"):
            listen("127.0.0.1", port, CollectorRegistry())

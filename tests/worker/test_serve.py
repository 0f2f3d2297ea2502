"""A worker from its start to its end: what probes hear while the model loads, and what its metrics say."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from common.errors import refusal_reason
from common.model_folder import ModelFolderError
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from tests.scheduler.in_memory import FOLDER
from tests.worker.scripted import BLOCK, effort, make_loop, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.server import SERVICE_NAME
from worker_svc.service import serve
from worker_svc.settings import WorkerSettings

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIMIT_S = 20.0


class _Worker:
    """`serve` in this process. Its model is there when `may_load` is set, or `error` in its place."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_load = threading.Event()
        self.error = error
        self.loop = make_loop()
        self.logged: dict[str, dict[str, str]] = {}  # fields by event

    def load(self) -> DenoiseLoop:
        assert self.may_load.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self.loop

    def play(self, scene: Callable[[asyncio.Task[int]], Awaitable[None]]) -> None:
        """Run `scene` while it serves; afterwards SIGTERM ends it."""

        async def run() -> None:
            settings = WorkerSettings(model_path=Path("m"), port=0, metrics_port=0)
            serving = asyncio.create_task(serve(settings, FOLDER, self.load))
            async with asyncio.timeout(LIMIT_S):
                await self.until_it_says("loading")
                async with grpc.aio.insecure_channel(self.logged["loading"]["target"]) as channel:
                    self.stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
                    self._health: Any = health_pb2_grpc.HealthStub(channel)
                    await scene(serving)
                if not serving.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert await serving == 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("worker_svc.service.log.info", lambda event, **fields: self.logged.update({event: fields}))
            try:
                asyncio.run(run())
            finally:
                self.may_load.set()

    async def until_it_says(self, event: str) -> None:
        while event not in self.logged:
            await asyncio.sleep(0.001)

    async def health(self) -> tuple[int, int]:
        """Liveness and readiness."""
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE_NAME)]
        live, ready = [(await self._health.Check(request)).status for request in requests]
        return live, ready

    async def page(self) -> str:
        """What Prometheus reads."""

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{self.logged['loading']['metrics']}/metrics", timeout=LIMIT_S) as page:
                return str(page.read().decode())

        return await asyncio.to_thread(scrape)


def test_while_the_model_loads_it_lives_and_is_not_ready() -> None:
    """Probes and scrapes are answered, calls are refused with the reason; then it is ready and serves."""
    worker = _Worker()

    async def scene(serving: asyncio.Task[int]) -> None:
        assert await worker.health() == (SERVING, NOT_SERVING)
        for call in (
            worker.stub.GetWorkerInfo(pb.GetWorkerInfoRequest()),
            worker.stub.RunRound(pb.RunRoundRequest()),
            worker.stub.Heartbeat(pb.HeartbeatRequest()),
            worker.stub.ReleaseRequests(pb.ReleaseRequestsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="loading its model") as refused:
                await call
            assert refusal_reason(refused.value) == "EPOCH_CHANGED"
        assert "fdfo_worker_slots_max" not in await worker.page()
        worker.may_load.set()
        await worker.until_it_says("serving")
        assert await worker.health() == (SERVING, SERVING)
        assert (await worker.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())).worker_epoch == worker.loop.epoch

    worker.play(scene)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_signal_ends_it_in_every_phase(is_loaded: bool) -> None:
    """SIGTERM while the model loads does not wait for it; afterwards it drains. Status 0 either way."""
    worker = _Worker()

    async def scene(serving: asyncio.Task[int]) -> None:
        if is_loaded:
            worker.may_load.set()
            await worker.until_it_says("serving")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0

    worker.play(scene)


def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    """What loading raises comes out of `serve`."""
    worker = _Worker(ModelFolderError("no such folder"))

    async def scene(serving: asyncio.Task[int]) -> None:
        worker.may_load.set()
        with pytest.raises(ModelFolderError, match="no such folder"):
            await serving

    worker.play(scene)


def test_series_of_a_round() -> None:
    """A round over two rows, one of them with a prompt of a block, is in the counters, histograms and gauges."""
    worker = _Worker()
    worker.may_load.set()

    async def scene(serving: asyncio.Task[int]) -> None:
        await worker.until_it_says("serving")
        request = pb.RunRoundRequest(
            scheduler_id="s",
            generation=2,
            worker_epoch=worker.loop.epoch,
            fingerprint="scripted",
            round_id=1,
            mode=pb.MODE_SYNC,
            starts=[start("a", [7] * BLOCK + effort(4)), start("b", effort(2))],
        )
        reply = await worker.stub.RunRound(request)
        assert reply.work.forwards == 4
        with pytest.raises(grpc.aio.AioRpcError):
            await worker.stub.Heartbeat(pb.HeartbeatRequest(scheduler_id="s", generation=1))
        await worker.stub.Heartbeat(pb.HeartbeatRequest(scheduler_id="s", generation=2))
        series = {
            (sample.name.removeprefix("fdfo_worker_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(await worker.page())
            for sample in family.samples
        }
        wanted = {
            ("slots_used",): 2,
            ("slots_max",): 4,
            ("kv_pages", "held"): 3,
            ("kv_pages", "free"): 61,
            ("kv_pages", "cached"): 0,
            ("kv_pages_max",): 64,
            ("kv_usage_ratio",): 3 / 64,
            ("rounds_waiting",): 0,
            ("schedulers",): 1,
            ("draining",): 0,
            ("stalled",): 0,
            ("rounds_total",): 1,
            ("forwards_total",): 4,
            ("row_forwards_total", "denoise"): 4 + 2,
            ("row_forwards_total", "waiting"): 2,
            ("row_forwards_total", "prefill"): 1,
            ("blocks_total",): 2,
            ("block_tokens_total",): 2 * BLOCK,
            ("prefill_tokens_total",): BLOCK,
            ("device_busy_seconds_total",): 0.004,
            ("expired_leases_total",): 0,
            ("refused_generations_total",): 1,
            ("round_forwards_sum",): 4,
            ("round_forwards_bucket", "3.0"): 0,
            ("round_forwards_bucket", "4.0"): 1,
            ("round_wait_seconds_count",): 1,
        }
        assert {name: series[name] for name in wanted} == pytest.approx(wanted)
        assert series["host_seconds_total",] >= 0

    worker.play(scene)

"""Rows of the failure table that need no other fault than a request or a model, against services as processes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import safetensors.torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RetryPolicy,
)
from tests.e2e.served import MODEL, POLL_S, ROOT, command, service

NOT_A_NUMBER = 300  # a text token whose embedding is not finite in the broken model
# A client whose gRPC takes one message beyond what was read.
SLOW_CLIENT = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler with short limits and a worker whose model gives no finite logits after one token."""
    folder = tmp_path_factory.mktemp("failures")
    model = folder / "model"
    shutil.copytree(MODEL, model)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.word_embeddings.weight"][NOT_A_NUMBER] = float("nan")
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    small = ("--max-running-requests", "4", "--max-total-tokens", "1024")
    limits = ("--max-queued-requests", "4", "--max-stream-buffer-bytes", "400")
    with (
        service(folder / "worker", "worker_svc", *small, model=model) as (_, worker),
        service(folder / "scheduler", "scheduler_svc", "--workers", worker, *limits, model=model) as (_, scheduler),
        Client(scheduler) as client,
    ):
        client.wait_ready(20)
        yield scheduler


def test_logits_that_are_not_finite_fail_their_request_alone(target: str) -> None:
    """An error that says so; requests beside it have the answers that they have without it."""

    async def run() -> None:
        async with AsyncClient(target) as client:

            async def good() -> str:
                return (await client.generate("Count from 3 to 7.", max_new_tokens=64)).text

            alone = await good()
            beside, *answers = await asyncio.gather(
                client.generate(prompt_ids=[5, NOT_A_NUMBER, 7], max_new_tokens=64),
                *(good() for _ in range(3)),
                return_exceptions=True,
            )
            assert isinstance(beside, RequestFailed) and "not finite" in str(beside)
            assert answers == [alone] * 3

    asyncio.run(run())


def test_what_can_never_fit_is_refused_at_once(target: str) -> None:
    """More tokens than the pool has: INVALID_ARGUMENT naming the limit, before any work."""
    with Client(target) as client, pytest.raises(InvalidRequest, match="1024"):
        client.generate(prompt_ids=[5] * 1000, max_new_tokens=200)


def test_a_full_queue_says_when_to_come_back(target: str) -> None:
    """A hundred at once, four rows and four places: answers, and refusals with a time; none waits in vain."""

    async def run() -> None:
        outcomes: Counter[str] = Counter()

        async def ask() -> None:
            try:
                await client.generate(prompt_ids=[5], max_new_tokens=64, ignore_eos=True)
                outcomes["answer"] += 1
            except Overloaded as error:
                outcomes["refusal"] += (error.retry_after_s or 0) >= 1

        async with AsyncClient(target, retry=RetryPolicy(max_retries=0)) as client:
            await asyncio.gather(*(ask() for _ in range(100)))
        assert outcomes["answer"] >= 4 and outcomes.total() == 100 and outcomes["refusal"] > 0

    asyncio.run(run())


def test_a_deadline_ends_the_work_and_tells_the_cost(target: str) -> None:
    """DEADLINE_EXCEEDED with usage; soon nothing of it runs."""
    with Client(target) as client:
        slow = {"threshold": 1.0}  # a position a step, so that it takes seconds
        with pytest.raises(DeadlineExceeded) as caught:
            client.generate(prompt_ids=[5], max_new_tokens=900, ignore_eos=True, algorithm_params=slow, timeout=0.5)
        assert caught.value.usage[0].forwards > 0
        _wait_until(lambda: client.server_info().running == 0)


def test_a_client_that_does_not_read_holds_up_itself_alone(target: str) -> None:
    """It is parked, another request runs to its end beside it, and it gets every token when it reads."""

    async def run() -> None:
        message = api.GenerateRequest(
            prompt_ids=api.TokenIds(ids=[5]), max_new_tokens=900, ignore_eos=True, request_id="slow"
        )
        async with grpc.aio.insecure_channel(target, options=SLOW_CLIENT) as channel, AsyncClient(target) as client:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(message)
            assert (await call.read()).HasField("started")
            while not (await client.server_info()).counters.times_parked:
                await asyncio.sleep(POLL_S)
            beside = await client.generate(prompt_ids=[6], max_new_tokens=200, ignore_eos=True)
            assert beside.usage.completion_tokens == 200
            count = 0
            while (event := await call.read()) is not grpc.aio.EOF:
                count += len(event.committed.token_ids)
            assert count == 900

    asyncio.run(asyncio.wait_for(run(), 30))


def test_no_worker_and_another_model_behind_the_address(tmp_path: Path) -> None:
    """A request waits until its deadline while nothing, or another model, is at the address, and the scheduler says
    which; when the right one is there the next request is answered."""
    with service(tmp_path / "first", "worker_svc") as (process, worker):
        process.terminate()
        process.wait(20)
    port = worker.rpartition(":")[2]
    with (
        service(tmp_path / "scheduler", "scheduler_svc", "--workers", worker) as (_, target),
        Client(target) as client,
        grpc.insecure_channel(target) as channel,
    ):
        assert not client.server_info().workers[0].ready
        with pytest.raises(DeadlineExceeded):
            client.generate("1 + 1?", timeout=0.5)
        other = ROOT / "models" / "simulated-h200-llada2-mini"
        with service(tmp_path / "other", "worker_svc", port=port, model=other):
            _wait_until(lambda: "another model" in client.server_info().workers[0].last_error)
            with pytest.raises(DeadlineExceeded):
                client.generate("1 + 1?", timeout=0.5)
        health: Any = health_pb2_grpc.HealthStub(channel)
        question = health_pb2.HealthCheckRequest(service="fdfo.scheduler.v1.SchedulerService")
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        _wait_until(lambda: health.Check(question).status == not_serving)
        with service(tmp_path / "right", "worker_svc", port=port):
            client.wait_ready(20)
            assert client.generate(messages=[{"role": "user", "content": "Count from 3 to 7."}]).text


def test_a_wrong_default_algorithm_ends_serve() -> None:
    """The scheduler says what is wrong once, and nothing is started again and again."""
    words = [word for word in command("--dllm-algorithm", "Nope") if word != "--exit-with-parent"]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, timeout=60, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("unknown algorithm 'Nope'") == 1
    assert ended.stderr.count("scheduler 0 ended with an error; it is above") == 1


def _wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)

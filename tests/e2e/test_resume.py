"""Two schedulers on one worker, as processes: what a client sees when one of them goes."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from fdfo.worker.v1 import worker_pb2, worker_pb2_grpc
from fdfo_client import AsyncClient, Client, DeadlineExceeded
from tests.e2e.served import POLL_S, Options, Stream, answers, problems, run_together, service


@dataclass
class Pair:
    """Two schedulers; the first is the one to lose."""

    first: subprocess.Popen[bytes]
    targets: tuple[str, str]
    worker: str


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with service(tmp_path_factory.mktemp("worker") / "log", "worker_svc", "--batch-invariant") as (_, target):
        yield target


@pytest.fixture
def pair(worker: str, tmp_path: Path) -> Iterator[Pair]:
    flags = ("--workers", worker, "--stop-grace-s", "0.1")
    schedulers = [service(tmp_path / name, "scheduler_svc", *flags) for name in ("first", "second")]
    with schedulers[0] as (first, one), schedulers[1] as (_, two):
        with Client([one, two]) as client:
            client.wait_ready()
        yield Pair(first, (one, two), worker)


def requests_of(count: int) -> list[Options]:
    """Greedy and seeded ones; hot ones give bytes that are no characters yet, and half of all have stop strings, which
    often only begin."""
    requests: list[Options] = []
    for index, prompt in enumerate(problems()[:count]):
        options: Options = {
            "messages": [{"role": "user", "content": prompt}],
            "max_new_tokens": 80 + index,
            "ignore_eos": True,
            "temperature": (0.0, 1.0, 2.0)[index % 3],
            "seed": index,
        }
        if index % 2:
            options["stop"] = ["the number", "="] if index % 4 == 1 else [" 7 7 7 never", "\ufffd\ufffd\ufffd\ufffd"]
        requests.append(options)
    return requests


async def run_until_text(
    client: AsyncClient, group: asyncio.TaskGroup, requests: Sequence[Options], num_with_text: int
) -> list[Stream]:
    """Begin them all, and wait until so many have text."""
    streams = [Stream() for _ in requests]
    for stream, options in zip(streams, requests, strict=True):
        group.create_task(stream.run(client, options))
    while not (all(s.started for s in streams) and sum(bool(s.groups) for s in streams) >= num_with_text):
        await asyncio.sleep(POLL_S)
    return streams


def wait_until_free(worker: str, limit_s: float) -> None:
    """Until the worker holds no slot and no page of any scheduler."""
    deadline = time.monotonic() + limit_s
    with grpc.insecure_channel(worker) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        while (info := stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=5)).slots_used or info.pages.held:
            assert time.monotonic() < deadline, info
            time.sleep(POLL_S)


def test_a_stopped_scheduler_hands_its_streams_on(pair: Pair) -> None:
    """SIGTERM: what is left after the grace time goes on at the other scheduler, to the end of the calm run. At a
    deadline a request ends with what it had cost. No page stays held."""
    # A token a forward: far more than the grace time.
    slow: Options = {
        "prompt": "Tell me a story about Zoe.",
        "max_new_tokens": 300,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 7,
        "algorithm_params": {"threshold": 1.0},
    }
    (calm,) = answers(run_together(pair.targets[1], [slow]))

    async def stop() -> Stream:
        async with asyncio.timeout(60), AsyncClient(pair.targets) as client, asyncio.TaskGroup() as group:
            client._turn = 0
            (stream,) = await run_until_text(client, group, [slow], 1)
            pair.first.terminate()
            async with AsyncClient(pair.targets[1]) as other:
                with pytest.raises(DeadlineExceeded) as caught:
                    await other.generate(**{**slow, "timeout": 0.3})
            (usage,) = caught.value.usage
            assert usage.prompt_tokens > 10
        return stream

    stream = asyncio.run(stop())
    assert stream.answer() == calm
    assert stream.finished[0].resumes == 1
    assert pair.first.wait(timeout=10) == 0
    wait_until_free(pair.worker, 5)


def test_a_killed_scheduler_loses_nothing(pair: Pair) -> None:
    """SIGKILL to one of two under 32 streams: all end as in the calm run, each token once."""
    requests = requests_of(32)
    calm = answers(run_together(pair.targets[1], requests))

    async def storm() -> list[Stream]:
        async with asyncio.timeout(60), AsyncClient(pair.targets) as client, asyncio.TaskGroup() as group:
            streams = await run_until_text(client, group, requests, 4)
            pair.first.kill()
        return streams

    streams = asyncio.run(storm())
    assert [stream.answer() for stream in streams] == calm
    assert {finish[2] for finish in calm} == {"stop", "length"}
    resumed = [stream for stream in streams if stream.finished[0].resumes]
    assert len(resumed) >= 8 and any(len(stream.groups) > 2 for stream in resumed)

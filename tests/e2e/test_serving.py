"""Both services as processes, in batch-invariant mode, so that answers may be compared token by token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fdfo_client import AsyncClient, Client, Finished, RequestExists, Started
from tests.e2e.served import (
    MODEL,
    POLL_S,
    ROOT,
    Options,
    Served,
    Stream,
    answers,
    command,
    epoch,
    problems,
    run_alone,
    run_in_threads,
    run_together,
    serving,
    wait_until_idle,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("fdfo") / "log", "--batch-invariant") as running:
        yield running


def chat(prompt: str) -> Options:
    return {"messages": [{"role": "user", "content": prompt}], "max_new_tokens": 64}


def mixed_requests(count: int) -> list[Options]:
    """Greedy and seeded ones, both algorithms, stop strings, short limits, prompts of one block and of many."""
    prompts = problems()
    requests: list[Options] = []
    for index, prompt in enumerate(prompts[:count]):
        options = chat(prompt)
        match index % 8:
            case 1:
                options.update(temperature=1.0, seed=index, top_k=40, top_p=0.9)
            case 2:
                options.update(algorithm="JointThreshold")
            case 3:
                options.update(stop=["."])
            case 4:
                options.update(max_new_tokens=1 + index % 40, ignore_eos=True)
            case 5:
                options = chat(" ".join(prompts[index : index + 12]))
            case 6:
                options.update(temperature=0.7, seed=index, min_p=0.05, algorithm="JointThreshold")
            case 7:
                options.update(stop=["=", "the number"], algorithm_params={"threshold": 0.6})
        requests.append(options)
    return requests


def long_requests(count: int) -> list[Options]:
    """Requests that end by their limit only: 200 tokens or more."""
    return [
        {
            "messages": [{"role": "user", "content": prompt}],
            "max_new_tokens": 200 + 3 * index,
            "ignore_eos": True,
            "temperature": 1.0 if index % 2 else 0.0,
            "seed": index,
        }
        for index, prompt in enumerate(problems()[:count])
    ]


def test_company_changes_nothing(served: Served) -> None:
    """64 mixed requests at once, and half of them from as many client threads, get the answers that they get one at a
    time; then no page is held and none is lost."""
    requests = mixed_requests(64)
    together = run_together(served.target, requests)
    wait_until_idle(served, 5)
    assert answers(together) == answers(run_alone(served.target, requests))
    assert answers(run_in_threads(served.target, requests[:32])) == answers(together[:32])
    assert {completion.finish_reason for completion in together} == {"stop", "length"}
    assert any(completion.stop_string is not None for completion in together)
    wait_until_idle(served, 5)


def test_samples_and_priorities_over_the_wire(served: Served) -> None:
    """Samples differ, the same seed gives them again in another class, and the first is what one alone would be."""
    # All at once, so that sums are drawn before what they are of is known.
    request: Options = {**chat("Start at 5: +3 -2 +9 -4 +1 +2 -3"), "algorithm_params": {"threshold": 0.0}}
    request |= {"temperature": 1.5, "seed": 3}
    with Client(served.target) as client:
        samples = client.generate(**request, n=3).samples
        again = client.generate(**request, n=3, priority=5).samples
        alone = client.generate(**request)
    assert [sample.sample_index for sample in samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in samples}) == 3
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in samples]
    assert alone.token_ids == samples[0].token_ids
    wait_until_idle(served, 5)


def test_who_looks_on_changes_nothing(served: Served) -> None:
    """Every other of 8 mixed requests sees its block after each forward; the answers of all are those of a run in
    which nobody does."""
    requests = mixed_requests(8)
    streams = [Stream() for _ in requests]

    async def look_on() -> None:
        async with asyncio.timeout(60), AsyncClient(served.target) as client, asyncio.TaskGroup() as group:
            for number, (stream, options) in enumerate(zip(streams, requests, strict=True)):
                looks = {} if number % 2 else {"provisional_every_forwards": 1}
                group.create_task(stream.run(client, {**options, **looks}))

    asyncio.run(look_on())
    assert [stream.answer() for stream in streams] == answers(run_together(served.target, requests))
    assert all(stream.num_provisional == 0 for stream in streams[1::2])
    assert sum(stream.num_provisional > 0 for stream in streams[::2]) >= 3  # one may end with its first forward
    wait_until_idle(served, 5)


def test_a_killed_worker_loses_nothing(served: Served) -> None:
    """SIGKILL to the worker under 32 streams: another is started, and all end as in the calm run, nothing doubled."""
    requests = long_requests(32)
    calm = answers(run_together(served.target, requests))
    assert served.worker_pid() == served.first_worker_pid

    async def stormy() -> tuple[list[Stream], int, int]:
        streams = [Stream() for _ in requests]
        async with asyncio.timeout(90), AsyncClient(served.target) as client:
            restarts = (await client.server_info()).counters.restarts
            async with asyncio.TaskGroup() as group:
                for stream, options in zip(streams, requests, strict=True):
                    group.create_task(stream.run(client, options))
                while not (all(s.started for s in streams) and any(s.groups for s in streams)):
                    await asyncio.sleep(POLL_S)
                committed = sum(bool(stream.groups) for stream in streams)
                assert not any(stream.finished for stream in streams)
                os.kill(served.worker_pid(), signal.SIGKILL)
            return streams, committed, (await client.server_info()).counters.restarts - restarts

    streams, committed, restarts = asyncio.run(stormy())
    assert 0 < committed < len(streams), "the kill came in mid-flight"
    assert [stream.answer() for stream in streams] == calm
    lengths = [sum(len(group.token_ids) for group in stream.groups) for stream in streams]
    assert lengths == [options["max_new_tokens"] for options in requests]
    assert restarts >= len(streams) // 2
    assert served.worker_pid() not in (0, served.first_worker_pid)
    wait_until_idle(served, 5)


def test_a_seed_is_a_promise(served: Served) -> None:
    """A seeded request at temperature 1 has the same tokens alone, among 16 others, and after a worker's restart."""
    # Unlike what the model learned, so that it is unsure and the draws decide.
    seeded: Options = {**chat("Tell me a story about Zoe."), "temperature": 1.0, "seed": 7}
    alone = run_alone(served.target, [seeded])
    assert answers(run_together(served.target, [*mixed_requests(16), seeded]))[16:] == answers(alone)
    other = run_alone(served.target, [{**seeded, "seed": 8}])
    assert other[0].token_ids != alone[0].token_ids, "the seed matters"
    before = epoch(served)
    os.kill(served.worker_pid(), signal.SIGKILL)
    assert answers(run_alone(served.target, [seeded])) == answers(alone)
    assert epoch(served) != before


def test_fdfo_and_sync_agree(served: Served, tmp_path: Path) -> None:
    """Eight requests of both algorithms have the same answers whether blocks leave early or wait for each other."""
    requests = mixed_requests(8)
    early = run_together(served.target, requests)
    with serving(tmp_path / "log", "--batch-invariant", "--no-dllm-fdfo") as lockstep:
        assert answers(run_together(lockstep.target, requests)) == answers(early)
        wait_until_idle(lockstep, 5)


CLIENT = """
import asyncio, sys
from fdfo_client import AsyncClient, Committed

async def one(client, index):
    options = dict(max_new_tokens=2000, ignore_eos=True, temperature=1.0, seed=index)
    async for event in client.stream(f"Count from {index} to 90.", **options):
        if isinstance(event, Committed):
            print("committed", flush=True)

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await asyncio.gather(*(one(client, index) for index in range(20)))

asyncio.run(main())
"""


def test_dead_clients_leave_nothing(served: Served) -> None:
    """Three times a client process with 20 streams is killed in mid-generation; within 5 s all is free again."""
    for _ in range(3):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, served.target], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT
        )
        assert client.stdout is not None
        with client.stdout:
            try:
                assert client.stdout.readline() == b"committed\n"
                assert client.poll() is None, "it is in mid-generation"
            finally:
                client.kill()
                client.wait()
        wait_until_idle(served, 5)


def test_abort_ends_one_request(served: Served) -> None:
    """abort() in mid-generation: one terminal event, reason "abort", and the slot is free; a second finds nothing."""

    async def scenario() -> None:
        async with asyncio.timeout(20), AsyncClient(served.target) as client:
            stream = Stream()
            options: Options = {"max_new_tokens": 2000, "ignore_eos": True, "request_id": "to be aborted"}
            task = asyncio.create_task(stream.run(client, {**chat("Count from 1 to 9."), **options}))
            while not stream.groups:
                assert not task.done(), "it ended by itself"
                await asyncio.sleep(POLL_S)
            assert await client.abort("to be aborted")
            await task
            assert [event.reason for event in stream.finished] == ["abort"]
            published = sum(len(group.token_ids) for group in stream.groups)
            assert stream.finished[0].usage.completion_tokens == published
            assert not await client.abort("to be aborted")

    asyncio.run(scenario())
    wait_until_idle(served, 5)


def test_an_id_is_live_once(served: Served) -> None:
    """A second request with a live id is refused with ALREADY_EXISTS; the first goes on, and the id is free after."""

    async def scenario() -> None:
        request: Options = {**chat(problems()[0]), "request_id": "twice", "max_new_tokens": 100, "ignore_eos": True}
        async with asyncio.timeout(20), AsyncClient(served.target) as client:
            async with contextlib.aclosing(client.stream(**request)) as first:
                assert isinstance(await anext(first), Started)
                with pytest.raises(RequestExists, match="twice"):
                    await client.generate(**request)
                last = [event async for event in first][-1]
            assert isinstance(last, Finished) and last.reason == "length"
            both = await asyncio.gather(client.generate(**request), client.generate(**request), return_exceptions=True)
            assert sorted(type(answer).__name__ for answer in both) == ["Completion", "RequestExists"]

    asyncio.run(scenario())


def test_health_and_reflection(served: Served) -> None:
    """Both services say SERVING, as a whole and by name, and list themselves, health and reflection."""
    for target, name in (
        (served.target, "fdfo.scheduler.v1.SchedulerService"),
        (served.worker_target, "fdfo.worker.v1.WorkerService"),
    ):
        with grpc.insecure_channel(target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", name):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
            (listed,) = make_stub(channel).ServerReflectionInfo(iter([question]), timeout=5)
            names = {service.name for service in listed.list_services_response.service}
            assert {name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    """`fdfo serve` on a truncated model file ends with status 1; one line names the file, without a traceback."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    words = [word for word in command(model=model) if word != "--exit-with-parent"]
    ended = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "model.safetensors" in line]) == 1, ended.stderr

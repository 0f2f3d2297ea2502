"""Two workers and a scheduler as processes: one of the workers hangs, drains, or is ended by a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fdfo_client import AsyncClient, Client, RequestFailed, ServerInfo
from tests.e2e.served import POLL_S, Options, Served, Stream, answers, problems, run_together, serving
from worker_svc.fault_hook import KILL_TOKEN_ID

REQUESTS: list[Options] = [
    {"prompt": prompt, "max_new_tokens": 150 + index, "ignore_eos": True} for index, prompt in enumerate(problems()[:8])
]
Answers = list[tuple[object, ...]]
POISON = 257  # half of a character that nobody uses


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KILL_TOKEN_ID, str(POISON))
        flags = ("--workers", "2", "--batch-invariant", "--hang-timeout", "2")
        with serving(tmp_path_factory.mktemp("fdfo") / "log", *flags) as running:
            yield running


@pytest.fixture(scope="module")
def calm(served: Served) -> Answers:
    """The answers to REQUESTS when nothing happens."""
    return answers(run_together(served.target, REQUESTS))


def worker_pids(served: Served) -> set[int]:
    """The workers that live now, children of `fdfo serve`."""
    pids = set()
    for pid in Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"worker_svc" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.add(int(pid))
    return pids


async def until(client: AsyncClient, holds: Callable[[ServerInfo], bool], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds(await client.server_info()):
            await asyncio.sleep(POLL_S)


def both_ready(info: ServerInfo) -> bool:
    return [worker.ready for worker in info.workers] == [True, True]


def disturb(served: Served, fault: Callable[[AsyncClient], Awaitable[None]]) -> list[Stream]:
    """REQUESTS as streams, with the fault once a quarter of them has a first block."""

    async def run() -> list[Stream]:
        streams = [Stream() for _ in REQUESTS]
        async with asyncio.timeout(60), AsyncClient(served.target) as client:
            await until(client, both_ready)
            async with asyncio.TaskGroup() as group:
                for stream, options in zip(streams, REQUESTS, strict=True):
                    group.create_task(stream.run(client, options))
                while sum(bool(stream.groups) for stream in streams) < len(streams) // 4:
                    await asyncio.sleep(POLL_S)
                await fault(client)
        return streams

    return asyncio.run(run())


def wait_until_both_idle(served: Served) -> None:
    """Both workers are ready, and hold nothing."""

    def idle(info: ServerInfo) -> bool:
        return both_ready(info) and not (info.running or info.queued or any(w.pages_held for w in info.workers))

    async def wait() -> None:
        async with AsyncClient(served.target) as client:
            await until(client, idle, 25)

    asyncio.run(wait())


def test_a_stopped_worker_is_left_and_rejoins(served: Served, calm: Answers) -> None:
    """SIGSTOP to one worker: its streams end on the other, as in the calm run; after SIGCONT it is fenced, holds
    nothing of theirs, and is used again."""
    stopped = min(worker_pids(served))
    epochs: set[str] = set()

    async def fault(client: AsyncClient) -> None:
        epochs.update(worker.worker_epoch for worker in (await client.server_info()).workers)
        os.kill(stopped, signal.SIGSTOP)

    try:
        streams = disturb(served, fault)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [stream.answer() for stream in streams] == calm
    wait_until_both_idle(served)
    with Client(served.target) as client:
        assert {worker.worker_epoch for worker in client.server_info().workers} == epochs, (
            "the same life, a new generation"
        )
    assert answers(run_together(served.target, REQUESTS[:2])) == calm[:2]


def test_a_killed_and_a_drained_worker_lose_nothing(served: Served, calm: Answers) -> None:
    """SIGKILL to one worker and SIGTERM to the other a moment later: all streams end as in the calm run."""

    async def fault(client: AsyncClient) -> None:
        killed, drained = sorted(worker_pids(served))
        os.kill(killed, signal.SIGKILL)
        await until(client, lambda info: sum(worker.ready for worker in info.workers) == 1)
        os.kill(drained, signal.SIGTERM)

    streams = disturb(served, fault)
    assert [stream.answer() for stream in streams] == calm


def test_a_request_that_kills_every_worker_fails_alone(served: Served, calm: Answers) -> None:
    """It ends three workers and then fails with that reason; the streams beside it end as in the calm run."""

    async def fault(client: AsyncClient) -> None:
        with pytest.raises(RequestFailed, match="3 workers died under the request"):
            await client.generate(prompt_ids=[POISON], max_new_tokens=64)

    streams = disturb(served, fault)
    assert [stream.answer() for stream in streams] == calm
    assert "FDFO_TEST_KILL_TOKEN_ID is set" in served.log.read_text()

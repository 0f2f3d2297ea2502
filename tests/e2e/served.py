"""`fdfo serve` as a process of its own, and what the end-to-end tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fdfo.worker.v1 import worker_pb2, worker_pb2_grpc
from fdfo_client import AsyncClient, Client, Committed, Completion, Finished, Provisional, Started

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-llada2"
START_S = 40.0
POLL_S = 0.02

Options = dict[str, Any]  # of AsyncClient.generate


@dataclass(frozen=True)
class Served:
    """A running `fdfo serve` with one worker and one scheduler."""

    process: subprocess.Popen[bytes]
    target: str
    worker_target: str
    first_worker_pid: int
    log: Path
    openai: str = ""  # where OpenAI clients go, with --openai-port

    def worker_pid(self) -> int:
        """The worker that lives now, a child of `fdfo serve`; 0 while there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError):
                if b"worker_svc" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return 0


def command(*flags: str, model: Path = MODEL) -> list[str]:
    """`fdfo serve` on free ports; it ends when its standard input closes, so a test that dies leaves nothing."""
    words = ["serve", "--model-path", str(model), "--json", "--port", "0", "--exit-with-parent", *flags]
    return [sys.executable, "-m", "fdfo_client", *words]


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[Served]:
    """Start it, wait for its ready line, and end it with SIGTERM: status 0."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command(*flags), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT
        )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            assert select.select([process.stdout], [], [], START_S)[0], f"not ready in time: {log.read_text()}"
            line = process.stdout.readline()
            assert line, f"ended before it was ready: {log.read_text()}"
            ready: dict[str, Any] = json.loads(line)
            worker = ready["workers"][0]
            openai = ready.get("openai", "")
            yield Served(process, ready["targets"][0], worker["target"], worker["pid"], log, openai)
            process.terminate()
            assert process.wait(timeout=20) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def service(
    log: Path, module: str, *flags: str, port: str = "0", model: Path = MODEL
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One of the services, on a free port; it ends with the test. Its process and its target."""
    with service_ready(log, module, *flags, port=port, model=model) as (process, ready):
        yield process, ready["target"]


@contextlib.contextmanager
def service_ready(
    log: Path, module: str, *flags: str, port: str = "0", model: Path = MODEL
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """The same, with all that its ready line says."""
    words = ["--model-path", str(model), "--port", port, "--exit-with-parent", *flags]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
        )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            yield process, json.loads(line)
        finally:
            process.kill()
            process.wait()


def problems() -> list[str]:
    """The prompts that ship with the model."""
    return [json.loads(line)["prompt"] for line in (MODEL / "problems.jsonl").read_text().splitlines()]


def run_together(target: str, requests: Sequence[Options], limit_s: float = 60.0) -> list[Completion]:
    """All requests at once; their answers in order."""

    async def run() -> list[Completion]:
        async with asyncio.timeout(limit_s), AsyncClient(target) as client:
            return list(await asyncio.gather(*(client.generate(**options) for options in requests)))

    return asyncio.run(run())


def run_in_threads(target: str, requests: Sequence[Options], limit_s: float = 60.0) -> list[Completion]:
    """Each request from a thread with a client of its own, all at once; their answers in order."""

    def run(options: Options) -> Completion:
        with Client(target) as client:
            return client.generate(**options, timeout=limit_s)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(run, requests))


def run_alone(target: str, requests: Sequence[Options], limit_s: float = 60.0) -> list[Completion]:
    """One request at a time."""

    async def run() -> list[Completion]:
        async with asyncio.timeout(limit_s), AsyncClient(target) as client:
            return [await client.generate(**options) for options in requests]

    return asyncio.run(run())


def answers(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """What must not depend on the company: text, ids, and how it ended."""
    return [(c.text, c.token_ids, c.finish_reason, c.stop_token_id, c.stop_string) for c in completions]


def wait_until_idle(served: Served, limit_s: float) -> None:
    """Poll both services until nothing runs and no page is held, with all pages accounted for at every poll."""
    deadline = time.monotonic() + limit_s
    with Client(served.target) as client, grpc.insecure_channel(served.worker_target) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            info = client.server_info(timeout=5)
            worker = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=5)
            pages = worker.pages
            assert pages.total > 0
            assert pages.free + pages.cached + pages.held == pages.total
            state = (info.running, info.queued, pages.held, worker.slots_used)
            if state == (0, 0, 0, 0):
                return
            assert time.monotonic() < deadline, f"running, queued, held pages, slots: {state}"
            time.sleep(POLL_S)


def epoch(served: Served) -> str:
    with Client(served.target) as client:
        return client.server_info(timeout=5).workers[0].worker_epoch


class Stream:
    """One streamed request, gathered event by event."""

    def __init__(self) -> None:
        self.started = False
        self.groups: list[Committed] = []
        self.finished: list[Finished] = []
        self.num_provisional = 0

    async def run(self, client: AsyncClient, options: Options) -> None:
        async for event in client.stream(**options):
            match event:
                case Started():
                    self.started = True
                case Committed():
                    self.groups.append(event)
                case Provisional():
                    self.num_provisional += 1
                case Finished():
                    self.finished.append(event)

    def answer(self) -> tuple[object, ...]:
        (finished,) = self.finished
        text = "".join(group.text for group in self.groups)
        token_ids = tuple(token for group in self.groups for token in group.token_ids)
        return text, token_ids, finished.reason, finished.stop_token_id, finished.stop_string

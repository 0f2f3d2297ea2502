"""Workers, schedulers and delay proxies as processes of their own, for measurements."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.delay import start_delay
from fdfo_client import AsyncClient

ROOT = Path(__file__).resolve().parents[1]
SIMULATED = ROOT / "models" / "simulated-h200-llada2-mini"
TINY = ROOT / "models" / "tiny-llada2"
READY_S, STOP_S = 60.0, 20.0
PLAIN_COMMIT = ("--no-fused-commit",)
FUSED_COMMIT = ("--fused-commit",)


class Services:
    """Starts services on free ports of this machine. All of them end with the `with` block, or with this process.

    Workers stay for whoever asks for such a worker next; schedulers are those of one measurement.
    """

    def __init__(self, log: Path) -> None:
        """`log` gets what the services say on stderr."""
        self._log = log.open("ab")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: dict[tuple[Path, int, tuple[str, ...]], list[str]] = {}
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._log.close)

    def workers(self, model: Path, num_rows: int, count: int = 1, flags: tuple[str, ...] = PLAIN_COMMIT) -> list[str]:
        """The targets of `count` workers with so many rows each. Their blocks take the drawn forwards, commit included,
        unless other flags are given."""
        targets = self._workers.setdefault((model, num_rows, flags), [])
        words = ("worker_svc", "--model-path", str(model), "--port", "0", "--exit-with-parent")
        command = (*words, "--max-running-requests", str(num_rows), *flags)
        started = self._start([command] * (count - len(targets)))
        targets += [_ready_target(process) for process in started]
        return targets[:count]

    @contextlib.contextmanager
    def schedulers(self, model: Path, each: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[str]]:
        """A scheduler for each (targets of its workers, flags), with all its workers found; their targets."""
        words = ("scheduler_svc", "--model-path", str(model), "--port", "0", "--exit-with-parent")
        started = self._start([(*words, "--workers", ",".join(workers), *flags) for workers, flags in each])
        try:
            targets = [_ready_target(process) for process in started]
            asyncio.run(_wait_for_workers(targets))
            yield targets
        finally:
            self._stop(started)

    def delayed(self, target: str, delay_ms: float) -> str:
        """The same service behind a network with a one-way delay; itself for 0."""
        return self._stack.enter_context(start_delay(target, delay_ms)) if delay_ms else target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(list(self._processes))
        self._stack.close()

    def _stop(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            self._processes.remove(process)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self, commands: Sequence[Sequence[str]]) -> list[subprocess.Popen[bytes]]:
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", *words, "--log-level", "warning"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=ROOT,
                env=environment,
            )
            for words in commands
        ]
        self._processes += started
        return started


def _ready_target(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a service ended with status {process.wait()} before it was ready; see the log")
    target = json.loads(line)["target"]
    assert isinstance(target, str)
    return target


async def _wait_for_workers(targets: Sequence[str]) -> None:
    async with asyncio.timeout(READY_S):
        for target in targets:
            async with AsyncClient(target) as client:
                info = await client.wait_ready(READY_S)
                while not all(worker.ready for worker in info.workers):
                    await asyncio.sleep(0.05)
                    info = await client.server_info()

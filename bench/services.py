"""Workers, schedulers and delay proxies as processes of their own, for measurements."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
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
# Blocks take the drawn forwards, and a run finds nothing of the run before.
PLAIN_COMMIT = ("--no-fused-commit", "--no-enable-prefix-caching")
FUSED_COMMIT = ("--fused-commit", "--no-enable-prefix-caching")
WITH_CACHE = ("--no-fused-commit", "--enable-prefix-caching")


class Services:
    """Starts services on free ports of this machine. All of them end with the `with` block, or with this process.

    Workers stay for whoever asks for such a worker next; schedulers are those of one measurement.
    """

    def __init__(self, log: Path) -> None:
        """`log` gets what the services say on stderr."""
        self._log = log.open("ab")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: dict[str, int] = {}  # by target
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
        targets += [self._ready_target(process) for process in started]
        return targets[:count]

    @contextlib.contextmanager
    def schedulers(self, model: Path, each: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[str]]:
        """A scheduler for each (targets of its workers, flags), with all its workers found; their targets."""
        words = ("scheduler_svc", "--model-path", str(model), "--port", "0", "--exit-with-parent")
        started = self._start([(*words, "--workers", ",".join(workers), *flags) for workers, flags in each])
        try:
            targets = [self._ready_target(process) for process in started]
            asyncio.run(_wait_for_workers(targets))
            yield targets
        finally:
            self._stop(started)

    def delayed(self, target: str, delay_ms: float) -> str:
        """The same service behind a network with a one-way delay; itself for 0."""
        return self._stack.enter_context(start_delay(target, delay_ms)) if delay_ms else target

    def cpu_ms(self, target: str) -> float:
        """CPU time of the process behind a target so far, all its threads together. Linux only."""
        fields = Path(f"/proc/{self._pids[target]}/stat").read_text().rpartition(")")[2].split()
        utime, stime = fields[11:13]
        return (int(utime) + int(stime)) * 1000 / os.sysconf("SC_CLK_TCK")

    def simulated(self, **costs: float) -> Path:
        """The folder of a simulated device with these costs instead of the shipped ones."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fdfo-bench-")), SIMULATED.name)
        shutil.copytree(SIMULATED, folder)
        config = json.loads((folder / "config.json").read_text())
        config["simulation"] |= costs
        (folder / "config.json").write_text(json.dumps(config))
        return folder

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

    def _ready_target(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a service ended with status {process.wait()} before it was ready; see the log")
        target = json.loads(line)["target"]
        assert isinstance(target, str)
        self._pids[target] = process.pid
        return target


async def _wait_for_workers(targets: Sequence[str]) -> None:
    async with asyncio.timeout(READY_S):
        for target in targets:
            async with AsyncClient(target) as client:
                info = await client.wait_ready(READY_S)
                while not all(worker.ready for worker in info.workers):
                    await asyncio.sleep(0.05)
                    info = await client.server_info()

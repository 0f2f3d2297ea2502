"""One child process of `fdfo serve`: started, watched, started again, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from common.settings import EXIT_WRONG_CONFIGURATION

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
# A child that ran for so long begins with the first delay again.
STEADY_S = 30.0
GRACE_S = 10.0


class ServeError(Exception):
    """A service ended before it was ready."""


class Child:
    """One service process. After its first start it is started again on its port whenever it ends."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        port: int,
        environment: Mapping[str, str],
        *,
        stderr: int | None = None,
        max_delay_s: float = MAX_DELAY_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stderr: a descriptor for its log (ours). max_delay_s: before a start; the first is at most that late too."""
        self.name = name
        self.target = ""
        self.models: dict[str, str] = {}  # a scheduler's: target by name, its own first
        self.pid = 0
        self.keeper: asyncio.Task[None] | None = None
        self.gave_up = asyncio.Event()  # it ended by itself with an error
        self._command = command
        self._port = port
        self._environment = environment
        self._stderr = stderr
        self._max_delay_s = max_delay_s
        self._sleep = sleep
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._ready_at: float | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """First start; returns when the service is ready. Raises ServeError when it ends before."""
        await self._launch()
        if self._ready_at is None:
            raise ServeError(f"{self.name} {await self._ending()} before it was ready; its error is above")
        self.keeper = asyncio.create_task(self._keep_alive())

    async def stop(self, hurry: asyncio.Event, grace_s: float = GRACE_S) -> None:
        """SIGTERM, then SIGKILL after the grace time or when hurry is set; returns when the process is gone."""
        if self.keeper is not None:
            self.keeper.cancel()
            await asyncio.gather(self.keeper, return_exceptions=True)
        if self._process is None:
            return
        ended = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task(hurry.wait())
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._process.terminate()
        await asyncio.wait({ended, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            if not hurry.is_set():
                say(f"{self.name} (pid {self.pid}) did not stop within {grace_s:g} s and is killed")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await ended
        if self._reader is not None:
            await self._reader

    async def _keep_alive(self) -> None:
        first_delay_s = min(FIRST_DELAY_S, self._max_delay_s)
        delay_s = first_delay_s
        while True:
            ending = await self._ending()
            if self._process is not None and (self._process.returncode or 0) > 0:
                self.gave_up.set()
            if self._process is not None and self._process.returncode == EXIT_WRONG_CONFIGURATION:
                raise ServeError(f"{self.name} {ending}, a wrong configuration; its error is above")
            if self._ready_at is not None and self._clock() - self._ready_at >= STEADY_S:
                delay_s = first_delay_s
            say(f"{self.name} (pid {self.pid}) {ending}; starting it again in {delay_s:g} s")
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, self._max_delay_s)
            await self._launch()

    async def _launch(self) -> None:
        """Start the process; returns when it is ready, or has closed its output because it ended."""
        self._ready_at = None
        self._process = await asyncio.create_subprocess_exec(
            *self._command(self._port),
            # We keep the other end of stdin and never write. When we are gone, however that came, the child reads the
            # end of it and stops.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._stderr,
            limit=2**20,  # bytes of a line
            env=dict(self._environment),
            # Out of the terminal's foreground group: Ctrl-C is ours, so that we can stop them in order.
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None, "it was asked for"
        ready: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(_read_output(self._process.stdout, ready))
        fields = await ready
        if fields is not None:
            self.target, self.models = fields["target"], fields.get("models", {})
            self._port = int(self.target.rpartition(":")[2])
            self._ready_at = self._clock()

    async def _ending(self) -> str:
        assert self._process is not None, "it was launched"
        status = await self._process.wait()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


async def _read_output(output: asyncio.StreamReader, ready: asyncio.Future[dict[str, Any] | None]) -> None:
    """Tell the fields of the child's ready line, or None when there was none; pass all else on to stderr."""
    try:
        async for line in output:
            fields = None if ready.done() else _fields_of(line)
            if fields is not None:
                ready.set_result(fields)
            else:
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
    finally:
        if not ready.done():
            ready.set_result(None)


def _fields_of(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    is_ready = isinstance(fields, dict) and fields.get("event") == "ready" and isinstance(fields.get("target"), str)
    return fields if is_ready else None


def say(line: str) -> None:
    """One line of ours among the children's log."""
    sys.stderr.write(f"fdfo serve: {line}\n")
    sys.stderr.flush()

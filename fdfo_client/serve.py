"""`fdfo serve`: workers and schedulers on this machine, as child processes that are started again when they die."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.settings import EXIT_WRONG_CONFIGURATION, add_flags, settings_from, to_argv
from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._channel import Tls, check_access
from fdfo_client._errors import FdfoError, InvalidRequest
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

MODEL_PATH = Path("models/tiny-llada2")
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
# A child that ran for so long begins with the first delay again.
STEADY_S = 30.0
GRACE_S = 10.0
PROGRESS_S = 2.0
POLL_S = 0.1

# Fields of the services' settings that `serve` fills itself.
_OWN_FIELDS = ("model_path", "port", "workers", "exit_with_parent")

NOTES = """\
Flags of the services are passed on; a flag that both know goes to both. A service that dies is started again at its
port. The log of all of them is on stderr. Ctrl-C stops everything, a second one at once.

Services run with OMP_WAIT_POLICY=PASSIVE and OMP_NUM_THREADS as --num-threads says, unless the environment sets them:
OpenMP threads that spin while they wait take the processor from the process beside them, and two such threads were ten
times slower than one.

examples:
  fdfo serve
  fdfo serve --workers 2 --port 50060
  fdfo serve --model-path /models/LLaDA2.0-mini --device cuda --dtype bfloat16
  fdfo serve --json --port 0 --no-dllm-fdfo"""


class ServeError(Exception):
    """A service ended before it was ready."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start. A command takes the port to listen on (0: any) and gives the words to run.

    scheduler_command takes the workers' targets too. stop_s: after SIGTERM, then a service is killed.
    """

    model_path: Path
    num_workers: int
    scheduler_ports: tuple[int, ...]
    worker_command: Callable[[int], Sequence[str]]
    scheduler_command: Callable[[int, Sequence[str]], Sequence[str]]
    environment: Mapping[str, str]
    access: Access = OPEN
    stop_s: float = GRACE_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of `fdfo serve`: its own, then those of both services, then those of each."""
    parser.add_argument(
        "--model-path", type=Path, default=default_model_path(), metavar="DIR", help="folder of the model (%(default)s)"
    )
    parser.add_argument(
        "--workers", dest="num_workers", type=_count, default=1, metavar="N", help="workers to start here (1)"
    )
    parser.add_argument(
        "--schedulers", dest="num_schedulers", type=_count, default=1, metavar="N", help="schedulers to start here (1)"
    )
    parser.add_argument(
        "--port",
        dest="first_port",
        type=_port,
        default=50051,
        metavar="P",
        help="port of the first scheduler, P+1 of the next and so on; 0 takes free ones (50051)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON when requests can be sent, no more")
    parser.add_argument(
        "--exit-with-parent", dest="stop_at_eof", action="store_true", help="stop when standard input closes"
    )
    of_schedulers = {field.name for field in dataclasses.fields(SchedulerSettings)}
    of_workers = {field.name for field in dataclasses.fields(WorkerSettings)}
    groups: list[tuple[str, type[SchedulerSettings] | type[WorkerSettings], set[str]]] = [
        ("both services", SchedulerSettings, of_schedulers & of_workers),
        ("the scheduler", SchedulerSettings, of_schedulers - of_workers),
        ("the worker", WorkerSettings, of_workers - of_schedulers),
    ]
    for title, settings, names in groups:
        others = {field.name for field in dataclasses.fields(settings)} - names
        add_flags(parser.add_argument_group(f"flags of {title}"), settings, skip=others | set(_OWN_FIELDS))


def plan_from(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """The plan that the parsed flags of `add_arguments` ask for."""
    worker = dataclasses.replace(settings_from(WorkerSettings, arguments), exit_with_parent=True)
    scheduler = dataclasses.replace(settings_from(SchedulerSettings, arguments), exit_with_parent=True)

    def worker_command(port: int) -> list[str]:
        return [sys.executable, "-m", "worker_svc", *to_argv(dataclasses.replace(worker, port=port))]

    def scheduler_command(port: int, targets: Sequence[str]) -> list[str]:
        settings = dataclasses.replace(scheduler, port=port, workers=",".join(targets))
        return [sys.executable, "-m", "scheduler_svc", *to_argv(settings)]

    first = arguments.first_port
    return Plan(
        model_path=arguments.model_path,
        num_workers=arguments.num_workers,
        scheduler_ports=tuple(first + index if first else 0 for index in range(arguments.num_schedulers)),
        worker_command=worker_command,
        scheduler_command=scheduler_command,
        environment={"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(worker.num_threads), **environment},
        access=_access(scheduler),
        stop_s=GRACE_S + scheduler.stop_grace_s,
    )


def _access(scheduler: SchedulerSettings) -> Access:
    """How all services here are reached: schedulers as workers, since certificate and keys go to both.

    Raises InvalidRequest for flags with which the scheduler would not reach its workers.
    """
    if scheduler.tls_cert_file and not scheduler.worker_tls_ca_file:
        raise InvalidRequest("--tls-cert-file goes to the workers too; add --worker-tls-ca-file for the way to them")
    if scheduler.api_keys_file and not scheduler.worker_api_key_file:
        raise InvalidRequest("--api-keys-file goes to the workers too; add --worker-api-key-file with one of the keys")
    tls = None
    try:
        if scheduler.worker_tls_ca_file:
            cert_file, key_file = scheduler.worker_tls_cert_file, scheduler.worker_tls_key_file
            tls = Tls(scheduler.worker_tls_ca_file, cert_file, key_file, scheduler.worker_tls_server_name)
        check_access(tls, scheduler.worker_api_key_file)
    except ValueError as error:
        raise InvalidRequest(f"--worker-tls-..., --worker-api-key-file: {error}") from None
    return Access(tls=tls, api_key=scheduler.worker_api_key_file)


def default_model_path(path: Path = MODEL_PATH) -> Path:
    """A model that ships: below the current folder, else beside this package in a checkout."""
    in_checkout = Path(__file__).resolve().parent.parent / path
    return in_checkout if in_checkout.is_dir() and not path.is_dir() else path


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status."""
    for module, extra in (("tokenizers", "scheduler"), ("torch", "worker")):
        if importlib.util.find_spec(module) is None:
            _say(f"the {extra} needs the package {module}; install the extra: pip install 'fdfo[{extra}]'")
            return 1
    plan = plan_from(arguments, os.environ)
    return asyncio.run(run(plan, as_json=arguments.json, stop_at_eof=arguments.stop_at_eof))


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
                _say(f"{self.name} (pid {self.pid}) did not stop within {grace_s:g} s and is killed")
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
            _say(f"{self.name} (pid {self.pid}) {ending}; starting it again in {delay_s:g} s")
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
        ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(_read_output(self._process.stdout, ready))
        target = await ready
        if target is not None:
            self.target = target
            self._port = int(target.rpartition(":")[2])
            self._ready_at = self._clock()

    async def _ending(self) -> str:
        assert self._process is not None, "it was launched"
        status = await self._process.wait()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


async def run(
    plan: Plan,
    *,
    as_json: bool,
    stop_at_eof: bool,
    workers_ready: Callable[[Sequence[str], int, Progress], Awaitable[None]] | None = None,
) -> int:
    """Start everything, say when requests can be sent, and keep it running until a signal. Returns the exit status.

    workers_ready waits until all workers are ready at all schedulers.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    _set_on_signals(stop, hurry)
    if stop_at_eof:
        _set_at_eof(stop)
    workers = [Child(f"worker {index}", plan.worker_command, 0, plan.environment) for index in range(plan.num_workers)]
    schedulers: list[Child] = []

    async def start() -> None:
        progress = Progress(f"loading {plan.model_path}")
        reporting = asyncio.create_task(progress.report()) if not as_json else None
        try:
            await _start_together(workers)
            targets = [worker.target for worker in workers]
            schedulers.extend(
                Child(f"scheduler {index}", lambda port: plan.scheduler_command(port, targets), port, plan.environment)
                for index, port in enumerate(plan.scheduler_ports)
            )
            await _start_together(schedulers)
            progress.what = "waiting for the scheduler to find its workers"
            ready = workers_ready or functools.partial(wait_for_workers, access=plan.access)
            targets = [scheduler.target for scheduler in schedulers]
            await _unless_one_gives_up(workers + schedulers, ready(targets, len(workers), progress))
        finally:
            if reporting is not None:
                reporting.cancel()

    try:
        if await _unless(stop, start()):
            print(_ready_json(schedulers, workers) if as_json else _ready_text(plan, schedulers, workers), flush=True)
            await _unless(stop, *(child.keeper for child in workers + schedulers if child.keeper is not None))
        return 0
    except ServeError as error:
        _say(str(error))
        return 1
    finally:
        for child in workers:  # a worker that ends while the schedulers stop is not started again
            if child.keeper is not None:
                child.keeper.cancel()
        for group in (schedulers, workers):
            await asyncio.gather(*(child.stop(hurry, plan.stop_s) for child in group))


async def _unless_one_gives_up(children: Sequence[Child], waiting: Awaitable[None]) -> None:
    """Wait. Raises ServeError when a service ends with an error meanwhile: it would do so again and again."""
    ready = asyncio.ensure_future(waiting)
    ends = {asyncio.create_task(child.gave_up.wait()): child for child in children}
    try:
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            if child.gave_up.is_set() and not ready.done():
                raise ServeError(f"{child.name} ended with an error; it is above")
        await ready
    finally:
        for task in (ready, *ends):
            task.cancel()


class Progress:
    """What is being waited for, said on stderr when it takes long."""

    def __init__(self, what: str) -> None:
        self.what = what

    async def report(self) -> None:
        """After two seconds, and then every five, say what is waited for."""
        started_at = time.monotonic()
        await asyncio.sleep(PROGRESS_S)
        while True:
            _say(f"{self.what} ... ({time.monotonic() - started_at:.0f} s)")
            await asyncio.sleep(5.0)


async def wait_for_workers(targets: Sequence[str], num_workers: int, progress: Progress, access: Access = OPEN) -> None:
    """Return when each of the schedulers says that all workers are ready."""
    for target in targets:
        async with AsyncClient(target, tls=access.tls, api_key=access.api_key) as client:
            while True:
                try:
                    workers = (await client.server_info()).workers
                except FdfoError as error:
                    progress.what = str(error)
                else:
                    waiting = [worker for worker in workers if not worker.ready]
                    if len(workers) >= num_workers and not waiting:
                        break
                    if errors := [f"{worker.target}: {worker.last_error}" for worker in waiting if worker.last_error]:
                        progress.what = f"waiting for workers: {'; '.join(errors)}"
                await asyncio.sleep(POLL_S)


async def _start_together(children: Sequence[Child]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(child.start())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _unless(stop: asyncio.Event, *work: Coroutine[Any, Any, None] | asyncio.Task[None]) -> bool:
    """Run work to its end, or until stop is set, whichever is first. Returns whether the work came first."""
    tasks = [asyncio.ensure_future(part) for part in work]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, *tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done - {stopped}:
        task.result()  # raises what the work raised
    return stopped not in done


async def _read_output(output: asyncio.StreamReader, ready: asyncio.Future[str | None]) -> None:
    """Tell the target of the child's ready line, or None when there was none; pass all else on to stderr."""
    try:
        async for line in output:
            target = None if ready.done() else _target_of(line)
            if target is not None:
                ready.set_result(target)
            else:
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
    finally:
        if not ready.done():
            ready.set_result(None)


def _target_of(line: bytes) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("event") != "ready":
        return None
    target = fields.get("target")
    return target if isinstance(target, str) else None


def _ready_json(schedulers: Sequence[Child], workers: Sequence[Child]) -> str:
    return json.dumps(
        {
            "event": "ready",
            "targets": [scheduler.target for scheduler in schedulers],
            "workers": [{"pid": worker.pid, "target": worker.target} for worker in workers],
        }
    )


def _ready_text(plan: Plan, schedulers: Sequence[Child], workers: Sequence[Child]) -> str:
    command = "fdfo" if shutil.which("fdfo") else f"{sys.executable} -m fdfo_client"
    targets = ",".join(scheduler.target for scheduler in schedulers)
    lines = [f"Serving {plan.model_path}"]
    lines += [f"  {child.name:<12} {child.target:<22} pid {child.pid}" for child in (*schedulers, *workers)]
    lines += ["Try", f'  {command} generate --target {targets} "Count from 3 to 7."', "Ctrl-C stops it."]
    return "\n".join(lines)


def _set_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Set stop at the first SIGTERM or SIGINT, hurry at the second."""

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _set_at_eof(stop: asyncio.Event) -> None:
    """Set stop when standard input closes. A thread, because epoll takes no file or /dev/null."""
    loop = asyncio.get_running_loop()

    def read_to_end() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=read_to_end, name="stdin", daemon=True).start()


def _say(line: str) -> None:
    print(f"fdfo serve: {line}", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to 256; for services elsewhere, run `python -m scheduler_svc` yourself"
        )
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535 - 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {65535 - 256}")
    return int(text)

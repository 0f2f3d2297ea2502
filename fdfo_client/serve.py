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
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.settings import add_flags, to_argv
from fdfo_client import openai_gateway
from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.child_process import GRACE_S, Child, ServeError, say
from fdfo_client.listening import why_taken
from fdfo_client.serve_settings import OWN_FIELDS, access_to, check_files, passed_on
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

MODEL_PATH = Path("models/tiny-llada2")
PROGRESS_S = 2.0
POLL_S = 0.1

NOTES = """\
Flags of the services are passed on; a flag that both know goes to both. So are variables such as FDFO_WORKER_PAGE_SIZE
and FDFO_SCHEDULER_LOG_LEVEL, where there is no flag. A service that dies is started again at its
port. The log of all of them is on stderr. Ctrl-C stops everything, a second one at once.

Services run with OMP_WAIT_POLICY=PASSIVE and OMP_NUM_THREADS as --num-threads says, unless the environment sets them:
OpenMP threads that spin while they wait take the processor from the process beside them, and two such threads were ten
times slower than one.

examples:
  fdfo serve
  fdfo serve --workers 2 --port 50060
  fdfo serve --model-path /models/LLaDA2.0-mini --device cuda --dtype bfloat16
  fdfo serve --openai-port 8000
  fdfo serve --json --port 0 --no-dllm-fdfo"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start. A command takes the port to listen on (0: any) and gives the words to run.

    scheduler_command takes the workers' targets too, and the ports of its further models if it has had some.
    gateway_command: of the gateway for OpenAI clients, from what it calls and its port; None = none.
    chosen_ports: those at `host` that are not left to the system, each with its flag.
    stop_s: after SIGTERM, then a service is killed.
    """

    model_path: Path
    num_workers: int
    scheduler_ports: tuple[int, ...]
    worker_command: Callable[[int], Sequence[str]]
    scheduler_command: Callable[[int, Sequence[str], Sequence[int]], Sequence[str]]
    environment: Mapping[str, str]
    gateway_command: Callable[[Sequence[str], int], Sequence[str]] | None = None
    gateway_port: int = 0
    host: str = "127.0.0.1"
    chosen_ports: Sequence[tuple[int, str]] = ()
    access: Access = OPEN
    stop_s: float = GRACE_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of `fdfo serve`: its own, then those of both services, then those of each."""
    parser.usage = "fdfo serve [--workers N] [--schedulers N] [--port P] [--json] [flags of the services]"
    parser.description = "Start workers and schedulers on this machine and keep them running."
    parser.epilog = NOTES
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
    parser.add_argument(
        "--openai-port",
        type=_port,
        metavar="P",
        help="start the gateway smg too, for OpenAI clients at http://HOST:P/v1; 0 takes a free one",
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
        add_flags(parser.add_argument_group(f"flags of {title}"), settings, skip=others | set(OWN_FIELDS))


def plan_from(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """The plan that the parsed flags of `add_arguments` ask for. Raises InvalidRequest."""
    worker, scheduler, environment = passed_on(arguments, environment)
    if scheduler.metrics_port:
        raise InvalidRequest("--metrics-port: the services here cannot share one; 0 gives each a free one, see the log")
    with_gateway = arguments.openai_port is not None
    if with_gateway:
        if scheduler.tls_cert_file or scheduler.api_keys_file:
            raise InvalidRequest(
                "--openai-port: the gateway has neither TLS nor a key; leave out --tls-cert-file and --api-keys-file"
            )
        scheduler = dataclasses.replace(scheduler, vllm_grpc=True)
    check_files(scheduler)

    def worker_command(port: int) -> list[str]:
        return [sys.executable, "-m", "worker_svc", *to_argv(dataclasses.replace(worker, port=port))]

    def scheduler_command(port: int, targets: Sequence[str], model_ports: Sequence[int]) -> list[str]:
        settings = dataclasses.replace(scheduler, port=port, workers=",".join(targets))
        if model_ports:
            settings = dataclasses.replace(settings, served_model_ports=",".join(map(str, model_ports)))
        return [sys.executable, "-m", "scheduler_svc", *to_argv(settings)]

    def gateway_command(targets: Sequence[str], port: int) -> list[str]:
        words = ["--host", scheduler.host, "--port", str(port), "--schedulers", *targets]
        return [sys.executable, "-m", "fdfo_client.openai_gateway", *words]

    first, gateway_port = arguments.first_port, arguments.openai_port or 0
    scheduler_ports = tuple(first + index if first else 0 for index in range(arguments.num_schedulers))
    ports = [(port, "--port") for port in scheduler_ports]
    ports += [(port, "--served-model-ports") for port in scheduler.model_ports]
    return Plan(
        model_path=arguments.model_path,
        num_workers=arguments.num_workers,
        scheduler_ports=scheduler_ports,
        worker_command=worker_command,
        scheduler_command=scheduler_command,
        environment={"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(worker.num_threads), **environment},
        gateway_command=gateway_command if with_gateway else None,
        gateway_port=gateway_port,
        host=scheduler.host,
        chosen_ports=[(port, flag) for port, flag in [*ports, (gateway_port, "--openai-port")] if port],
        access=access_to(scheduler),
        stop_s=GRACE_S + scheduler.stop_grace_s,
    )


def default_model_path(path: Path = MODEL_PATH) -> Path:
    """A model that ships: below the current folder, else beside this package in a checkout."""
    in_checkout = Path(__file__).resolve().parent.parent / path
    return in_checkout if in_checkout.is_dir() and not path.is_dir() else path


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status."""
    for module, extra in (("tokenizers", "scheduler"), ("torch", "worker")):
        if importlib.util.find_spec(module) is None:
            say(f"the {extra} needs the package {module}; install the extra: pip install 'fdfo[{extra}]'")
            return 1
    if arguments.openai_port is not None and (fault := openai_gateway.why_not()):
        say(fault)
        return 1
    plan = plan_from(arguments, os.environ)
    if fault := why_taken(plan.host, plan.chosen_ports):
        say(fault)
        return 1
    return asyncio.run(run(plan, as_json=arguments.json, stop_at_eof=arguments.stop_at_eof))


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
    gateways: list[Child] = []

    def scheduler(index: int, port: int) -> Child:
        def command(port: int) -> Sequence[str]:
            targets = [worker.target for worker in workers]
            return plan.scheduler_command(
                port, targets, [int(target.rpartition(":")[2]) for target in [*child.models.values()][1:]]
            )

        child = Child(f"scheduler {index}", command, port, plan.environment)
        return child

    async def start() -> None:
        progress = Progress(f"loading {plan.model_path}")
        reporting = asyncio.create_task(progress.report()) if not as_json else None
        try:
            await _start_together(workers)
            schedulers.extend(scheduler(index, port) for index, port in enumerate(plan.scheduler_ports))
            await _start_together(schedulers)
            progress.what = "waiting for the scheduler to find its workers"
            ready = workers_ready or functools.partial(wait_for_workers, access=plan.access)
            targets = [scheduler.target for scheduler in schedulers]
            await _unless_one_gives_up(workers + schedulers, ready(targets, len(workers), progress))
            if plan.gateway_command is not None:
                engines = [target for child in schedulers for target in child.models.values()]
                command = functools.partial(plan.gateway_command, engines)
                gateways.append(Child("gateway", command, plan.gateway_port, plan.environment))
                await _start_together(gateways)
        finally:
            if reporting is not None:
                reporting.cancel()

    try:
        if await _unless(stop, start()):
            say_ready = _ready_json if as_json else functools.partial(_ready_text, plan)
            print(say_ready(schedulers, workers, gateways), flush=True)
            children = workers + schedulers + gateways
            await _unless(stop, *(child.keeper for child in children if child.keeper is not None))
        return 0
    except ServeError as error:
        say(str(error))
        return 1
    finally:
        for child in workers + gateways:  # one that ends while the schedulers stop is not started again
            if child.keeper is not None:
                child.keeper.cancel()
        for group in (schedulers, workers + gateways):
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
            say(f"{self.what} ... ({time.monotonic() - started_at:.0f} s)")
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


def _ready_json(schedulers: Sequence[Child], workers: Sequence[Child], gateways: Sequence[Child]) -> str:
    fields: dict[str, Any] = {
        "event": "ready",
        "targets": [scheduler.target for scheduler in schedulers],
        "workers": [{"pid": worker.pid, "target": worker.target} for worker in workers],
    }
    for gateway in gateways:
        fields |= {"openai": f"http://{gateway.target}/v1", "models": list(schedulers[0].models)}
    return json.dumps(fields)


def _ready_text(plan: Plan, schedulers: Sequence[Child], workers: Sequence[Child], gateways: Sequence[Child]) -> str:
    command = typed_command(sys.argv[0])
    targets = ",".join(scheduler.target for scheduler in schedulers)
    lines = [f"Serving {plan.model_path}"]
    lines += [f"  {child.name:<12} {child.target:<22} pid {child.pid}" for child in (*schedulers, *workers, *gateways)]
    for gateway in gateways:
        lines.append(f"OpenAI clients: base_url http://{gateway.target}/v1, model {' or '.join(schedulers[0].models)}")
    lines += ["Try", f'  {command} generate --target {targets} "Count from 3 to 7."', "Ctrl-C stops it."]
    return "\n".join(lines)


def typed_command(program: str) -> str:
    """What to type for our command: as it was typed, if it was, from argv[0]."""
    if Path(program).name != "fdfo":
        return f"{shlex.quote(sys.executable)} -m fdfo_client"
    return "fdfo" if program == shutil.which("fdfo") else shlex.quote(program)


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

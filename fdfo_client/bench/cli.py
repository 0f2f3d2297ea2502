"""Flags and entry of `fdfo bench` and `fdfo replay`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.settings import add_flags, settings_from
from fdfo_client._access import ACCESS_ARGUMENTS, access_from
from fdfo_client._arguments import above_zero, number, output_file, output_file_or_dash, typed, whole
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import Measurement, World, connect, measure
from fdfo_client.bench.progress import progress
from fdfo_client.bench.report import Report, make_report, table, to_json
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import (
    LENGTHS_HELP,
    Item,
    Lengths,
    closed_items,
    dataset_options,
    parse_lengths,
    poisson_items,
    read_dataset,
    read_trace,
    synthetic_options,
    write_trace,
)
from fdfo_client.serve import default_model_path
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

# Of each extra, packages that tell whether it is installed.
EXTRA = {"bench": ("jinja2", "matplotlib", "numpy", "rich")}
VIRTUAL_EXTRAS = EXTRA | {"scheduler": ("structlog", "tokenizers"), "worker": ("torch",)}
SIMULATED_MODEL_PATH = Path("models/simulated-h200-llada2-mini")
# Settings of the services that mean nothing without addresses, logs and a device.
NOT_VIRTUAL = (
    "model_path",
    "host",
    "port",
    "workers",
    "log_format",
    "log_level",
    "exit_with_parent",
    "dtype",
    "device",
    "attention_backend",
    "batch_invariant",
    "num_threads",
    "tls_cert_file",
    "tls_key_file",
    "tls_client_ca_file",
    "api_keys_file",
    "worker_tls_ca_file",
    "worker_tls_cert_file",
    "worker_tls_key_file",
    "worker_tls_server_name",
    "worker_api_key_file",
)
DEFAULT_CONCURRENCY = 16
LONGEST_NETWORK_DELAY_MS = 2000  # beyond, a worker is taken for one that hangs
DEFAULT_REQUESTS = 100
DEFAULT_LENGTHS = "128"

BENCH_EXAMPLES = f"""\
A distribution DIST of token counts is {LENGTHS_HELP};
draws are rounded, at least 1, and cut where they would not fit the model's context.

examples:
  fdfo bench                                                  # 100 requests, 16 at a time
  fdfo bench --rate 8 --duration 60 --warmup 16               # Poisson arrivals, whatever the server answers
  fdfo bench --prompt-tokens lognormal:200,0.8 --output-tokens 32:256 --html report.html
  fdfo bench --dataset prompts.jsonl --temperature 0.8 --json -
  fdfo bench --record trace.jsonl && fdfo replay trace.jsonl --speed 2

exit status: 0 done, 1 failed or a request failed, 2 wrong usage, 130 cut short by Ctrl-C"""

REPLAY_EXAMPLES = """\
A trace has one JSON object a line: first {"fdfo_trace": 1}, then for each request "at_s", the seconds from the start at
which it is sent, and its options: "prompt", "prompt_ids" or "messages", "max_new_tokens", "seed" and so on.

examples:
  fdfo replay trace.jsonl
  fdfo replay trace.jsonl --speed 4 --html report.html --json report.json
  fdfo replay trace.jsonl --virtual-time                      # the services and a simulated device in this process
  fdfo replay trace.jsonl --virtual-time --no-dllm-fdfo --network-delay-ms 0.5

exit status: 0 done, 1 failed or a request failed, 2 wrong usage, 130 cut short by Ctrl-C"""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo bench`, but for --target, --algorithm, --param and --temperature, which `generate` has too."""
    add = parser.add_argument
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="N",
        help=f"closed loop: so many requests at a time, the next sent when one ended ({DEFAULT_CONCURRENCY})",
    )
    how.add_argument(
        "--rate", type=above_zero, metavar="R", help="open loop: R requests/s at Poisson times, however many run"
    )
    add(
        "--requests",
        type=whole(1),
        metavar="N",
        help=f"requests to send (with --duration: no limit; with --dataset: each line once; else {DEFAULT_REQUESTS})",
    )
    add("--duration", type=above_zero, metavar="S", help="send for S seconds, then wait for what is under way")
    add("--warmup", type=whole(0), default=0, metavar="N", help="requests before, that are not measured (0)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prompt-tokens",
        type=typed(parse_lengths),
        default=parse_lengths(DEFAULT_LENGTHS),
        metavar="DIST",
        help=f"lengths of prompts of random tokens ({DEFAULT_LENGTHS})",
    )
    what.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSONL: a line for each request with prompt, prompt_ids or messages, and any other option",
    )
    add(
        "--output-tokens",
        type=typed(parse_lengths),
        default=parse_lengths(DEFAULT_LENGTHS),
        metavar="DIST",
        help=f"max_new_tokens where a dataset says nothing; random prompts are answered in full ({DEFAULT_LENGTHS})",
    )
    add("--seed", type=whole(0), default=0, metavar="S", help="the same seed sends the same requests (0)")
    _add_output_arguments(parser)
    add("--record", type=output_file, metavar="FILE", help="write what was sent when, for `fdfo replay`")


def add_replay_arguments(parser: argparse.ArgumentParser, where: argparse._ActionsContainer) -> None:
    """The flags of `fdfo replay`, but for --target, which is one of the group `where`."""
    parser.add_argument("trace", type=Path, metavar="FILE", help="a trace, as `fdfo bench --record` writes it")
    parser.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="send X times faster (1)")
    _add_output_arguments(parser)
    where.add_argument(
        "--virtual-time",
        action="store_true",
        help="send to a scheduler and workers in this process whose device is simulated, under a clock that jumps: "
        "the same figures on every machine, and no wait; needs the extras scheduler and worker",
    )
    parser.set_defaults(virtual_flags=_add_virtual_arguments(parser))


def _add_virtual_arguments(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flags that need --virtual-time, by their names among the parsed arguments: there only where given."""
    group = parser.add_argument_group("with --virtual-time")
    group.add_argument(
        "--model-path",
        type=Path,
        metavar="DIR",
        help=f"folder of a simulated model ({default_model_path(SIMULATED_MODEL_PATH)})",
    )
    group.add_argument("--workers", dest="num_workers", type=whole(1), metavar="N", help="workers (1)")
    group.add_argument(
        "--network-delay-ms",
        type=_network_delay_ms,
        metavar="D",
        help="what each message between scheduler and worker takes, one way (0)",
    )
    of_scheduler = {field.name for field in dataclasses.fields(SchedulerSettings)}
    add_flags(group, SchedulerSettings, skip=NOT_VIRTUAL)
    add_flags(group, WorkerSettings, skip={*NOT_VIRTUAL, *of_scheduler})
    for action in group._group_actions:
        action.default = argparse.SUPPRESS
    return {action.dest: "/".join(action.option_strings) for action in group._group_actions}


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--timeout", type=above_zero, metavar="SECONDS", help="a request fails after so long (never)")
    add("--json", type=output_file_or_dash, metavar="FILE", help="write all figures as JSON; - is standard output")
    add("--html", type=output_file, metavar="FILE", help="write a page with figures, their definitions and plots")


def bench(arguments: argparse.Namespace) -> int:
    """`fdfo bench`."""
    _require(EXTRA)
    dataset: list[dict[str, Any]] | None = None
    if arguments.dataset is not None:
        dataset, left_out = read_dataset(arguments.dataset)
        if left_out:
            _say(f"{arguments.dataset}: no options, left out: {', '.join(sorted(left_out))}")
    report = asyncio.run(_bench(arguments, dataset))
    if arguments.record is not None:
        write_trace(arguments.record, recorded_items(report.measurement))
    return finish(report, arguments)


def replay(arguments: argparse.Namespace) -> int:
    """`fdfo replay`."""
    if not arguments.virtual_time:
        for name, flag in arguments.virtual_flags.items():
            if name in arguments:
                raise InvalidRequest(f"{flag}: goes with --virtual-time; give that too, or leave {flag} out", name)
    _require(VIRTUAL_EXTRAS if arguments.virtual_time else EXTRA)
    items = replay_items(read_trace(arguments.trace), arguments.speed, arguments.timeout)

    async def against(servers: contextlib.AbstractAsyncContextManager[World], settings: dict[str, Any]) -> Report:
        async with servers as world:
            measurement = await run(world, items, total=len(items), concurrency=None)
            return make_report("replay", settings, world, measurement)

    if arguments.virtual_time:
        report = run_virtually(against(*_virtual_servers(arguments)))
    else:
        report = asyncio.run(against(connect(arguments.target, access_from(arguments)), settings_of(arguments)))
    return finish(report, arguments)


def _virtual_servers(
    arguments: argparse.Namespace,
) -> tuple[contextlib.AbstractAsyncContextManager[World], dict[str, Any]]:
    """What the flags of --virtual-time ask for, and all flags as JSON has them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its tensors are too small here for more threads
    from common.logging import configure_logging
    from fdfo_client.bench.virtual import read_simulated_folder, virtual_world

    configure_logging("console", "warning")
    defaults = {"model_path": default_model_path(SIMULATED_MODEL_PATH), "num_workers": 1, "network_delay_ms": 0.0}
    given = argparse.Namespace(**defaults | vars(arguments))
    scheduler, worker = settings_from(SchedulerSettings, given), settings_from(WorkerSettings, given)
    servers = virtual_world(
        read_simulated_folder(given.model_path, scheduler),
        scheduler,
        worker,
        num_workers=given.num_workers,
        network_delay_ms=given.network_delay_ms,
    )
    every = dataclasses.asdict(worker) | dataclasses.asdict(scheduler) | vars(given)
    shown = {name: _plain(every[name]) for name in arguments.virtual_flags}
    return servers, settings_of(arguments) | shown | {"target": []}


async def _bench(arguments: argparse.Namespace, dataset: list[dict[str, Any]] | None) -> Report:
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = DEFAULT_REQUESTS if dataset is None else len(dataset)
    concurrency = arguments.concurrency or (DEFAULT_CONCURRENCY if arguments.rate is None else None)
    async with connect(arguments.target, access_from(arguments)) as world:
        options = _options(arguments, dataset, world)
        await warm_up(world, itertools.islice(options, arguments.warmup), concurrency or DEFAULT_CONCURRENCY)
        measured = itertools.islice(options, requests)
        items = (
            closed_items(measured)
            if arguments.rate is None
            else poisson_items(measured, arguments.rate, random.Random(f"arrivals {arguments.seed}"))
        )
        measurement = await run(world, items, total=requests, concurrency=concurrency, duration_s=arguments.duration)
        settings = settings_of(arguments) | {"concurrency": concurrency, "requests": requests}
        return make_report("bench", settings, world, measurement)


def _options(
    arguments: argparse.Namespace, dataset: list[dict[str, Any]] | None, world: World
) -> Iterator[dict[str, Any]]:
    """The requests' options without end; what a line of a dataset says goes before the flags."""
    context_length, rng = world.server.context_length, random.Random(arguments.seed)
    if dataset is None:
        _check_lengths(arguments.prompt_tokens, arguments.output_tokens, context_length)
        each = synthetic_options(
            arguments.prompt_tokens, arguments.output_tokens, world.server.num_tokens, context_length, rng
        )
    else:
        each = dataset_options(dataset, arguments.output_tokens, context_length, rng)
    flags = {
        "algorithm": arguments.algorithm,
        "algorithm_params": dict(arguments.param) if arguments.param else None,
        "temperature": arguments.temperature,
        "timeout": arguments.timeout,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    return (given | options for options in each)


def _check_lengths(prompt_tokens: Lengths, output_tokens: Lengths, context_length: int) -> None:
    """Refuse limits that do not fit the context. Distributions without one are cut instead."""
    most = (prompt_tokens.largest or 1) + (output_tokens.largest or 1)
    if most > context_length:
        raise InvalidRequest(
            f"--prompt-tokens {prompt_tokens}, --output-tokens {output_tokens}: {most} tokens do not fit the "
            f"context of {context_length}; give smaller ones"
        )


async def warm_up(world: World, options: Iterable[dict[str, Any]], concurrency: int) -> None:
    """Send these and wait for all of them. Raises FdfoError if one fails: the others would too."""
    with progress("warming up", None) as on_progress:
        load = Load(world.stream, on_progress)
        await load.run(closed_items(options), concurrency=concurrency)
    if failed := [record.error for record in load.records if record.error is not None]:
        raise FdfoError(f"{len(failed)} of {len(load.records)} requests of the warm-up failed: {failed[0]}")


async def run(
    world: World,
    items: Iterable[Item],
    *,
    total: int | None,
    concurrency: int | None,
    duration_s: float | None = None,
) -> Measurement:
    """Measure a load (see `Load.run`) with its progress on stderr; Ctrl-C cuts it short."""
    with progress("measuring", total) as on_progress:
        load = Load(world.stream, on_progress)
        with _on_interrupt(load.cut_short):
            return await measure(world, load, items, concurrency=concurrency, duration_s=duration_s)


def finish(report: Report, arguments: argparse.Namespace) -> int:
    """Write what the flags ask for, the table to standard output if nothing else goes there. The exit status."""
    as_json = json.dumps(to_json(report)) + "\n"
    print(as_json if arguments.json == "-" else "\n".join(table(report)) + "\n", end="", flush=True)
    if isinstance(arguments.json, Path):
        _write("--json", arguments.json, as_json)
    if arguments.html is not None:
        from fdfo_client.bench.page import render

        _write("--html", arguments.html, render(report))
    if report.measurement.was_cut_short:
        return 130
    return 1 if report.summary.requests_failed or not report.summary.requests_ok else 0


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FdfoError(f"{flag} {path}: {error.strerror}") from None


def replay_items(items: Iterable[Item], speed: float, timeout_s: float | None) -> list[Item]:
    """The items of a trace, sent `speed` times faster, each with this timeout if one is given."""
    timeout = {} if timeout_s is None else {"timeout": timeout_s}
    return [Item((item.at_s or 0.0) / speed, item.options | timeout) for item in items]


def recorded_items(measurement: Measurement) -> Iterator[Item]:
    """What was sent, at the times it was sent, with the seeds that the server drew."""
    for record in measurement.records:
        seed = {} if record.seed is None else {"seed": record.seed}
        yield Item(record.sent_at_s, record.options | seed)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as JSON has them."""
    others = ("command", "target", "virtual_flags", *ACCESS_ARGUMENTS)
    return {name: _plain(value) for name, value in vars(arguments).items() if name not in others} | {
        "target": list(arguments.target)
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path | Lengths) else value


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Call this on SIGINT, instead of what is usual."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _require(extras: Mapping[str, Iterable[str]]) -> None:
    """Raises FdfoError naming the extras of which a package is missing."""
    missing = [
        extra for extra, names in extras.items() if any(importlib.util.find_spec(name) is None for name in names)
    ]
    if missing:
        raise FdfoError(
            f"this command needs more than the client: install the extra: pip install 'fdfo[{','.join(missing)}]'"
        )


def _say(line: str) -> None:
    print(f"fdfo: {line}", file=sys.stderr, flush=True)


def _network_delay_ms(text: str) -> float:
    value = number(text)
    if not 0 <= value <= LONGEST_NETWORK_DELAY_MS:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to {LONGEST_NETWORK_DELAY_MS} milliseconds")
    return value

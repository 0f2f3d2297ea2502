"""`fdfo replay`: a recorded load, against servers or against simulated ones in this process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.settings import add_flags, settings_from
from fdfo_client._access import access_from
from fdfo_client._arguments import above_zero, number, whole
from fdfo_client._errors import InvalidRequest
from fdfo_client.bench.measure import World, connect
from fdfo_client.bench.report import Report, make_report
from fdfo_client.bench.running import EXTRA, add_output_arguments, finish, plain, require, run, settings_of
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import Item, read_trace
from fdfo_client.commands.flags import add_target
from fdfo_client.serve import default_model_path
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

VIRTUAL_EXTRAS = EXTRA | {"scheduler": ("structlog", "tokenizers"), "worker": ("torch",)}
SIMULATED_MODEL_PATH = Path("models/simulated-h200-llada2-mini")
# Settings of the services that mean nothing without addresses, logs and a device.
NOT_VIRTUAL = (
    "model_path",
    "host",
    "port",
    "workers",
    "metrics_port",
    "stall_timeout_s",
    "log_format",
    "log_level",
    "exit_with_parent",
    "dtype",
    "device",
    "tp_size",
    "mem_fraction_static",
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
    "otlp_traces_endpoint",
    "trace_sample_ratio",
)
LONGEST_NETWORK_DELAY_MS = 2000  # beyond, a worker is taken for one that hangs

EXAMPLES = """\
A trace has one JSON object a line: first {"fdfo_trace": 1}, then for each request "at_s", the seconds from the start at
which it is sent, and its options: "prompt", "prompt_ids" or "messages", "max_new_tokens", "seed" and so on.

examples:
  fdfo replay trace.jsonl
  fdfo replay trace.jsonl --speed 4 --html report.html --json report.json
  fdfo replay trace.jsonl --virtual-time                      # the services and a simulated device in this process
  fdfo replay trace.jsonl --virtual-time --no-dllm-fdfo --network-delay-ms 0.5

A request that failed makes the exit status 1; Ctrl-C cuts the load short and reports what there was."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo replay`."""
    parser.description = "Send the requests of a trace at its times, and measure as `fdfo bench` does."
    parser.epilog = EXAMPLES
    where = parser.add_mutually_exclusive_group()
    add_target(parser, where)
    parser.add_argument("trace", type=Path, metavar="FILE", help="a trace, as `fdfo bench --record` writes it")
    parser.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="send X times faster (1)")
    add_output_arguments(parser)
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


def main(arguments: argparse.Namespace) -> int:
    """`fdfo replay`."""
    if not arguments.virtual_time:
        for name, flag in arguments.virtual_flags.items():
            if name in arguments:
                raise InvalidRequest(f"{flag}: goes with --virtual-time; give that too, or leave {flag} out", name)
    require(VIRTUAL_EXTRAS if arguments.virtual_time else EXTRA)
    items = replay_items(read_trace(arguments.trace), arguments.speed, arguments.timeout)

    async def against(servers: contextlib.AbstractAsyncContextManager[World], settings: dict[str, Any]) -> Report:
        async with servers as world:
            measurement = await run(world, items, total=len(items), concurrency=None)
            return make_report("replay", settings, world, measurement)

    if arguments.virtual_time:
        report = run_virtually(against(*_virtual_servers(arguments, items)))
    else:
        report = asyncio.run(against(connect(arguments.target, access_from(arguments)), settings_of(arguments)))
    return finish(report, arguments)


def _virtual_servers(
    arguments: argparse.Namespace, items: Iterable[Item]
) -> tuple[contextlib.AbstractAsyncContextManager[World], dict[str, Any]]:
    """What the flags of --virtual-time ask for, and all flags as JSON has them. Raises InvalidRequest, also for a trace
    with token ids that the model has not."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its tensors are too small here for more threads
    from common.logging import configure_logging
    from fdfo_client.bench.virtual import read_simulated_folder, virtual_world

    configure_logging("console", "warning")
    defaults = {"model_path": default_model_path(SIMULATED_MODEL_PATH), "num_workers": 1, "network_delay_ms": 0.0}
    given = argparse.Namespace(**defaults | vars(arguments))
    scheduler, worker = settings_from(SchedulerSettings, given), settings_from(WorkerSettings, given)
    folder = read_simulated_folder(given.model_path, scheduler)
    largest_id = max((token for item in items for token in item.options.get("prompt_ids") or ()), default=0)
    if largest_id >= folder.vocab_size:
        raise InvalidRequest(
            f"{arguments.trace}: recorded with another model, has token id {largest_id} where {given.model_path} has "
            f"{folder.vocab_size} tokens; give --model-path a simulated model with the tokenizer of the recorded one"
        )
    servers = virtual_world(
        folder,
        scheduler,
        worker,
        num_workers=given.num_workers,
        network_delay_ms=given.network_delay_ms,
    )
    every = dataclasses.asdict(worker) | dataclasses.asdict(scheduler) | vars(given)
    shown = {name: plain(every[name]) for name in arguments.virtual_flags}
    return servers, settings_of(arguments) | shown | {"target": []}


def replay_items(items: Iterable[Item], speed: float, timeout_s: float | None) -> list[Item]:
    """The items of a trace, sent `speed` times faster, each with this timeout if one is given."""
    timeout = {} if timeout_s is None else {"timeout": timeout_s}
    return [Item((item.at_s or 0.0) / speed, item.options | timeout) for item in items]


def _network_delay_ms(text: str) -> float:
    value = number(text)
    if not 0 <= value <= LONGEST_NETWORK_DELAY_MS:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to {LONGEST_NETWORK_DELAY_MS} milliseconds")
    return value

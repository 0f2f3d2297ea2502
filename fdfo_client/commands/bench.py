"""`fdfo bench`: a load that is drawn or read from a file."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fdfo_client._access import access_from
from fdfo_client._arguments import above_zero, output_file, typed, whole
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import Measurement, World, connect
from fdfo_client.bench.progress import progress
from fdfo_client.bench.report import Report, make_report
from fdfo_client.bench.running import EXTRA, add_output_arguments, finish, require, run, settings_of
from fdfo_client.bench.workload import (
    LENGTHS_HELP,
    Item,
    Lengths,
    closed_items,
    dataset_options,
    parse_lengths,
    poisson_items,
    read_dataset,
    synthetic_options,
    write_trace,
)
from fdfo_client.commands.flags import add_algorithm, add_target, add_temperature

DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
DEFAULT_LENGTHS = "128"

EXAMPLES = f"""\
A distribution DIST of token counts is {LENGTHS_HELP};
draws are rounded, at least 1, and cut where they would not fit the model's context.

examples:
  fdfo bench                                                  # 100 requests, 16 at a time
  fdfo bench --rate 8 --duration 60 --warmup 16               # Poisson arrivals, whatever the server answers
  fdfo bench --prompt-tokens lognormal:200,0.8 --output-tokens 32:256 --html report.html
  fdfo bench --dataset prompts.jsonl --temperature 0.8 --json -
  fdfo bench --record trace.jsonl && fdfo replay trace.jsonl --speed 2

A request that failed makes the exit status 1; Ctrl-C cuts the load short and reports what there was."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo bench`."""
    parser.description = "Send many requests and measure throughput, latencies and what the server did for them."
    parser.epilog = EXAMPLES
    add_target(parser)
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
    add_output_arguments(parser)
    add("--record", type=output_file, metavar="FILE", help="write what was sent when, for `fdfo replay`")
    add_algorithm(parser)
    add_temperature(parser)


def main(arguments: argparse.Namespace) -> int:
    """`fdfo bench`."""
    require(EXTRA)
    dataset: list[dict[str, Any]] | None = None
    if arguments.dataset is not None:
        dataset, left_out = read_dataset(arguments.dataset)
        if left_out:
            print(f"fdfo: {arguments.dataset}: no options, left out: {', '.join(sorted(left_out))}", file=sys.stderr)
    report = asyncio.run(_bench(arguments, dataset))
    if arguments.record is not None:
        write_trace(arguments.record, recorded_items(report.measurement))
    return finish(report, arguments)


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


def recorded_items(measurement: Measurement) -> Iterator[Item]:
    """What was sent, at the times it was sent, with the seeds that the server drew."""
    for record in measurement.records:
        seed = {} if record.seed is None else {"seed": record.seed}
        yield Item(record.sent_at_s, record.options | seed)

"""`fdfo trace`: a run as a page and as a file for trace viewers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fdfo_client._access import ACCESS_ARGUMENTS, access_from, add_access_arguments
from fdfo_client._arguments import above_zero, output_file, typed, whole
from fdfo_client._channel import parse_targets
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.bench.workload import read_dataset
from fdfo_client.commands.flags import add_algorithm, add_temperature
from fdfo_client.local_services import local_services
from fdfo_client.serve import default_model_path
from fdfo_client.trace.page import TOTALS, TokenText, render
from fdfo_client.trace.record import Recording, record
from fdfo_client.trace.timeline import Timeline, timeline
from fdfo_client.trace.trace_events import trace_events

DEFAULT_ROWS = 4  # fewer than the prompts, so that one sees the next enter in the place of one that has ended
DEFAULT_MAX_NEW_TOKENS = 128
MODES = (("FDFO", "--dllm-fdfo"), ("sync", "--no-dllm-fdfo"))

EXAMPLES = """\
Without --target it starts services of its own on this machine, first with FDFO and then in lockstep, sends the same
prompts to both at once, and puts both on one time axis. Open the page in a browser; the other file at ui.perfetto.dev
or chrome://tracing. Neither asks the network for anything.

examples:
  fdfo trace                                                       # the small model that ships, 16 prompts, 4 rows
  fdfo trace --model-path models/simulated-h200-llada2-mini        # the times of an H200
  fdfo trace --dataset prompts.jsonl --max-running-requests 16
  fdfo trace --target 127.0.0.1:50051 --first 8 --html run.html    # one run, at a server that is there"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo trace`."""
    parser.description = "Record a run round by round: a lane for each answer, its blocks, and who waits for whom."
    parser.epilog = EXAMPLES
    add_access_arguments(parser)
    add_algorithm(parser)
    add_temperature(parser)
    add = parser.add_argument
    add(
        "--target",
        type=typed(_target),
        metavar="HOST:PORT",
        help="record one run at this scheduler, in whatever mode it is (start services here and compare both modes)",
    )
    add(
        "--model-path",
        type=Path,
        metavar="DIR",
        help=f"folder of the model to serve; with --target: whose tokens to show as text ({default_model_path()})",
    )
    add(
        "--max-running-requests",
        type=whole(1),
        metavar="N",
        help=f"rows of the worker that is started ({DEFAULT_ROWS})",
    )
    add(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSONL: a line for each request with prompt, prompt_ids or messages, and any other option (16 prompts)",
    )
    add("--first", type=whole(1), metavar="N", help="send the first N only (all)")
    add(
        "--max-new-tokens",
        type=whole(1),
        default=DEFAULT_MAX_NEW_TOKENS,
        metavar="N",
        help=f"where a line of the dataset says nothing ({DEFAULT_MAX_NEW_TOKENS})",
    )
    add("--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="a request fails after so long (120)")
    add("--html", type=output_file, default=Path("fdfo-trace.html"), metavar="FILE", help="the page (%(default)s)")
    add(
        "--trace-events",
        type=output_file,
        default=Path("fdfo-trace.json"),
        metavar="FILE",
        help="the file for trace viewers (%(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """`fdfo trace`."""
    prompts = prompts_of(arguments)
    if arguments.target is not None and arguments.max_running_requests is not None:
        raise InvalidRequest("--max-running-requests: the worker behind --target has its own; leave one of them out")
    if arguments.target is None and any(getattr(arguments, name) for name in ACCESS_ARGUMENTS):
        raise InvalidRequest("--tls..., --api-key-file: the services that are started here need none; give --target")
    recordings = asyncio.run(_at_target(arguments, prompts) if arguments.target else _compare(arguments, prompts))
    timelines = [timeline(recording) for recording in recordings]
    num_rows = sum(worker.max_rows for worker in recordings[0].server.workers)
    title = f"{len(prompts)} prompts to {recordings[0].server.served_model_name}, {num_rows} rows"
    _write("--html", arguments.html, render(timelines, title, _token_text(arguments)))
    _write("--trace-events", arguments.trace_events, json.dumps(trace_events(timelines), separators=(",", ":")))
    print("\n".join(table(timelines)))
    print(f"\n{arguments.html}: open it in a browser\n{arguments.trace_events}: open it at ui.perfetto.dev")
    failures = [request.error for recording in recordings for request in recording.requests if request.error]
    if failures:
        print(f"fdfo: {len(failures)} requests failed; the first: {failures[0]}", file=sys.stderr)
    return 1 if failures else 0


def table(timelines: Sequence[Timeline]) -> list[str]:
    """The totals of each run side by side, and what a reader must know."""
    width = max(12, *(len(each.name) + 2 for each in timelines))
    lines = [f"{'':<16}" + "".join(f"{each.name:>{width}}" for each in timelines)]
    for name, label, unit, digits, _ in TOTALS:
        values = [getattr(each.totals, name) * (100 if unit == "%" else 1) for each in timelines]
        lines.append(
            f"{f'{label} [{unit}]' if unit else label:<16}"
            + "".join(f"{value:>{width},.{digits}f}" for value in values)
        )
    lines += [f"{each.name}: {note}" for each in timelines for note in each.notes]
    return lines


def prompts_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What to send: the options of each request; those of the dataset go before the flags."""
    if arguments.dataset is None:
        with resources.as_file(resources.files("fdfo_client.trace").joinpath("prompts.jsonl")) as path:
            lines, left_out = read_dataset(path)
    else:
        lines, left_out = read_dataset(arguments.dataset)
    if left_out:
        print(f"fdfo: {arguments.dataset}: no options, left out: {', '.join(sorted(left_out))}", file=sys.stderr)
    if arguments.first is not None and arguments.first > len(lines):
        raise InvalidRequest(f"--first {arguments.first}: there are {len(lines)} prompts", "first")
    flags = {
        "algorithm": arguments.algorithm,
        "algorithm_params": dict(arguments.param) if arguments.param else None,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "timeout": arguments.timeout,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    return [given | {"seed": number} | line for number, line in enumerate(lines[: arguments.first])]


async def _at_target(arguments: argparse.Namespace, prompts: Sequence[dict[str, Any]]) -> list[Recording]:
    name = arguments.target
    progress = _progress(name)
    return [await record(name, name, prompts, access=access_from(arguments), on_progress=progress)]


async def _compare(arguments: argparse.Namespace, prompts: Sequence[dict[str, Any]]) -> list[Recording]:
    """The same prompts with each mode, by services that are started for it."""
    model = arguments.model_path or default_model_path()
    rows = arguments.max_running_requests or DEFAULT_ROWS
    recordings = []
    for name, flag in MODES:
        _say(f"{name}: starting a worker with {rows} rows for {model}")
        async with local_services("--model-path", str(model), "--max-running-requests", str(rows), flag) as target:
            recordings.append(await record(name, target, prompts, is_cold=True, on_progress=_progress(name)))
    return recordings


def _progress(name: str) -> Callable[[int, int], None]:
    def on_progress(num_ended: int, total: int) -> None:
        if num_ended == total or sys.stderr.isatty():
            end = "\n" if num_ended == total else ""
            print(f"\rfdfo: {name}: {num_ended} of {total} answers", end=end, file=sys.stderr, flush=True)

    return on_progress


def _token_text(arguments: argparse.Namespace) -> TokenText | None:
    """What token ids stand for, by the tokenizer of the model's folder; None where there is none at hand."""
    if arguments.target is not None and arguments.model_path is None:
        return None
    path = (arguments.model_path or default_model_path()) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        _say(f"the page shows token ids: {path} cannot be read ({' '.join(str(error).split())})")
        return None
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FdfoError(f"{flag} {path}: {error.strerror}") from None


def _target(text: str) -> str:
    targets = parse_targets(text)
    if len(targets) > 1:
        raise ValueError(f"{text!r}: name one scheduler; the rounds of several are recorded one by one")
    return targets[0]


def _say(text: str) -> None:
    print(f"fdfo: {text}", file=sys.stderr, flush=True)

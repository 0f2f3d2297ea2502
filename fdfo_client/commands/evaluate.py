"""`fdfo eval`: problems with known answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fdfo_client._access import access_from
from fdfo_client._arguments import above_zero, output_file_or_dash, typed, whole
from fdfo_client._channel import parse_targets
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client._waiting import waiting
from fdfo_client.commands.flags import add_algorithm, add_target, add_temperature
from fdfo_client.evaluate.problems import CHECKS, Problem, read_problems, reasoning_gym_problems, refuse_impossible
from fdfo_client.evaluate.run import Comparison, Run, ask_all, check_same_problems, check_server, compare, read_run
from fdfo_client.serve import default_model_path

DEFAULT_CONCURRENCY = 16
DEFAULT_REASONING_GYM_COUNT = 200
SHOW_EVERY_S, REDRAW_EVERY_S = 5.0, 0.1

EXAMPLES = """\
A file of problems has one JSON object a line with "prompt" and "answer"; other fields are passed over.

examples:
  fdfo eval                                                  # the problems of the small model that ships
  fdfo eval --first 100 --concurrency 1 --json alone.json
  fdfo eval --first 100 --against alone.json                 # the same problems now, paired with that run
  fdfo eval --target a:50051 --against b:50051 --param threshold=0.9
  fdfo eval --reasoning-gym gsm_symbolic --first 300 --max-new-tokens 512

The interval is Wilson's, of 95 %. Paired runs: how many answers are the same text, and the p of McNemar's exact test,
small where one run is right more often than chance explains. Failed requests are counted apart and in no share; with
one the exit status is 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo eval`."""
    parser.description = "Ask problems with known answers: how many are right, at what cost, whether two runs differ."
    parser.epilog = EXAMPLES
    add_target(parser)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--problems",
        type=Path,
        metavar="FILE",
        help=f"JSONL: a line for each problem, with prompt and answer ({default_model_path() / 'problems.jsonl'})",
    )
    what.add_argument(
        "--reasoning-gym",
        metavar="NAME",
        help="problems of this data set of the package reasoning-gym, as gsm_symbolic",
    )
    add(
        "--first",
        type=whole(1),
        metavar="N",
        help=f"ask the first N problems only (all; {DEFAULT_REASONING_GYM_COUNT} of reasoning-gym)",
    )
    add(
        "--check",
        choices=list(CHECKS),
        help="right is: the same text but for white space at its ends (exact), or also for case (text), or the same "
        "last number (number); auto: number where the answer is one, else text (exact; auto for reasoning-gym)",
    )
    add(
        "--concurrency",
        type=whole(1),
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"so many problems at a time ({DEFAULT_CONCURRENCY})",
    )
    add(
        "--against",
        type=typed(_against),
        metavar="HOST:PORT|FILE",
        help="pair with a run at this server, or with one that --json saved",
    )
    add("--raw", action="store_true", help="prompts as plain text, without the model's chat template")
    add(
        "--max-new-tokens",
        type=whole(1),
        metavar="N",
        help="at most so many tokens an answer (up to the context limit)",
    )
    add("--seed", type=whole(0), default=0, metavar="S", help="of the first problem, and of reasoning-gym's draw (0)")
    add("--timeout", type=above_zero, metavar="SECONDS", help="a request fails after so long (never)")
    add("--json", type=output_file_or_dash, metavar="FILE", help="write all as JSON, answers too; - is standard output")
    add_algorithm(parser)
    add_temperature(parser)


def main(arguments: argparse.Namespace) -> int:
    """`fdfo eval`. What is wrong with the problems, the saved run or either server is said before any is asked."""
    problems, saved = _problems(arguments), None
    refuse_impossible(problems, _check(arguments))
    if isinstance(arguments.against, Path):
        saved = read_run(arguments.against)
        check_same_problems(problems, saved.results)
    elif arguments.against is not None:
        for targets in (arguments.target, arguments.against):
            asyncio.run(check_server(targets, access_from(arguments)))
    first = asyncio.run(_ask(arguments, arguments.target, problems))
    against = saved
    if saved is None and arguments.against is not None:
        try:
            against = asyncio.run(_ask(arguments, arguments.against, problems))
        except BaseException:  # also Ctrl-C: the first run may have taken hours
            _report(arguments, first, None)
            raise
    _report(arguments, first, against)
    failures = [result.error for run in (first, against) if run for result in run.results if result.error is not None]
    if failures:
        print(f"fdfo: {len(failures)} requests failed; the first: {failures[0]}", file=sys.stderr)
    return 1 if failures else 0


def _report(arguments: argparse.Namespace, first: Run, against: Run | None) -> None:
    """Print the table, and write what --json asks for."""
    as_json: dict[str, Any] = first.to_json()
    lines = [*table([first] if against is None else [first, against])]
    if against is not None:
        comparison = compare(first, against)
        as_json |= {"against": against.to_json(), "comparison": comparison.to_json()}
        lines += ["", *comparison_lines(comparison)]
    text = json.dumps(as_json) + "\n"
    print(text if arguments.json == "-" else "\n".join(lines) + "\n", end="", flush=True)
    if isinstance(arguments.json, Path):
        try:
            arguments.json.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FdfoError(f"--json {arguments.json}: {error.strerror}") from None


def table(runs: list[Run]) -> list[str]:
    """A line for each run, under names."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({which})" for name, which in zip(names, ("now", "against"), strict=False)]
    width = max(len("run"), *map(len, names))
    lines = [
        f"{'run':<{width}}{'problems':>10}{'right':>7}{'failed':>8}{'accuracy':>10}  {'95 % interval':<16}"
        f"{'tokens':>8}{'forwards':>10}{'tokens/forward':>16}"
    ]
    for name, run in zip(names, runs, strict=True):
        low, high = run.interval
        interval = f"{low:.1%} - {high:.1%}"
        lines.append(
            f"{name:<{width}}{len(run.results):>10}{run.num_right:>7}{run.num_failed:>8}"
            f"{shown(run.accuracy, '.1%'):>10}  {interval:<16}{run.tokens:>8}{run.forwards:>10}"
            f"{shown(run.tokens_per_forward, '.2f'):>16}"
        )
    return lines


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison in words."""
    left_out = f", {comparison.num_left_out} left out that failed" if comparison.num_left_out else ""
    return [
        f"same answer: {comparison.num_same} of {len(comparison.pairs)} ({shown(comparison.share_same, '.1%')})"
        f"{left_out}",
        f"right in the first run only: {comparison.num_only_first}, in the second only: {comparison.num_only_second}; "
        f"McNemar's exact p: {comparison.p:.3g}",
    ]


def shown(value: float | None, form: str) -> str:
    """`-` for what there is none of."""
    return "-" if value is None else format(value, form)


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    if arguments.reasoning_gym is not None:
        count = arguments.first or DEFAULT_REASONING_GYM_COUNT
        with waiting(f"drawing problems of {arguments.reasoning_gym}"):
            return reasoning_gym_problems(arguments.reasoning_gym, count, arguments.seed)
    problems = read_problems(arguments.problems or default_model_path() / "problems.jsonl")
    if arguments.first is not None and arguments.first > len(problems):
        raise InvalidRequest(f"--first {arguments.first}: there are {len(problems)} problems", "first")
    return problems[: arguments.first]


def _check(arguments: argparse.Namespace) -> str:
    return str(arguments.check or ("exact" if arguments.reasoning_gym is None else "auto"))


async def _ask(arguments: argparse.Namespace, targets: tuple[str, ...], problems: list[Problem]) -> Run:
    name = ",".join(targets)
    return await ask_all(
        targets,
        problems,
        name=name,
        concurrency=arguments.concurrency,
        check=_check(arguments),
        options={
            "algorithm": arguments.algorithm,
            "algorithm_params": dict(arguments.param or ()),
            "temperature": arguments.temperature,
            "max_new_tokens": arguments.max_new_tokens,
            "timeout": arguments.timeout,
        },
        raw=arguments.raw,
        seed=arguments.seed,
        access=access_from(arguments),
        on_progress=progress(name, len(problems)),
    )


def progress(name: str, total: int, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """On a terminal a line that changes, else a line every few seconds."""
    is_terminal = sys.stderr.isatty()
    every_s = REDRAW_EVERY_S if is_terminal else SHOW_EVERY_S
    shown_at = clock()

    def on_progress(num_ended: int, num_right: int) -> None:
        nonlocal shown_at
        now = clock()
        if is_terminal and num_ended == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - shown_at >= every_s:
            shown_at = now
            line = f"{name}: {num_ended} of {total} problems, {num_right} right"
            print(
                f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True
            )

    return on_progress


def _against(text: str) -> tuple[str, ...] | Path:
    if Path(text).is_file():
        return Path(text)
    try:
        return parse_targets(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a file that exists nor a target; give FILE or HOST:PORT") from None

"""`make demo`: twelve prompts at once through both services, FDFO beside sync."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fdfo_client import AsyncClient, Committed, FdfoError, Finished, ServerCounters
from fdfo_client.local_services import local_services
from fdfo_client.serve import default_model_path

WIDTH = 100
# Fewer than the requests, so that one sees the next enter in the place of one that has ended.
NUM_ROWS = 4
TASKS = ("word_problem", "fact", "count", "sort", "word_problem", "repeat") * 2
TIMEOUT_S = 120.0
COLOURS = (31, 32, 33, 34, 35, 36)


@dataclass(frozen=True)
class Problem:
    task: str
    prompt: str
    answer: str


@dataclass
class Run:
    """What one mode did."""

    name: str
    answers: dict[int, str] = field(default_factory=dict)
    wall_s: float = 0.0
    tokens: int = 0
    forwards: int = 0
    rounds: int = 0
    rows: int = 0
    wasted_rows: int = 0


def read_problems() -> list[Problem]:
    """Twelve problems of different kinds and lengths, always the same."""
    with (default_model_path() / "problems.jsonl").open() as lines:
        problems = [Problem(**json.loads(line)) for line in lines]
    chosen: list[Problem] = []
    for task in TASKS:
        chosen.append(next(problem for problem in problems if problem.task == task and problem not in chosen))
    return chosen


async def run_mode(name: str, flag: str, problems: Sequence[Problem]) -> Run:
    """Send all problems at once and print what comes, as it comes."""
    run = Run(name)
    async with local_services("--max-running-requests", str(NUM_ROWS), flag) as target, AsyncClient(target) as client:
        before = (await client.server_info()).counters
        started_at = time.monotonic()
        asking = [asyncio.create_task(ask(client, run, started_at, *item)) for item in enumerate(problems, 1)]
        try:
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
        run.wall_s = time.monotonic() - started_at
        count(run, before, (await client.server_info()).counters)
    return run


async def ask(client: AsyncClient, run: Run, started_at: float, number: int, problem: Problem) -> None:
    blocks: list[str] = []
    async for event in client.stream(messages=[{"role": "user", "content": problem.prompt}], timeout=TIMEOUT_S):
        clock = f"{time.monotonic() - started_at:6.2f} s"
        match event:
            case Committed():
                blocks.append(event.text)
                text = event.text.strip() or "(the end)"
                print(f"{clock}  {tag(number)}  {text}"[: WIDTH + len(tag(number)) - 4], flush=True)
            case Finished():
                run.answers[number] = "".join(blocks).strip()
                usage = event.usage
                cost = f"{usage.completion_tokens} tokens, {usage.forwards} forward{'s' * (usage.forwards != 1)}"
                print(f"{clock}  {tag(number)}  {dim(f'done: {cost}')}", flush=True)


def count(run: Run, before: ServerCounters, after: ServerCounters) -> None:
    run.tokens = after.published_tokens - before.published_tokens
    run.forwards = after.forwards - before.forwards
    run.rounds = after.rounds - before.rounds
    run.wasted_rows = after.waiting_row_forwards - before.waiting_row_forwards
    run.rows = after.denoise_row_forwards - before.denoise_row_forwards + run.wasted_rows


def table(fdfo: Run, sync: Run) -> list[str]:
    """The figures of both modes side by side, and their ratio."""
    rows: list[tuple[str, float, float, str]] = [
        ("tokens", fdfo.tokens, sync.tokens, "d"),
        ("forwards", fdfo.forwards, sync.forwards, "d"),
        ("tokens per forward", fdfo.tokens / fdfo.forwards, sync.tokens / sync.forwards, ".2f"),
        ("rounds", fdfo.rounds, sync.rounds, "d"),
        ("rows per forward", fdfo.rows / fdfo.forwards, sync.rows / sync.forwards, ".2f"),
        ("wasted row-forwards", fdfo.wasted_rows, sync.wasted_rows, "d"),
        ("wall seconds", fdfo.wall_s, sync.wall_s, ".2f"),
    ]
    lines = [f"{'':<22}{'FDFO':>10}{'sync':>10}{'FDFO/sync':>12}"]
    for name, left, right, form in rows:
        ratio = f"{left / right:.2f}" if right else "-"
        lines.append(f"{name:<22}{format(left, form):>10}{format(right, form):>10}{ratio:>12}")
    return lines


def has_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def tag(number: int) -> str:
    text = f"[{number:>2}]"
    return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m" if has_colour() else text


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if has_colour() else text


def main() -> int:
    problems = read_problems()
    print(f"{len(problems)} prompts, sent at once to a worker with {NUM_ROWS} rows:")
    for number, problem in enumerate(problems, 1):
        print(f"  {tag(number)}  {problem.prompt}")
    try:
        print("\nFDFO: a block leaves the batch as soon as it is done. A line is a block, or the end of an answer.")
        fdfo = asyncio.run(run_mode("FDFO", "--dllm-fdfo", problems))
        print("\nsync: all blocks of the batch wait for the slowest.")
        sync = asyncio.run(run_mode("sync", "--no-dllm-fdfo", problems))
    except FdfoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n" + "\n".join(table(fdfo, sync)))
    equal = sum(fdfo.answers[number] == sync.answers[number] for number in fdfo.answers)
    right = sum(fdfo.answers[number] == problem.answer for number, problem in enumerate(problems, 1))
    print(
        f"\nFDFO takes {fdfo.forwards / sync.forwards:.2f} times the forwards of sync for the same prompts. "
        "Forwards are what a GPU spends its\n"
        "time on; on a laptop's CPU the wall time grows with the rows in them too.\n"
        f"Same answer in both: {equal} of {len(problems)}. Right, by the problems' own key: {right} of {len(problems)}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

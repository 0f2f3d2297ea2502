"""`python -m bench.evaluate`: the shipped modes give the answers that one request at a time in lockstep gives."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.services import TINY, Services
from fdfo_client import AsyncClient
from fdfo_client._arguments import output_file, whole
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.commands.evaluate import shown
from fdfo_client.evaluate.problems import Problem, read_problems
from fdfo_client.evaluate.run import Comparison, Run, ask_all, compare

NUM_ROWS = 64
CONCURRENCIES = (1, 4, 16, 64)
# Name of a mode -> flags of its scheduler; name of a cache -> flags of its worker.
MODES: Mapping[str, tuple[str, ...]] = {
    "sync": ("--no-dllm-fdfo",),
    "FDFO, 1 round in flight": ("--dllm-fdfo", "--rounds-in-flight", "1"),
    "FDFO, 2 rounds in flight": ("--dllm-fdfo", "--rounds-in-flight", "2"),
}
CACHES: Mapping[str, tuple[str, ...]] = {
    "off": ("--no-enable-prefix-caching",),
    "on": ("--enable-prefix-caching",),
}
# Runs of one model agree in so large a share, or else differ by no more than chance.
LEAST_SHARE_SAME, LEAST_P = 0.99, 0.01
ROW = "{:<26}{:>6}{:>12}{:>14}{:>8}{:>10}  {:<16}{:>10}{:>10}{:>16}{:>8}{:>10}"
HEAD = (
    *("mode", "cache", "concurrent", "rows/forward", "right", "accuracy", "95 % interval"),
    *("forwards", "restarts", "tokens/forward", "same", "p"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 every run agrees with the first one, 1 one does not or a request failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m bench.evaluate", description=__doc__)
    parser.add_argument("--problems", type=Path, default=TINY / "problems.jsonl", metavar="FILE", help="JSONL of them")
    parser.add_argument("--first", type=whole(1), metavar="N", help="the first N problems only (all)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    started_at = time.monotonic()
    rows: list[dict[str, Any]] = []
    try:
        problems = read_problems(arguments.problems)[: arguments.first]
        print(f"{len(problems)} problems; each run is paired with the first one; p: McNemar's exact test\n")
        print(ROW.format(*HEAD), flush=True)
        with tempfile.TemporaryDirectory(prefix="fdfo-eval-") as folder, Services(Path(folder, "log")) as services:
            alone: Run | None = None
            for cache, worker_flags in CACHES.items():
                workers = services.workers(TINY, NUM_ROWS, flags=worker_flags)
                for mode, flags in MODES.items():
                    with services.schedulers(TINY, [(workers, flags)]) as targets:
                        for concurrency in CONCURRENCIES:
                            run, rows_per_forward, restarts = asyncio.run(_ask(targets, problems, mode, concurrency))
                            comparison = None if alone is None else compare(alone, run)
                            alone = alone or run
                            print(line(cache, run, rows_per_forward, restarts, comparison), flush=True)
                            rows.append(
                                {"cache": cache, "agrees": agrees(run, comparison), "run": run.to_json()}
                                | {"comparison": comparison and comparison.to_json()}
                                | {"rows_per_forward": rows_per_forward, "restarts": restarts}
                            )
    except (FdfoError, RuntimeError) as error:
        print(f"eval: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    num_apart = sum(not row["agrees"] for row in rows)
    said = f"{num_apart} of {len(rows)} runs FAILED or do not agree" if num_apart else f"all {len(rows)} runs agree"
    print(f"\ntook {time.monotonic() - started_at:.0f} s; {said}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    return 1 if num_apart else 0


async def _ask(
    targets: Sequence[str], problems: Sequence[Problem], name: str, concurrency: int
) -> tuple[Run, float | None, int]:
    """The run; the mean number of rows in the worker's forwards meanwhile, None where there was no forward; and how
    often a row lost its place and started again, which may add forwards and nothing else."""
    async with AsyncClient(targets) as client:
        before = (await client.server_info()).counters
        run = await ask_all(targets, problems, name=name, concurrency=concurrency)
        after = (await client.server_info()).counters
    forwards = after.forwards - before.forwards
    rows = after.denoise_row_forwards + after.waiting_row_forwards
    rows -= before.denoise_row_forwards + before.waiting_row_forwards
    restarts = after.restarts + after.preemptions - before.restarts - before.preemptions
    return run, rows / forwards if forwards else None, restarts


def agrees(run: Run, comparison: Comparison | None) -> bool:
    """Nothing failed, and the answers are the same, or no more often right or wrong than chance explains."""
    if run.num_failed or comparison is None:
        return not run.num_failed
    share = comparison.share_same
    return share is not None and (share >= LEAST_SHARE_SAME or comparison.p > LEAST_P)


def line(cache: str, run: Run, rows_per_forward: float | None, restarts: int, comparison: Comparison | None) -> str:
    """A run in one line of the table; `!` at its end if it does not agree. comparison: None for the first run."""
    cells = [run.name, cache, run.settings["concurrency"], shown(rows_per_forward, ".2f"), run.num_right]
    cells += [shown(run.accuracy, ".1%"), "{:.1%} - {:.1%}".format(*run.interval), run.forwards, restarts]
    cells += [shown(run.tokens_per_forward, ".2f")]
    cells += ["", ""] if comparison is None else [shown(comparison.share_same, ".1%"), f"{comparison.p:.3g}"]
    return (ROW.format(*cells) + ("" if agrees(run, comparison) else " !")).rstrip()


if __name__ == "__main__":
    sys.exit(main())

"""What every experiment is made of: how much is measured, interleaved runs, and cases with their targets.

A case is one line of the table: medians over the runs, the runs themselves, and a target where there is one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.loads import Run, run_closed

BLOCK = 32
PROMPT_TOKENS = BLOCK
OUTPUT_TOKENS = 3 * BLOCK

Prompts = list[list[int]]
Figures = Mapping[str, float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    runs: int  # of each case
    requests: Mapping[int, int]  # by rows of the worker
    reloop_requests: int  # per row
    tiny_prompts: int  # different ones
    tiny_requests: Mapping[int, int]  # by rows of the worker
    rounds: int


QUICK = Scale(
    runs=5,
    requests={4: 12, 16: 48, 64: 128},
    reloop_requests=1,
    tiny_prompts=2,
    tiny_requests={16: 16},
    rounds=50,
)
FULL = Scale(
    runs=5,
    requests={4: 60, 16: 192, 64: 448},
    reloop_requests=4,
    tiny_prompts=8,
    tiny_requests={16: 64, 64: 128},
    rounds=300,
)


@dataclass(frozen=True)
class Target:
    """`figure` is to be at least, or at most, `bound`."""

    figure: str
    bound: float
    at_least: bool = True

    def is_met(self, figures: Figures) -> bool:
        value = figures[self.figure]
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Case:
    """One line of the table: the median of each figure, and its value in every run."""

    name: str
    medians: Figures
    runs: Mapping[str, Sequence[float]]
    targets: Sequence[Target] = field(default=())

    def missed(self) -> list[Target]:
        return [target for target in self.targets if not target.is_met(self.medians)]


def interleaved(scale: Scale, progress: Progress, cases: Mapping[str, Callable[[], Figures]]) -> dict[str, Case]:
    """Every case once, in order, then all again: what disturbs the machine disturbs all of them."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for number, (name, measure) in itertools.product(range(scale.runs), cases.items()):
        progress(f"{name}, run {number + 1} of {scale.runs}")
        for figure, value in measure().items():
            values[name].setdefault(figure, []).append(value)
    return {name: derived(name, runs) for name, runs in values.items()}


def ratios(over: Case, under: Case, figure: str) -> list[float]:
    """Run by run, so that both were measured side by side."""
    return [a / b for a, b in zip(over.runs[figure], under.runs[figure], strict=True)]


def derived(name: str, runs: Mapping[str, Sequence[float]], *targets: Target) -> Case:
    return Case(name, {figure: statistics.median(each) for figure, each in runs.items()}, runs, targets)


def run_figures(run: Run) -> Figures:
    server = run.server
    return {
        "tokens/s": run.tokens_per_s,
        "device busy": server.device_busy_share or 0.0,
        "forwards/block": server.forwards_per_block or 0.0,
        "rounds/block": server.rounds / server.blocks_done,
        "host ms/round": server.host_ms_per_round or 0.0,
        "rows/forward": server.denoise_rows_per_forward or 0.0,
        "wasted rows/forward": server.waiting_rows_per_forward or 0.0,
    }


def closed_figures(target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Figures:
    return run_figures(run_closed(target, prompts, output_tokens, concurrency))

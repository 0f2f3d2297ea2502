"""Loops that note when they launched which forward, for measurements in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.upstream import UpstreamPlanner
from worker_svc.denoise import DenoiseLoop
from worker_svc.forward_plan import Plan
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.rows import RowKey


@dataclass(frozen=True)
class Forward:
    """When it was launched, in seconds of the loop's clock, who denoised in it, and of whose prompts it computed."""

    at_s: float
    rows: frozenset[RowKey]
    prefills: frozenset[RowKey]


class ObservedLoop(DenoiseLoop):
    """A DenoiseLoop; `forwards` grows by each of its forwards."""

    def __init__(
        self, forwards: list[Forward], runner: ModelRunner, config: LoopConfig, clock: Callable[[], float]
    ) -> None:
        super().__init__(runner, config, clock)
        self._forwards = forwards

    def _account(self, plan: Plan, launched_at: float, device_ms: float) -> None:
        super()._account(plan, launched_at, device_ms)
        rows = frozenset(row.name.key for row in plan.batch.rows)
        self._forwards.append(Forward(launched_at, rows, frozenset(chunk.row.name.key for chunk in plan.chunks)))


class ObservedUpstreamLoop(ObservedLoop):
    """An UpstreamLoop, likewise."""

    planner_type = UpstreamPlanner


def longest_wait_ms(forwards: Sequence[Forward]) -> float:
    """The longest time between the launches of two forwards that follow each other for a row that denoised in both."""
    last_s: dict[RowKey, float] = {}
    longest_s = 0.0
    for forward in forwards:
        for row in forward.rows:
            longest_s = max(longest_s, forward.at_s - last_s.get(row, forward.at_s))
            last_s[row] = forward.at_s
    return longest_s * 1000


def most_prefills(forwards: Sequence[Forward]) -> int:
    """Forwards that computed of the prompt which took the most of them."""
    return max(Counter(row for forward in forwards for row in forward.prefills).values())

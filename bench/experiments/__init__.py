"""The measurements of `make bench`, each against running services and interleaved with what it is compared to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.experiments.busy_share import busy
from bench.experiments.cases import Case, Progress, Scale
from bench.experiments.closed_loops import fused_commit, modes, re_loop
from bench.experiments.prompts import upstream
from bench.experiments.scaling import workers
from bench.experiments.straight import in_place, round_trip
from bench.experiments.tiny import plain
from bench.services import Services

NOT_QUICK = ("busy", "fused-commit")
EXPERIMENTS: dict[str, Callable[[Services, Scale, Progress], Iterator[Case]]] = {
    "modes": modes,
    "re-loop": re_loop,
    "busy": busy,
    "fused-commit": fused_commit,
    "in-place": in_place,
    "upstream": upstream,
    "plain": plain,
    "round-trip": round_trip,
    "workers": workers,
}

"""The measurements of `make bench`, each against running services and interleaved with what it is compared to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.experiments.busy_share import busy
from bench.experiments.caching import prefix_cache
from bench.experiments.cases import Case, Progress, Scale
from bench.experiments.closed_loops import fused_commit, modes, re_loop
from bench.experiments.ending import early_end
from bench.experiments.growing import growth
from bench.experiments.prompts import long_prompt, upstream
from bench.experiments.scaling import scheduler, workers
from bench.experiments.straight import in_place, round_trip
from bench.experiments.tiny import plain
from bench.services import Services

NOT_QUICK = ("busy", "fused-commit", "growth", "scheduler")
EXPERIMENTS: dict[str, Callable[[Services, Scale, Progress], Iterator[Case]]] = {
    "modes": modes,
    "re-loop": re_loop,
    "busy": busy,
    "fused-commit": fused_commit,
    "early-end": early_end,
    "in-place": in_place,
    "prefix-cache": prefix_cache,
    "upstream": upstream,
    "long-prompt": long_prompt,
    "plain": plain,
    "round-trip": round_trip,
    "growth": growth,
    "workers": workers,
    "scheduler": scheduler,
}

"""How much of the time the device computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Case,
    Progress,
    Scale,
    Target,
    closed_figures,
    derived,
    interleaved,
)
from bench.loads import random_prompts
from bench.services import FUSED_COMMIT, SIMULATED, Services


def busy(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """How much of the time the device computes, with one round in flight and with two, behind a longer network."""
    for num_rows, least in ((16, 0.97), (64, 0.95)):
        (worker,) = services.workers(SIMULATED, num_rows, 1, FUSED_COMMIT)
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        each = list(itertools.product((0.0, 0.5, 2.0), ("1", "2")))
        flags = [([services.delayed(worker, delay_ms)], ["--rounds-in-flight", k]) for delay_ms, k in each]
        with services.schedulers(SIMULATED, flags) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{num_rows} rows, k = {k}, {delay_ms:g} ms": partial(
                        closed_figures, target, prompts, OUTPUT_TOKENS, 2 * num_rows
                    )
                    for (delay_ms, k), target in zip(each, targets, strict=True)
                },
            )
        for (_, k), case in zip(each, cases.values(), strict=True):
            runs = {name: case.runs[name] for name in ("device busy", "tokens/s", "rows/forward")}
            yield derived(case.name, runs, *([Target("device busy", least)] if k == "2" else []))

"""How much of the time the device computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import (
    BLOCK,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Case,
    Figures,
    Progress,
    Prompts,
    Scale,
    Target,
    derived,
    interleaved,
)
from bench.loads import random_prompts, run_steady
from bench.services import FUSED_COMMIT, SIMULATED, Services


def busy(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """How much of the time the device computes while all places are taken: one round in flight and two, behind a longer
    network."""

    def measure(target: str, prompts: Prompts, num_rows: int) -> Figures:
        steady = run_steady(target, prompts, OUTPUT_TOKENS, num_rows)
        server = steady.server
        assert server.device_busy_share is not None and server.denoise_rows_per_forward is not None
        return {
            "device busy": server.device_busy_share,
            "tokens/s": server.blocks_done * BLOCK / steady.wall_s,
            "rows/forward": server.denoise_rows_per_forward,
        }

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
                    f"{num_rows} rows, k = {k}, {delay_ms:g} ms": partial(measure, target, prompts, num_rows)
                    for (delay_ms, k), target in zip(each, targets, strict=True)
                },
            )
        for (_, k), case in zip(each, cases.values(), strict=True):
            yield derived(case.name, case.runs, *([Target("device busy", least)] if k == "2" else []))

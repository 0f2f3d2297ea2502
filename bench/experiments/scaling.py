"""What one scheduler can drive."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Case,
    Figures,
    Progress,
    Scale,
    closed_figures,
    derived,
    interleaved,
    ratios,
)
from bench.loads import random_prompts, run_steady
from bench.services import FUSED_COMMIT, SIMULATED, Services


def workers(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """One scheduler with 1, 2 and 4 simulated workers of 16 rows."""
    counts = (1, 2, 4)
    targets = services.workers(SIMULATED, 16, max(counts))
    with services.schedulers(SIMULATED, [(targets[:count], []) for count in counts]) as schedulers:
        cases = interleaved(
            scale,
            progress,
            {
                f"{count} x 16 rows": partial(
                    closed_figures,
                    target,
                    random_prompts(count * scale.requests[16], PROMPT_TOKENS),
                    OUTPUT_TOKENS,
                    32 * count,
                )
                for count, target in zip(counts, schedulers, strict=True)
            },
        )
    one = next(iter(cases.values()))
    for count, case in zip(counts, cases.values(), strict=True):
        of_linear = [ratio / count for ratio in ratios(case, one, "tokens/s")]
        yield derived(case.name, {**case.runs, "of linear": of_linear})


def scheduler(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """CPU time of the scheduler's process a round, behind 1 and 2 simulated workers of 64 rows; so how many rounds one
    core sustains, and how many such workers it drives."""
    counts = (1, 2)
    targets = services.workers(SIMULATED, 64, max(counts), FUSED_COMMIT)

    def measure(target: str, count: int) -> Figures:
        prompts = random_prompts(count * scale.requests[64], PROMPT_TOKENS)
        steady = run_steady(target, prompts, OUTPUT_TOKENS, 64 * count, partial(services.cpu_ms, target))
        rounds = steady.server.rounds
        return {
            "CPU ms/round": steady.probed / rounds,
            "rounds/s of a core": rounds / steady.probed * 1000,
            "rounds/s of a worker": rounds / steady.wall_s / count,
        }

    with services.schedulers(SIMULATED, [(targets[:count], []) for count in counts]) as schedulers:
        cases = interleaved(
            scale,
            progress,
            {
                f"{count} x 64 rows": partial(measure, target, count)
                for count, target in zip(counts, schedulers, strict=True)
            },
        )
    alone = next(iter(cases.values())).runs["rounds/s of a worker"]
    for case in cases.values():
        driven = [core / worker for core, worker in zip(case.runs["rounds/s of a core"], alone, strict=True)]
        yield derived(case.name, {**case.runs, "workers of a core": driven})

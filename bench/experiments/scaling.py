"""What one scheduler can drive."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.experiments.cases import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Case,
    Progress,
    Scale,
    closed_figures,
    derived,
    interleaved,
    ratios,
)
from bench.loads import random_prompts
from bench.services import SIMULATED, Services


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

"""How host time grows with rows and with context."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Mapping
from functools import partial

from bench.experiments.cases import BLOCK, Case, Figures, Progress, Scale, Target, derived, interleaved, ratios
from bench.rounds import measure_rounds
from bench.services import PLAIN_COMMIT, Services

ROWS = (8, 64, 256)
CONTEXTS = (512, 4096, 16_384)  # tokens
ROOM_TOKENS = 4096  # a row's, beyond its context


def growth(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Host time of a round over 8, 64 and 256 rows that denoise behind 512, 4096 and 16384 tokens of context."""
    num_tokens = max(ROWS) * (max(CONTEXTS) + ROOM_TOKENS)
    # Prompts cost no device time and are computed in a few forwards, long before what is measured.
    sizes = ("--max-total-tokens", str(num_tokens), "--chunked-prefill-size", str(1 << 20))
    model = services.simulated(prefill_token_ms=0.0)
    (worker,) = services.workers(model, max(ROWS), 1, (*PLAIN_COMMIT, *sizes))
    num_rounds = scale.rounds // 3

    def measure(num_rows: int, context: int) -> Figures:
        # No request ends: a block takes two forwards at least.
        trips = asyncio.run(
            measure_rounds(
                worker, num_rows, num_rounds, num_blocks=ROOM_TOKENS // BLOCK, prompt_blocks=context // BLOCK
            )
        )
        if any(trip.prefill_tokens for trip in trips):
            raise RuntimeError(f"{num_rows} rows, {context} tokens: prompts were computed in the rounds measured")
        return {
            "host ms/round": statistics.median(trip.overhead_ms + trip.build_ms for trip in trips),
            "device ms/round": statistics.median(trip.device_ms for trip in trips),
        }

    cases = interleaved(
        scale,
        progress,
        {case_name(*each): partial(measure, *each) for each in itertools.product(ROWS, CONTEXTS)},
    )
    yield from cases.values()
    yield from _growth(cases)


def case_name(num_rows: int, context: int) -> str:
    return f"{num_rows} rows, {context} tokens"


def _growth(cases: Mapping[str, Case]) -> Iterator[Case]:
    """How the host time grows, against flat in the context and linear in the rows."""
    least, *_, most = CONTEXTS
    for num_rows in ROWS:
        longest, shortest = cases[case_name(num_rows, most)], cases[case_name(num_rows, least)]
        yield derived(
            f"{most} / {least} tokens, {num_rows} rows",
            {"ratio": ratios(longest, shortest, "host ms/round")},
            Target("ratio", 1.15, at_least=False),
        )
    few, some, many = ROWS
    for context in CONTEXTS:
        for base in (few, some):
            over, under = cases[case_name(many, context)], cases[case_name(base, context)]
            yield derived(
                f"{many} / {base} rows, {context} tokens",
                {"ratio": ratios(over, under, "host ms/round")},
                Target("ratio", many / base, at_least=False),
            )

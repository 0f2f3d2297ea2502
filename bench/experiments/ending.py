"""What ending a block early saves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

from bench.experiments.cases import Case, Progress, Scale, derived
from bench.services import PLAIN_COMMIT, TINY, Services
from fdfo_client import AsyncClient, Completion

ROWS = 16
OUTPUT_TOKENS = 128


def early_end(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """A block that ends its request as soon as all positions up to its first stop token are set, against one that is
    filled; the small model, shipped problems, greedy, the same tokens in both."""
    lines = (TINY / "problems.jsonl").read_text().splitlines()[: 16 * scale.tiny_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    each: list[tuple[list[str], list[str]]] = [
        (services.workers(TINY, ROWS, 1, (*PLAIN_COMMIT, "--batch-invariant", flag)), [])
        for flag in ("--early-end", "--no-early-end")
    ]
    with services.schedulers(TINY, each) as (early, filled):
        stops: list[list[int]] = [[] for _ in prompts]
        for name in ("as they are", "with a stop token in mid-answer"):
            progress(f"answers {name}")
            with_end, without = (asyncio.run(_ask(target, prompts, stops)) for target in (early, filled))
            if [answer.token_ids for answer in with_end] != [answer.token_ids for answer in without]:
                raise RuntimeError("an early end changed an answer")
            forwards, filled_forwards = (
                sum(answer.usage.forwards for answer in answers) for answers in (with_end, without)
            )
            yield derived(
                f"answers {name}",
                {
                    "forwards/request": [forwards / len(prompts)],
                    "without early end": [filled_forwards / len(prompts)],
                    "saved": [1 - forwards / filled_forwards],
                },
            )
            middles = [len(answer.token_ids) // 2 for answer in without]
            stops = [
                list(answer.token_ids[middle : middle + 1]) for answer, middle in zip(without, middles, strict=True)
            ]


async def _ask(target: str, prompts: Sequence[str], stops: Sequence[list[int]]) -> list[Completion]:
    """The answers, at most ROWS at a time."""
    gate = asyncio.Semaphore(ROWS)
    async with AsyncClient(target) as client:

        async def ask(prompt: str, stop_token_ids: list[int]) -> Completion:
            async with gate:
                return await client.generate(
                    messages=[{"role": "user", "content": prompt}],
                    max_new_tokens=OUTPUT_TOKENS,
                    stop_token_ids=stop_token_ids,
                )

        return await asyncio.gather(*(ask(*pair) for pair in zip(prompts, stops, strict=True)))

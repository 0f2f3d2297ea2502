"""The services with a real model, against one process without services."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial

from bench.experiments.cases import (
    BLOCK,
    Case,
    Figures,
    Progress,
    Prompts,
    Scale,
    closed_figures,
    derived,
    interleaved,
    ratios,
)
from bench.plain_loop import PlainResult, run_one_at_a_time, run_plain, run_without_kv
from bench.services import TINY, Services
from scheduler_svc.text import TextCodec
from worker_svc.__main__ import load_loop
from worker_svc.denoise import DenoiseLoop
from worker_svc.settings import WorkerSettings

TINY_OUTPUT_TOKENS = 2 * BLOCK


def plain(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Both services with the small model on the CPU, against loops in one process without them."""
    _, loop = load_loop(WorkerSettings(model_path=TINY))
    codec = TextCodec(TINY)
    lines = (TINY / "problems.jsonl").read_text().splitlines()
    encoded = [codec.encode_chat([("user", json.loads(line)["prompt"])]) for line in lines]

    def limit(run: Callable[[Prompts], PlainResult], prompts: Prompts) -> Figures:
        result = run(prompts)
        return {
            "tokens/s": sum(map(len, result.token_ids)) / result.wall_s,
            "rows/forward": result.row_forwards / result.forwards,
            "device busy": result.device_ms / result.wall_s / 1000,
        }

    def run_limit(num_rows: int, prompts: Prompts) -> PlainResult:
        return run_plain(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS, num_rows=num_rows)

    for num_rows in (16, 64):
        prompts = list(itertools.islice(itertools.cycle(encoded), num_rows * scale.tiny_requests))
        worker = services.workers(TINY, num_rows)
        with services.schedulers(TINY, [(worker, [])]) as (target,):
            served, plain_loop = interleaved(
                scale,
                progress,
                {
                    f"services, {num_rows} rows": partial(
                        closed_figures, target, prompts, TINY_OUTPUT_TOKENS, 2 * num_rows
                    ),
                    f"plain loop, {num_rows} rows": partial(limit, partial(run_limit, num_rows), prompts),
                },
            ).values()
        yield from (served, plain_loop)
        yield derived(f"services / plain loop, {num_rows} rows", {"ratio": ratios(served, plain_loop, "tokens/s")})
    few = encoded[:8]
    yield from interleaved(
        scale,
        progress,
        {
            name: partial(limit, partial(_alone, run, loop), few)
            for name, run in (("one at a time, with KV", run_one_at_a_time), ("one at a time, no KV", run_without_kv))
        },
    ).values()


def _alone(run: Callable[..., PlainResult], loop: DenoiseLoop, prompts: Prompts) -> PlainResult:
    return run(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS)

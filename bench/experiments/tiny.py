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
    Target,
    closed_figures,
    derived,
    interleaved,
    ratios,
)
from bench.plain_loop import PlainResult, run_one_at_a_time, run_plain, run_without_kv
from bench.services import TINY, Services
from common.model_folder import read_model_folder
from scheduler_svc.text import TextCodec
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import loop_config
from worker_svc.settings import WorkerSettings
from worker_svc.start_up import load_loop

NUM_TURNS = 8  # of a conversation, the question among them
TINY_OUTPUT_TOKENS = 4 * BLOCK


def plain(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Both services with the small model on the CPU, against loops in one process without them, and against a request
    at a time; conversations of 350 tokens, answers of 128."""
    settings, folder = WorkerSettings(model_path=TINY), read_model_folder(TINY)
    loop = load_loop(settings, folder, loop_config(folder, settings))
    few = _conversations(scale.tiny_prompts)

    def limit(run: Callable[[Prompts], PlainResult], prompts: Prompts) -> Figures:
        result = run(prompts)
        return {
            "tokens/s": sum(map(len, result.token_ids)) / result.wall_s,
            "rows/forward": result.row_forwards / result.forwards,
            "device busy": result.device_ms / result.wall_s / 1000,
        }

    def run_limit(num_rows: int, prompts: Prompts) -> PlainResult:
        return run_plain(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS, num_rows=num_rows)

    alone = {
        name: partial(limit, partial(_alone, run, loop), few)
        for name, run in (("one at a time, with KV", run_one_at_a_time), ("one at a time, no KV", run_without_kv))
    }
    for num_rows, num_requests in scale.tiny_requests.items():
        prompts = list(itertools.islice(itertools.cycle(few), num_requests))
        worker = services.workers(TINY, num_rows)
        with services.schedulers(TINY, [(worker, [])]) as (target,):
            served, plain_loop, *one_at_a_time = interleaved(
                scale,
                progress,
                {
                    f"services, {num_rows} rows": partial(
                        closed_figures, target, prompts, TINY_OUTPUT_TOKENS, 2 * num_rows
                    ),
                    f"plain loop, {num_rows} rows": partial(limit, partial(run_limit, num_rows), prompts),
                    **(alone if num_rows == 16 else {}),
                },
            ).values()
        yield from (served, plain_loop, *one_at_a_time)
        yield derived(
            f"services / plain loop, {num_rows} rows",
            {"ratio": ratios(served, plain_loop, "tokens/s")},
            Target("ratio", 0.9),
        )
        if one_at_a_time:
            with_kv, without_kv = (ratios(served, each, "tokens/s") for each in one_at_a_time)
            yield derived(
                "16 concurrent / one at a time",
                {"with KV": with_kv, "no KV": without_kv},
                Target("with KV", 2.5),
                Target("no KV", 4.0),
            )


def _conversations(number: int) -> Prompts:
    """Shipped problems with their answers as the turns before, and one more problem."""
    codec = TextCodec(TINY)
    problems = iter([json.loads(line) for line in (TINY / "problems.jsonl").read_text().splitlines()])
    prompts = []
    for _ in range(number):
        turns = list(itertools.islice(problems, NUM_TURNS))
        messages = [pair for turn in turns for pair in (("user", turn["prompt"]), ("assistant", turn["answer"]))]
        prompts.append(codec.encode_chat(messages[:-1]))
    return prompts


def _alone(run: Callable[..., PlainResult], loop: DenoiseLoop, prompts: Prompts) -> PlainResult:
    return run(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS)

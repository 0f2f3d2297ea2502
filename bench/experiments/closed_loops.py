"""Whole loads: FDFO against lockstep, and what the re-loop and the fused commit are worth."""

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
    closed_figures,
    derived,
    interleaved,
    ratios,
    run_figures,
)
from bench.ideal import fdfo_ms, sync_ms
from bench.loads import random_prompts, run_closed
from bench.services import FUSED_COMMIT, PLAIN_COMMIT, SIMULATED, Services
from common.model_folder import read_model_folder
from worker_svc.simulated import read_profile


def modes(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """FDFO and SYNC on the simulated device, all places always taken, beside the ideal of the same draws."""
    profile = read_profile(read_model_folder(SIMULATED))
    for num_rows in (4, 16, 64):
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        draws: list[list[list[int]]] = []

        def measure(mode: str, target: str, prompts: Prompts, num_rows: int, draws: list[list[list[int]]]) -> Figures:
            run = run_closed(target, prompts, OUTPUT_TOKENS, 2 * num_rows, together=mode == "SYNC")
            draws.append(run.draws)
            return run_figures(run)

        worker = services.workers(SIMULATED, num_rows)
        flags = {"FDFO": "--dllm-fdfo", "SYNC": "--no-dllm-fdfo"}
        with services.schedulers(SIMULATED, [(worker, [flag]) for flag in flags.values()]) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{mode}, {num_rows} rows": partial(measure, mode, target, prompts, num_rows, draws)
                    for mode, target in zip(flags, targets, strict=True)
                },
            )
        if any(each != draws[0] for each in draws):
            raise RuntimeError(f"{num_rows} rows: blocks took other forwards in one run than in another")
        ideal = sync_ms(draws[0], num_rows, PROMPT_TOKENS, profile) / fdfo_ms(
            draws[0], num_rows, PROMPT_TOKENS, profile
        )
        fdfo, sync = cases.values()
        yield from (fdfo, sync)
        measured = ratios(fdfo, sync, "tokens/s")
        yield derived(
            f"FDFO / SYNC, {num_rows} rows",
            {"ratio": measured, "ideal": [ideal], "of ideal": [ratio / ideal for ratio in measured]},
            Target("of ideal", 0.93),
        )


def re_loop(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Going on in the worker while no row is done, against a reply after every forward; one round in flight."""
    delays_ms, limits = (0.0, 0.5, 2.0), ("0", "1")
    for num_rows in (1, 4, 16):
        (worker,) = services.workers(SIMULATED, num_rows)
        prompts = random_prompts(num_rows * scale.reloop_requests, PROMPT_TOKENS)
        each = [
            ([services.delayed(worker, delay_ms)], ["--rounds-in-flight", "1", "--max-forwards", limit])
            for delay_ms, limit in itertools.product(delays_ms, limits)
        ]
        with services.schedulers(SIMULATED, each) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{num_rows} rows, {delay_ms:g} ms, max_forwards {limit}": partial(
                        closed_figures, target, prompts, OUTPUT_TOKENS, num_rows
                    )
                    for (delay_ms, limit), target in zip(itertools.product(delays_ms, limits), targets, strict=True)
                },
            )
        pairs = list(cases.values())
        for delay_ms, with_loop, without in zip(delays_ms, pairs[::2], pairs[1::2], strict=True):
            bounds = [Target("rounds/block", 1.1, at_least=False)] if num_rows == 1 else []
            if (num_rows, delay_ms) == (1, 0.5):
                bounds.append(Target("ratio", 1.1))
            yield derived(
                f"{num_rows} row{'s' * (num_rows > 1)}, {delay_ms:g} ms one way",
                {
                    "rounds/block": with_loop.runs["rounds/block"],
                    "without": without.runs["rounds/block"],
                    "tokens/s": with_loop.runs["tokens/s"],
                    "tokens/s without": without.runs["tokens/s"],
                    "ratio": ratios(with_loop, without, "tokens/s"),
                },
                *bounds,
            )


def fused_commit(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """A block's last forward that is also its next block's first, against one of its own."""
    for num_rows in (4, 16, 64):
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        each: list[tuple[list[str], list[str]]] = [
            (services.workers(SIMULATED, num_rows, 1, flags), []) for flags in (FUSED_COMMIT, PLAIN_COMMIT)
        ]
        with services.schedulers(SIMULATED, each) as targets:
            fused, apart = interleaved(
                scale,
                progress,
                {
                    f"{name}, {num_rows} rows": partial(closed_figures, target, prompts, OUTPUT_TOKENS, 2 * num_rows)
                    for name, target in zip(("fused", "apart"), targets, strict=True)
                },
            ).values()
        saved = [a - b for a, b in zip(apart.runs["forwards/block"], fused.runs["forwards/block"], strict=True)]
        of_commits = [blocks / (blocks - 1) * value for blocks, value in ((OUTPUT_TOKENS // BLOCK, s) for s in saved)]
        yield derived(
            f"fused / apart, {num_rows} rows",
            {
                "forwards/block": fused.runs["forwards/block"],
                "apart": apart.runs["forwards/block"],
                "saved/committed block": of_commits,
                "tokens/s": fused.runs["tokens/s"],
                "ratio": ratios(fused, apart, "tokens/s"),
            },
            Target("saved/committed block", 0.9),
        )

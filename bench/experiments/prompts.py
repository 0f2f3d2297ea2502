"""Long prompts beside denoising rows, in virtual time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.experiments.cases import BLOCK, Case, Progress, Scale, Target, derived
from bench.loads import random_prompts
from bench.observed import Forward, ObservedLoop, ObservedUpstreamLoop, longest_wait_ms, most_prefills
from bench.services import SIMULATED, Services
from bench.upstream import UpstreamLoop
from common.model_folder import read_model_folder
from fdfo_client.bench.metrics import ttft_ms
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import Item, poisson_items
from scheduler_svc.settings import SchedulerSettings
from worker_svc.denoise import DenoiseLoop
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import read_profile

# As measured there: 28 to 30 ms for a small forward, 86 ms for 72 rows.
H20 = {"floor_ms": 28.0, "denoise_row_ms": 0.8, "prefill_token_ms": 0.025}


def upstream(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Prompts beside denoising rows, against rounds that either prefill, a block of each prompt, or denoise. 128
    prompts of 1024 tokens at 8 requests/s, 128 tokens each, 64 rows; virtual time, so that all runs are the same."""
    shipped = read_model_folder(SIMULATED)
    options = [
        {"prompt_ids": prompt, "max_new_tokens": 4 * BLOCK, "ignore_eos": True} for prompt in random_prompts(128, 1024)
    ]
    items = list(poisson_items(options, 8.0, random.Random(8)))
    for device, costs in (("H200", {}), ("H20", H20)):
        simulation = {**shipped.config["simulation"], **costs}
        folder = replace(shipped, config={**shipped.config, "simulation": simulation})
        forwards: list[float] = []
        ttft: list[float] = []
        for name, make_loop, in_flight in (("ours", DenoiseLoop, 2), ("upstream's shape", UpstreamLoop, 1)):
            progress(f"{device}, {name}, in virtual time")
            measured = replay_virtually(
                items,
                folder,
                SchedulerSettings(model_path=SIMULATED, rounds_in_flight=in_flight, max_forwards=in_flight % 2),
                WorkerSettings(model_path=SIMULATED, fused_commit=False),
                make_loop=make_loop,
            )
            assert measured.after is not None
            forwards.append(measured.after.forwards - measured.before.forwards)
            ttft.append(statistics.median(ttft_ms(measured.records)))
            yield derived(f"{name}, {device}", {"forwards": forwards[-1:], "TTFT p50 ms": ttft[-1:]})
        yield derived(
            f"upstream's shape / ours, {device}",
            {"forwards ratio": [forwards[1] / forwards[0]], "TTFT ratio": [ttft[1] / ttft[0]]},
            # The H200 keeps up with both, so its forwards only tell how full they are.
            *([Target("forwards ratio", 3.0)] if costs else []),
            Target("TTFT ratio", 2.5),
        )


def long_prompt(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """16 rows denoise while a prompt of 16384 tokens arrives: the longest time between two forwards of a row, against
    one forward with the whole prefill budget (2048 tokens); virtual time, half a millisecond of network each way."""
    num_rows, prompt_tokens = 16, 16_384
    folder = read_model_folder(SIMULATED)
    worker_settings = WorkerSettings(model_path=SIMULATED, fused_commit=False)
    budget = worker_settings.chunked_prefill_size
    budget_ms = read_profile(folder).forward_ms(num_rows + 1, budget)
    items = [_item(0.0, prompt, 32 * BLOCK) for prompt in random_prompts(num_rows, BLOCK)]
    items.append(_item(1.0, random_prompts(1, prompt_tokens, seed=2)[0], BLOCK))
    for name, make_loop, in_flight in (("ours", ObservedLoop, 2), ("upstream's shape", ObservedUpstreamLoop, 1)):
        progress(f"{name}, in virtual time")
        forwards: list[Forward] = []
        replay_virtually(
            items,
            folder,
            SchedulerSettings(model_path=SIMULATED, rounds_in_flight=in_flight, max_forwards=in_flight % 2),
            worker_settings,
            network_delay_ms=0.5,
            make_loop=partial(make_loop, forwards),
        )
        wait_ms = longest_wait_ms(forwards)
        figures = {
            "prompt's forwards": float(most_prefills(forwards)),
            "longest wait ms": wait_ms,
            "of a budget's forward": round(wait_ms / budget_ms, 6),  # but for the rounding of sums of seconds
        }
        bounds = {"prompt's forwards": prompt_tokens / budget, "of a budget's forward": 1.0}
        targets = [Target(figure, bound, at_least=False) for figure, bound in bounds.items()]
        yield derived(name, {figure: [value] for figure, value in figures.items()}, *(targets * (name == "ours")))


def _item(at_s: float, prompt: list[int], output_tokens: int) -> Item:
    return Item(at_s, {"prompt_ids": prompt, "max_new_tokens": output_tokens, "ignore_eos": True})

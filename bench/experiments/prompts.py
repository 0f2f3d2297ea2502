"""Long prompts beside denoising rows, in virtual time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace

from bench.experiments.cases import BLOCK, Case, Progress, Scale, Target, derived
from bench.loads import random_prompts
from bench.services import SIMULATED, Services
from bench.upstream import UpstreamLoop
from common.model_folder import read_model_folder
from fdfo_client.bench.metrics import ttft_ms
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import poisson_items
from scheduler_svc.settings import SchedulerSettings
from worker_svc.denoise import DenoiseLoop
from worker_svc.settings import WorkerSettings

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

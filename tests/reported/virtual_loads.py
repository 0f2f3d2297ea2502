"""Loads in virtual time, with every forward of the worker written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bench.loads import random_prompts
from common.model_folder import ModelFolder, read_model_folder
from fdfo_client.bench.measure import Measurement
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import Item
from tests.client.test_bench_virtual import SHIPPED, services
from worker_svc.denoise import DenoiseLoop
from worker_svc.forward_plan import Plan
from worker_svc.rows import Phase

BUDGET = 2048  # tokens, the default of --chunked-prefill-size


class Forward(NamedTuple):
    """A forward as it was launched: `at_s`, how long it took, and what the worker's rows did in it."""

    at_s: float
    device_ms: float
    denoising: int  # rows
    prefill_tokens: int
    prefilling: int  # rows whose prompt is incomplete after it
    resident: int  # rows in slots
    idle: int  # of these, rows that neither prefill nor denoise, though their request has not ended


def device(**simulation: float) -> ModelFolder:
    """The shipped simulated device with other numbers."""
    shipped = read_model_folder(SHIPPED)
    return dataclasses.replace(shipped, config={**shipped.config, "simulation": PROFILE | simulation})


PROFILE: dict[str, float] = read_model_folder(SHIPPED).config["simulation"]
FEW_STEPS = {"forwards_mean": 3.0, "forwards_max": 6}  # blocks of 2 to 6 forwards, so that long outputs take seconds


def requests(
    number: int, prompt_tokens: int, output_tokens: int, at_s: float | None = None, seed: int = 1
) -> list[Item]:
    """Random prompts, each answered in full."""
    prompts = random_prompts(number, prompt_tokens, seed)
    return [Item(at_s, {"prompt_ids": ids, "max_new_tokens": output_tokens, "ignore_eos": True}) for ids in prompts]


def watched(forwards: list[Forward], kind: type[DenoiseLoop] = DenoiseLoop) -> type[DenoiseLoop]:
    """A loop that adds each of its forwards to the list."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def _account(self, plan: Plan, launched_at: float, device_ms: float) -> None:
            super()._account(plan, launched_at, device_ms)
            rows = [row for session in self.sessions.values() for row in session.rows.values()]
            num_prefilling = sum(row.phase is Phase.PREFILL for row in rows)
            num_ended = sum(row.entry is not None and row.entry.ends for row in rows)
            num_denoising = len(plan.batch.rows)
            forwards.append(
                Forward(
                    at_s=launched_at,
                    device_ms=device_ms,
                    denoising=num_denoising,
                    prefill_tokens=sum(chunk.num_blocks for chunk in plan.chunks) * self.config.block_size,
                    prefilling=num_prefilling,
                    resident=len(rows),
                    idle=len(rows) - num_denoising - num_prefilling - num_ended,
                )
            )

    return Watched


def play(
    items: Iterable[Item],
    folder: ModelFolder,
    *,
    concurrency: int | None = None,
    kind: type[DenoiseLoop] = DenoiseLoop,
    **flags: Any,
) -> tuple[Measurement, Sequence[Forward]]:
    """What the load brought, by the services' default flags but for those given, and all forwards; every request is
    answered in full."""
    forwards: list[Forward] = []
    measurement = replay_virtually(
        items, folder, *services(flags), concurrency=concurrency, make_loop=watched(forwards, kind)
    )
    for record in measurement.records:
        assert record.is_ok, record.error
        assert record.output_tokens == record.options["max_new_tokens"]
    return measurement, forwards

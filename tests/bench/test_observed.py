"""Forwards noted in virtual time, and what is read from them."""

from __future__ import annotations

import pytest

from bench.loads import random_prompts
from bench.observed import Forward, ObservedLoop, ObservedUpstreamLoop, longest_wait_ms, most_prefills
from bench.services import SIMULATED
from common.model_folder import read_model_folder
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import Item
from scheduler_svc.settings import SchedulerSettings
from worker_svc.rows import RowKey
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import read_profile

BLOCK, NUM_ROWS = 32, 3
A, B = RowKey("a", 0), RowKey("b", 0)


def forward(at_s: float, *rows: RowKey, prefills: tuple[RowKey, ...] = ()) -> Forward:
    return Forward(at_s, frozenset(rows), frozenset(prefills))


def test_the_longest_wait_is_a_rows_own() -> None:
    """A forward without a row is part of that row's wait only, and before its first forward no row waits."""
    forwards = [forward(0, A), forward(1, A, prefills=(B,)), forward(2, A, B, prefills=(B,)), forward(4, A)]
    assert longest_wait_ms(forwards) == 2000
    assert most_prefills(forwards) == 2
    forwards.append(forward(7, B))
    assert longest_wait_ms(forwards) == 5000


@pytest.mark.parametrize("make_loop", [ObservedLoop, ObservedUpstreamLoop])
def test_a_long_prompt_beside_denoising_rows(make_loop: type[ObservedLoop]) -> None:
    """Ours: a prompt of 16 blocks takes 4 forwards of 4 blocks, and no row waits longer than one of them, with all
    rows. In upstream's shape it takes 16, and the rows wait for all of them."""
    is_ours = make_loop is ObservedLoop
    worker = WorkerSettings(model_path=SIMULATED, chunked_prefill_size=4 * BLOCK, fused_commit=False)
    prompts = [*random_prompts(NUM_ROWS, BLOCK), *random_prompts(1, 16 * BLOCK, seed=2)]
    items = [Item(0.0, {"prompt_ids": prompt, "max_new_tokens": 6 * BLOCK, "ignore_eos": True}) for prompt in prompts]
    items[-1] = Item(0.25, {"prompt_ids": prompts[-1], "max_new_tokens": BLOCK, "ignore_eos": True})
    forwards: list[Forward] = []
    measured = replay_virtually(
        items,
        read_model_folder(SIMULATED),
        SchedulerSettings(model_path=SIMULATED, rounds_in_flight=2 if is_ours else 1, max_forwards=0 if is_ours else 1),
        worker,
        make_loop=lambda *arguments: make_loop(forwards, *arguments),
    )
    assert measured.after is not None and len(forwards) == measured.after.forwards
    profile = read_profile(read_model_folder(SIMULATED))
    assert most_prefills(forwards) == (4 if is_ours else 16)
    if is_ours:
        assert longest_wait_ms(forwards) == pytest.approx(profile.forward_ms(NUM_ROWS + 1, 4 * BLOCK))
    else:
        assert longest_wait_ms(forwards) > 16 * profile.forward_ms(0, BLOCK)

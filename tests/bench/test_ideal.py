"""The ideal times of both modes, against the real scheduler and loops under a clock without host time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ideal import fdfo_ms, sync_ms
from bench.loads import random_prompts
from bench.services import SIMULATED
from common.model_folder import read_model_folder
from fdfo_client.bench.metrics import block_steps
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import Item
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import Profile, read_profile

BLOCK = 32
FOLDER = read_model_folder(SIMULATED)


@settings(max_examples=12)
@given(num_rows=st.integers(1, 6), num_requests=st.integers(1, 9), num_blocks=st.integers(1, 3), fdfo=st.booleans())
def test_the_ideal_is_what_services_without_host_time_take(
    num_rows: int, num_requests: int, num_blocks: int, fdfo: bool
) -> None:
    """With all requests waiting at the scheduler, both modes take the time computed from the drawn forwards."""
    items = [
        Item(None, {"prompt_ids": prompt, "max_new_tokens": num_blocks * BLOCK, "ignore_eos": True})
        for prompt in random_prompts(num_requests, BLOCK)
    ]
    measured = replay_virtually(
        items,
        FOLDER,
        SchedulerSettings(model_path=SIMULATED, dllm_fdfo=fdfo, rounds_in_flight=1),
        WorkerSettings(model_path=SIMULATED, max_running_requests=num_rows, fused_commit=False),
        concurrency=num_requests,
    )
    draws = [[step.forwards for step in block_steps(record, BLOCK)] for record in measured.records]
    ideal_ms = (fdfo_ms if fdfo else sync_ms)(draws, num_rows, BLOCK, read_profile(FOLDER))
    assert measured.wall_s * 1000 == pytest.approx(ideal_ms)


def test_the_ideals_by_hand() -> None:
    """Two places, three requests: FDFO fills the free place at once, SYNC waits for the slowest of each round."""
    profile = Profile(
        floor_ms=10,
        denoise_row_ms=1,
        prefill_token_ms=0.1,
        forwards_shape=4.5,
        forwards_mean=14,
        forwards_min=2,
        forwards_max=33,
    )
    requests = [[2, 3], [4], [1]]
    # FDFO: 4 forwards of two rows, then the third request beside the first one's last.
    assert fdfo_ms(requests, 2, 10, profile) == pytest.approx(2 * 10 * 0.1 + 4 * 12 + 10 * 0.1 + 12)
    # SYNC: rounds of 4 and 3 forwards, two rows each.
    assert sync_ms(requests, 2, 10, profile) == pytest.approx(2 * 10 * 0.1 + 4 * 12 + 10 * 0.1 + 3 * 12)

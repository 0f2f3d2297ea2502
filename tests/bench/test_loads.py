"""Loads with a window or an order of their own, against the real scheduler and loop under a clock without host time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import loads
from bench.loads import random_prompts
from bench.services import SIMULATED, Services
from common.model_folder import read_model_folder
from fdfo_client.bench.measure import World
from fdfo_client.bench.virtual import virtual_world
from fdfo_client.bench.virtual_time import run_virtually
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import read_profile

BLOCK = 32


def connect_virtually(monkeypatch: pytest.MonkeyPatch, num_rows: int, *, caching: bool = False) -> None:
    """`connect` gives a virtual worker with so many rows, whatever the target."""

    @asynccontextmanager
    async def connect(targets: Sequence[str]) -> AsyncIterator[World]:
        worker = WorkerSettings(
            model_path=SIMULATED, max_running_requests=num_rows, fused_commit=False, enable_prefix_caching=caching
        )
        scheduler = SchedulerSettings(model_path=SIMULATED)
        async with virtual_world(read_model_folder(SIMULATED), scheduler, worker) as world:
            yield world

    monkeypatch.setattr(loads, "connect", connect)


def test_a_steady_window_has_no_beginning_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken in it, so a device without host time is busy all the time; requests that end in it were
    answered in full, and the probe is looked at at its edges only."""
    connect_virtually(monkeypatch, 4)
    looks = iter([10.0, 17.0])
    steady = run_virtually(loads._run_steady("", random_prompts(28, BLOCK), 2 * BLOCK, 4, lambda: next(looks)))
    assert steady.probed == 7.0
    # The counters are those of the last reply, so each edge may be a round off.
    round_share = 1 / steady.server.rounds
    assert steady.server.device_busy_share == pytest.approx(1.0, abs=2 * round_share)
    assert steady.server.denoise_rows_per_forward is not None and steady.server.denoise_rows_per_forward > 3.6
    assert 20 - 4 <= steady.server.published_tokens / (2 * BLOCK) <= 20 + 4


def test_a_load_too_short_for_a_window_is_refused() -> None:
    """Where requests never wait for all places, nothing is sent."""
    with pytest.raises(ValueError, match="8 requests never leave 4 places"):
        loads.run_steady("nowhere", random_prompts(8, BLOCK), BLOCK, 4)


@pytest.mark.parametrize(("caching", "computed"), [(False, 4 * 64), (True, 64)])
def test_requests_after_the_first_block_find_what_they_share(
    monkeypatch: pytest.MonkeyPatch, caching: bool, computed: int
) -> None:
    """Four requests with two blocks in common: with a cache these are computed once, without it four times."""
    connect_virtually(monkeypatch, 8, caching=caching)
    (shared,) = random_prompts(1, 64)
    first, *rest = (shared + own for own in random_prompts(4, 16, seed=2))
    run = run_virtually(loads._run_shared("", first, rest, 2 * BLOCK))
    assert run.prefill_tokens == computed
    assert len(run.ttft_ms) == 3


def test_a_device_with_other_costs(tmp_path: Path) -> None:
    """Only what is named differs from the shipped one, and the folder goes with the services."""
    shipped = read_profile(read_model_folder(SIMULATED))
    with Services(tmp_path / "log") as services:
        folder = services.simulated(prefill_token_ms=0.0)
        profile = read_profile(read_model_folder(folder))
        assert profile.prefill_token_ms == 0.0 != shipped.prefill_token_ms
        assert profile.forward_ms(3, 100) == shipped.forward_ms(3, 0)
    assert not folder.exists()

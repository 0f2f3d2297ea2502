"""The short versions of the scenarios, against real processes. `make chaos` and `make soak` run the long ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.runner import run_scenario
from tests.chaos.scenario import read

SHORT = [
    "broken-connections",
    "hostile-messages",
    "killed-clients",
    "lossy-network",
    "paused-worker",
    "poisoned-request",
    "rolling-workers",
    "scheduler-kills",
    "small-pool",
    "worker-kills",
]


@pytest.mark.parametrize("name", SHORT)
def test_a_short_scenario_passes(name: str, tmp_path: Path) -> None:
    """What the scenario's file asks for holds."""
    said: list[str] = []
    result = asyncio.run(run_scenario(read(name, short=True), said.append, tmp_path / "log"))
    assert not result.faults, "\n".join([*said, *result.lines(), (tmp_path / "log").read_text()[-3000:]])

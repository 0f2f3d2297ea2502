"""The demo: its problems, its table, and what it says when a service does not start."""

from __future__ import annotations

import asyncio
import os

import pytest

from fdfo_client import FdfoError
from fdfo_client.local_services import local_services
from tools import demo


def test_the_problems_are_mixed() -> None:
    """Twelve different prompts, of five kinds, the same each time."""
    problems = demo.read_problems()
    assert len({problem.prompt for problem in problems}) == 12
    assert {problem.task for problem in problems} == {"word_problem", "fact", "count", "sort", "repeat"}
    assert problems == demo.read_problems()


def test_the_table_shows_both_and_the_ratio() -> None:
    """Each figure stands in its line, for FDFO, for sync, and as a ratio where there is one."""
    fdfo = demo.Run("FDFO", wall_s=1.0, tokens=200, forwards=10, rounds=8, rows=30, wasted_rows=0)
    sync = demo.Run("sync", wall_s=2.0, tokens=200, forwards=20, rounds=4, rows=80, wasted_rows=11)
    rows = {line[:22].strip(): line[22:].split() for line in demo.table(fdfo, sync)}
    assert rows[""] == ["FDFO", "sync", "FDFO/sync"]
    assert rows["tokens"] == ["200", "200", "1.00"]
    assert rows["forwards"] == ["10", "20", "0.50"]
    assert rows["tokens per forward"] == ["20.00", "10.00", "2.00"]
    assert rows["rounds"] == ["8", "4", "2.00"]
    assert rows["rows per forward"] == ["3.00", "4.00", "0.75"]
    assert rows["wasted row-forwards"] == ["0", "11", "0.00"]
    assert rows["wall seconds"] == ["1.00", "2.00", "0.50"]


def test_no_waste_on_either_side_has_no_ratio() -> None:
    """A figure that is zero for sync has no ratio."""
    run = demo.Run("both", wall_s=1.0, tokens=1, forwards=1, rounds=1, rows=1)
    assert demo.table(run, run)[6].split() == ["wasted", "row-forwards", "0", "0", "-"]


def test_the_error_of_a_service_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the services do not start the error ends with the last lines of their log."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())

    async def start() -> None:
        async with local_services("--no-such-flag"):
            raise AssertionError("it must not start")

    with pytest.raises(FdfoError, match=r"(?s)did not start.*--no-such-flag"):
        asyncio.run(start())

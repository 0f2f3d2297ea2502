"""Figures from records and counters."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdfo_client import ServerCounters
from fdfo_client.bench.load import Commit, Record
from fdfo_client.bench.measure import add_counters
from fdfo_client.bench.metrics import (
    BlockStep,
    ServerFigures,
    Spread,
    Summary,
    block_steps,
    definitions,
    forwards_per_block,
    percentile,
    spread,
    summarize,
    time_per_block_ms,
)


def counters(**values: float) -> ServerCounters:
    """Counters that are 0 but for these."""
    named: dict[str, float] = {field.name: 0 for field in dataclasses.fields(ServerCounters)} | values
    return ServerCounters(**named)  # type: ignore[arg-type]


def about(value: float) -> Any:
    """Equal but for rounding."""
    return pytest.approx(value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    """The percentile is interpolated linearly, as numpy does by default, and lies between two samples."""
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)
    assert min(values) <= percentile(sorted(values), percent) <= max(values)


def test_a_spread_of_nothing() -> None:
    """Without samples there are no figures; with one it is all of them."""
    assert spread([]) is None
    assert spread([3.0]) == Spread(1, 3.0, 3.0, 3.0, 3.0)


@given(st.integers(0, 40), st.lists(st.integers(0, 20), max_size=12), st.integers(1, 8))
def test_blocks_are_counted_by_position(prompt_tokens: int, sizes: list[int], block_size: int) -> None:
    """However tokens are held back, each event brings the blocks whose first output token it has, each block once."""
    record = Record({}, None, 0.0, prompt_tokens=prompt_tokens)
    record.commits = [Commit(float(i), size, forwards=3 * i) for i, size in enumerate(sizes)]
    seen: set[int] = set()
    wanted: list[BlockStep] = []
    position, last = prompt_tokens, None
    for commit in record.commits:
        new = {place // block_size for place in range(position, position + commit.num_tokens)} - seen
        position += commit.num_tokens
        if new:
            since = commit.at_s - last.at_s if last else None
            wanted.append(BlockStep(len(new), since, commit.forwards - (last.forwards if last else 0)))
            seen, last = seen | new, commit
    assert list(block_steps(record, block_size)) == wanted


def record_of(*commits: tuple[float, int, int], prompt_tokens: int = 4, sent_at_s: float = 0.0) -> Record:
    """A request that finished a second after its last commit: (time, tokens, forwards so far)."""
    record = Record({}, None, sent_at_s, prompt_tokens=prompt_tokens, finish_reason="length")
    record.commits = [Commit(*commit) for commit in commits]
    record.ended_at_s = commits[-1][0] + 1
    return record


def test_an_event_with_two_blocks_gives_two_samples() -> None:
    """Time and forwards are divided by the blocks of an event and count once for each; the first has no time."""
    record = record_of((1.0, 4, 6), (2.0, 0, 8), (4.0, 8, 16))
    assert list(time_per_block_ms([record], 4)) == [1500.0, 1500.0]
    assert list(forwards_per_block([record], 4)) == [6, 5, 5]


def test_a_summary_by_hand() -> None:
    """All figures of a small run, worked out by hand."""
    failed = Record({}, 1.0, 1.5, ended_at_s=2.0, prompt_tokens=2, error="broken", commits=[Commit(1.75, 1, 1)])
    unfinished = Record({}, 1.0, 1.25, commits=[])
    records = [record_of((1.0, 4, 6), (3.0, 4, 10)), record_of((3.0, 4, 5), sent_at_s=1.0), failed, unfinished]
    before = counters(rounds=5, forwards=10, device_ms=100.0, round_trip_ms=500.0, host_ms=1.0, published_tokens=7)
    grown = counters(
        rounds=4, forwards=8, device_ms=2000.0, round_trip_ms=2400.0, host_ms=6.0, published_tokens=24,
        blocks_done=6, restarts=1, preemptions=2, denoise_row_forwards=30, waiting_row_forwards=4, prefill_tokens=16,
        allocator_calls=9,
    )  # fmt: skip
    summary = summarize(records, before, add_counters([before, grown]), wall_s=4.0, num_workers=2, block_size=4)
    assert summary == Summary(
        requests_ok=2,
        requests_failed=1,
        requests_unfinished=1,
        wall_s=4.0,
        requests_per_s=0.5,
        prompt_tokens=10,
        output_tokens=13,
        output_tokens_per_s=3.25,
        ttft_ms=Spread(2, 1500.0, 1500.0, about(1950), about(1990)),
        time_per_block_ms=Spread(1, 2000.0, 2000.0, 2000.0, 2000.0),
        end_to_end_ms=Spread(2, 3500.0, 3500.0, about(3950), about(3990)),
        send_lag_ms=Spread(2, 375.0, 375.0, about(487.5), about(497.5)),
        server=ServerFigures(
            rounds=4,
            forwards=8,
            blocks_done=6,
            denoise_row_forwards=30,
            waiting_row_forwards=4,
            prefill_tokens=16,
            published_tokens=24,
            restarts=1,
            preemptions=2,
            allocator_calls=9,
            forwards_per_block=5.0,
            tokens_per_forward=3.0,
            denoise_rows_per_forward=3.75,
            waiting_rows_per_forward=0.5,
            prefill_tokens_per_forward=2.0,
            forwards_per_round=2.0,
            device_ms_per_forward=250.0,
            device_busy_share=0.25,
            host_ms_per_round=100.0,
            scheduler_host_ms_per_round=1.5,
        ),
        errors={"broken": 1},
    )


def test_nothing_is_divided_by_zero() -> None:
    """A run in which nothing happened has counts of 0, and no ratios."""
    summary = summarize([], counters(), counters(), wall_s=0.0, num_workers=0, block_size=32)
    assert summary.requests_per_s is None and summary.ttft_ms is None
    assert summary.server is not None
    ratios = [value for value in dataclasses.astuple(summary.server) if value != 0]
    assert ratios == [None] * 10


def test_counters_that_are_missing_or_fell() -> None:
    """Without counters after the run, or when a scheduler began again at 0, there are no figures of the server."""
    full = counters(forwards=5, rounds=5)
    for after in (None, counters(forwards=9)):
        assert summarize([], full, after, wall_s=1.0, num_workers=1, block_size=32).server is None


def test_errors_are_counted_most_frequent_first() -> None:
    """Failed requests are counted by their error."""
    records = [Record({}, None, 0.0, ended_at_s=1.0, error=error) for error in ("a", "b", "b")]
    summary = summarize(records, counters(), None, wall_s=1.0, num_workers=1, block_size=32)
    assert list(summary.errors.items()) == [("b", 2), ("a", 1)]


def test_counters_of_several_schedulers_are_added() -> None:
    """Each field is the sum of that field."""
    names = [field.name for field in dataclasses.fields(ServerCounters)]
    one, two = (counters(**dict(zip(names, itertools.count(first), strict=False))) for first in (1, 100))
    assert dataclasses.astuple(add_counters([one, two])) == tuple(101 + 2 * i for i in range(len(names)))


@pytest.mark.parametrize("of", [Summary, ServerFigures])
def test_every_figure_is_defined(of: type[Summary] | type[ServerFigures]) -> None:
    """Each field has a definition."""
    assert list(definitions(of)) == [field.name for field in dataclasses.fields(of)]
    assert all(definitions(of).values())

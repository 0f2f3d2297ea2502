"""Figures and checks: each sees what it is there to see."""

from __future__ import annotations

import pytest

from fdfo_client import Finished
from fdfo_client._types import Usage
from tests.chaos.load import Record, requests
from tests.chaos.measures import Sample, growth, recovery_s, tokens_per_s
from tests.chaos.runner import RunResult, check_bound, check_records
from tests.chaos.scenario import Bound, Checks, Load


def record(events_at: list[float], ended_at: float, tokens: int = 4) -> Record:
    made = Record(0, "", sent_at=0.0, ended_at=ended_at, events_at=events_at)
    made.commits = [(at, tokens) for at in events_at[1:]]
    return made


def test_recovery_is_the_longest_silence_of_a_request_under_way() -> None:
    """From the fault to its next event, or to its end without one; a request that had ended does not count."""
    ended = record([1, 2], 3)
    assert recovery_s([ended], 10) == 0
    assert recovery_s([ended, record([1, 9, 12.5, 13], 13), record([1, 9, 10.5], 11)], 10) == 2.5
    assert recovery_s([record([1, 9], 14)], 10) == 4


def test_tokens_per_second_counts_what_came_between_two_times() -> None:
    """Blocks before and after do not count."""
    assert tokens_per_s([record([0, 1, 2, 3], 3), record([0, 2.5, 9], 9)], 2, 4) == 6


def test_growth_is_that_of_the_process_that_grew_most() -> None:
    """After warm-up; a process that started or ended in between does not count."""
    steady = [Sample(at, 1, "a", 100 + (50 if at < 10 else 60), 7, 3) for at in range(100)]
    growing = [Sample(at, 2, "b", 1000 + at, 7 + at // 50, 3) for at in range(100)]
    late = [Sample(at, 3, "c", 1 + at, 7, 3 + at) for at in range(50, 100)]
    figures = growth([*steady, *growing, *late])
    assert figures["memory growth %"] == pytest.approx(100 * (1092 / 1032 - 1))
    assert (figures["descriptors growth"], figures["threads growth"]) == (1, 0)


def finished(text: str, tokens: int, told: int) -> Record:
    made = Record(0, "", 0.0, text=text, token_ids=[1] * tokens)
    made.finished, made.num_finished = Finished("length", Usage(completion_tokens=told)), 1
    return made


def test_a_token_that_comes_twice_or_not_at_all_is_a_fault() -> None:
    """What came must be as many tokens as the scheduler says it published, and one Finished."""
    assert finished("x", 3, 3).fault() == ""
    assert finished("x", 3, 2).fault() == "3 tokens came, usage says 2"
    twice = finished("x", 3, 3)
    twice.num_finished = 2
    assert twice.fault() == "two Finished events"


def test_answers_are_held_against_those_expected() -> None:
    """A missing answer, another one and a failed request are each a fault of the run."""
    expected = {number: finished("x", 3, 3).answer() for number in range(3)}
    good = RunResult("", {"failed": 0}, dict(expected))
    check_records(good, Checks(), expected)
    assert good.faults == []
    bad = RunResult("", {"failed": 1}, {0: expected[0], 1: finished("y", 3, 3).answer()})
    check_records(bad, Checks(), expected)
    assert bad.faults == [
        "1 requests failed, not 0",
        "1 of 3 have no answer, such as request 2",
        "1 answers are not those expected, such as that of request 1",
    ]


@pytest.mark.parametrize(
    ("bound", "fault"),
    [
        (Bound("speed", at_least=90), ""),
        (Bound("speed", at_most=90), "two: speed is 100, not at most 90"),
        (Bound("speed", "two", "one", at_least=1.9), ""),
        (Bound("speed", "two", "one", at_least=2.1), "two: speed relative to one is 2, not at least 2.1"),
        (Bound("spede", at_least=1), "no figure 'spede'; there are speed"),
    ],
)
def test_a_bound_holds_a_figure_against_a_number_or_another_run(bound: Bound, fault: str) -> None:
    """The last run is meant where none is named."""
    runs = [RunResult("one", {"speed": 50.0}), RunResult("two", {"speed": 100.0})]
    assert check_bound(bound, runs) == fault


def test_the_mixed_load_is_mixed_and_repeats() -> None:
    """The same requests every time; drawn and greedy ones, two algorithms, stop strings, text of several bytes."""
    load = Load(requests=32)
    made = list(requests(load))
    assert made == list(requests(load))
    assert {options.get("algorithm") for options in made} == {None, "JointThreshold"}
    assert {bool(options.get("stop")) for options in made} == {True, False}
    assert {options.get("temperature", 0) > 0 for options in made} == {True, False}
    assert any(not options["messages"][0]["content"].isascii() for options in made)

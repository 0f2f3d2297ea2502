"""What the measurements do with their figures; the services themselves run in tests/e2e."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from bench.__main__ import line, main, to_json
from bench.experiments.cases import QUICK, Case, Target, derived, interleaved, ratios
from bench.markdown import page


def test_runs_are_interleaved_and_their_medians_taken() -> None:
    """Every case runs once before any runs again; a median is over a case's own runs, in the order they came."""
    order: list[str] = []
    values: dict[str, Iterator[float]] = {"a": iter([5.0, 1.0, 3.0, 9.0, 2.0]), "b": iter([1.0, 2.0, 4.0, 8.0, 16.0])}

    def measure(name: str) -> Mapping[str, float]:
        order.append(name)
        return {"speed": next(values[name])}

    cases = interleaved(QUICK, lambda what: None, {"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert order == ["a", "b"] * QUICK.runs
    assert cases["a"].medians == {"speed": 3.0}
    assert cases["b"].runs == {"speed": [1.0, 2.0, 4.0, 8.0, 16.0]}
    assert ratios(cases["a"], cases["b"], "speed") == [5.0, 0.5, 0.75, 9 / 8, 0.125]


@pytest.mark.parametrize(
    ("target", "value", "is_met"),
    [
        (Target("x", 0.85), 0.85, True),
        (Target("x", 0.85), 0.84, False),
        (Target("x", 2.5, at_least=False), 2.5, True),
        (Target("x", 2.5, at_least=False), 2.6, False),
    ],
)
def test_a_missed_target_is_shown(target: Target, value: float, is_met: bool) -> None:
    """The line of the table marks it, and the JSON has the runs behind the figure."""
    case = derived("case", {"x": [value]}, target)
    assert case.missed() == ([] if is_met else [target])
    assert line(case).endswith(f"[{target}]" + ("" if is_met else "!"))
    [shown] = to_json({"group": [case]}, "a machine", 1)["experiments"]["group"]  # type: ignore[index]
    assert shown["runs"] == {"x": [value]}


def test_a_case_without_targets_misses_none() -> None:
    """Stated figures cannot fail."""
    assert Case("stated", {"x": 1.0}, {"x": [1.0]}).missed() == []


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists those there are, before anything starts."""
    with pytest.raises(SystemExit) as exit_:
        main(["--only", "modes,colours"])
    assert exit_.value.code == 2
    assert "'colours' is not one of modes, re-loop" in capsys.readouterr().err


def test_the_page_has_every_figure() -> None:
    """Cases with the same figures share a table, and a missed target is said."""
    cases = [
        derived("first", {"x": [1.0], "y": [250.0]}, Target("x", 2.0)),
        derived("second", {"ratio": [0.5]}),
        derived("third", {"x": [3.0], "y": [0.0]}, Target("x", 2.0)),
    ]
    lines = page({"modes": cases}, "a machine", 5).splitlines()
    assert "| first | **1.00** (>= 2, missed) | 250 |" in lines
    assert (
        lines.index("| third | **3.00** (>= 2) | 0.00 |")
        == lines.index("| first | **1.00** (>= 2, missed) | 250 |") + 1
    )
    assert "| second | 0.500 |" in lines

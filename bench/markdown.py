"""The figures of a run as a page of tables (docs/figures.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.experiments import EXPERIMENTS
from bench.experiments.cases import Case
from bench.pictures import PICTURES


def page(results: Mapping[str, Sequence[Case]], machine: str, runs: int) -> str:
    """Cases with the same figures share a table; a figure with a target is bold and has it behind."""
    lines = [
        "# Figures",
        "",
        f"Written by `make bench`. Machine: {machine}, no GPU. Medians of {runs} interleaved runs; a bold figure has a",
        "target. What each figure is, and what runs against what: [performance](performance.md).",
        "",
    ]
    for name, cases in results.items():
        lines += [f"## `--only {name}`", "", f"{EXPERIMENTS[name].__doc__}", ""]
        for table in _tables(cases):
            lines += [*_rows(table), ""]
        if name in PICTURES:
            lines += [f"![{name}]({picture_path(name)})", ""]
    return "\n".join(lines)


def picture_path(name: str) -> str:
    """Where the picture of an experiment stands, from the page."""
    return f"pictures/{name}.svg"


def number(value: float) -> str:
    """Three digits that say something."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"


def _tables(cases: Sequence[Case]) -> list[list[Case]]:
    tables: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        tables.setdefault(tuple(case.medians), []).append(case)
    return list(tables.values())


def _rows(cases: Sequence[Case]) -> Iterator[str]:
    figures = list(cases[0].medians)
    yield f"| case | {' | '.join(figures)} |"
    yield "|---|" + "---|" * len(figures)
    for case in cases:
        yield f"| {case.name} | {' | '.join(_cell(case, figure) for figure in figures)} |"


def _cell(case: Case, figure: str) -> str:
    text = number(case.medians[figure])
    for target in case.targets:
        if target.figure == figure:
            text = f"**{text}** ({target}{'' if target.is_met(case.medians) else ', missed'})"
    return text

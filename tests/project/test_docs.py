"""The pages of docs/ that name code name what is there."""

from __future__ import annotations

import ast
import gc
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES_OF_THE_WAY = 300


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree. Nothing is collected meanwhile: what other tests left may format a traceback as it goes,
    which parses too, and in Python 3.11 one parse inside another ends both with a SystemError."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def definition_lines(path: Path, name: str) -> int:
    """Lines of the function or method `name` ("Class.method") in a file, without docstrings and blank lines."""
    source = path.read_text()
    body: list[ast.stmt] = parsed(path).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        body = node.body
    assert node.end_lineno is not None
    numbers = set(range(node.lineno, node.end_lineno + 1))
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        assert body[0].end_lineno is not None
        numbers -= set(range(body[0].lineno, body[0].end_lineno + 1))
    return sum(bool(source.splitlines()[number - 1].strip()) for number in numbers)


def test_the_way_of_a_request_is_under_300_lines() -> None:
    """Every step of the page exists, and together they are short enough to be read in order."""
    steps = re.findall(r"^\d+\. `(\S+)` `(\S+)`", (ROOT / "docs/way-of-a-request.md").read_text(), re.MULTILINE)
    assert len(steps) > 10
    lines = {f"{path} {name}": definition_lines(ROOT / path, name) for path, name in steps}
    assert sum(lines.values()) < MAX_LINES_OF_THE_WAY, lines


def rows_with_tests(text: str) -> list[tuple[str, ...]]:
    """The rows of all tables in a text, cell by cell; the last cell of each names at least one test, and all exist."""
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\n?)*)", text, re.MULTILINE)
        for line in line.splitlines()
    ]
    for row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row[-1])
        assert named and len(named) == row[-1].count("`") // 2, f"names no test, or what is none: {row}"
        for path, name in named:
            assert definition_lines(ROOT / path, name)
    return rows


def test_every_invariant_names_tests_that_exist() -> None:
    """docs/invariants.md has all 14, each with at least one test that can be collected."""
    rows = rows_with_tests((ROOT / "docs/invariants.md").read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, 15))


def test_every_failure_names_tests_that_exist() -> None:
    """docs/reliability.md has all 18 faults of the failure table, each with at least one test."""
    section = (ROOT / "docs/reliability.md").read_text().partition("## The failure table")[2].partition("\n## ")[0]
    assert len(rows_with_tests(section)) == 18


def test_every_reported_fault_names_tests_that_exist() -> None:
    """docs/reported-cases.md has every fault of each section, each with at least one test that can be collected."""
    _, *sections = re.split(r"^## ", (ROOT / "docs/reported-cases.md").read_text(), flags=re.MULTILINE)
    assert {section.splitlines()[0]: len(rows_with_tests(section)) for section in sections} == {
        "KV and slots": 6,
        "Scheduling and latency": 10,
        "Tokens and text": 10,
        "Same answer, whatever the load": 6,
        "API": 3,
    }


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
def test_links_of_a_page_lead_to_files(page: str) -> None:
    """Relative links and pictures exist."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_readme_links_to_files() -> None:
    """Relative links and pictures of README.md exist."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()):
        if "://" not in target:
            assert (ROOT / target).exists(), target

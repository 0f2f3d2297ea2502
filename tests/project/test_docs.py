"""The pages of docs/ that name code name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES_OF_THE_WAY = 300


def definition_lines(path: Path, name: str) -> int:
    """Lines of the function or method `name` ("Class.method") in a file, without docstrings and blank lines."""
    source = path.read_text()
    body: list[ast.stmt] = ast.parse(source).body
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


def test_every_invariant_names_tests_that_exist() -> None:
    """docs/invariants.md has all 14, each with at least one test that can be collected."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|$", (ROOT / "docs/invariants.md").read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 15))
    for number, _, tests in rows:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", tests)
        assert named, f"invariant {number} names no test"
        for path, name in named:
            assert definition_lines(ROOT / path, name)


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

"""Every Python snippet of the documents runs."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdfo_client.testing import FakeScheduler, serving

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"[\w.-]+:50051\b")
# What these show is part of a service; their tests run it there.
ELSEWHERE = {
    "docs/adding-an-algorithm.md": "tests/algorithms/test_adding_an_algorithm.py",
    "docs/models.md": "tests/model/test_adding_a_model.py",
    "docs/openai.md": "tests/e2e/test_openai.py",
}


def snippets() -> Iterator[tuple[str, int, str]]:
    """Page, line and text of each."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        yield from ((name, text.count("\n", 0, found.start()) + 2, found[1]) for found in SNIPPET.finditer(text))


HERE = [(page, line, text) for page, line, text in snippets() if page not in ELSEWHERE]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A scheduler that stands for all that the snippets name."""
    with serving(FakeScheduler(["Once upon a time", " there was", " a block."])) as target:
        yield target


@pytest.mark.parametrize(("page", "line", "text"), HERE, ids=[f"{page}:{line}" for page, line, _ in HERE])
def test_snippet_runs(page: str, line: int, text: str, target: str, tmp_path: Path) -> None:
    """A snippet runs as a program, and so do the tests in it; schedulers at port 50051 are a fake one."""
    program = tmp_path / "snippet.py"
    program.write_text(TARGET.sub(target, text))
    for name, value in runpy.run_path(str(program), run_name="__main__").items():
        if name.startswith("test_"):
            value()


def test_every_page_with_snippets_is_tried() -> None:
    """README and the page of the client have snippets that run here; the tests of the others name their page."""
    assert {"README.md", "docs/client.md"} <= {page for page, _, _ in HERE}
    assert ELSEWHERE.keys() == {page for page, _, _ in snippets()} - {page for page, _, _ in HERE}
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def test_a_snippet_that_fails_is_seen(target: str, tmp_path: Path) -> None:
    """A test in a snippet whose assertion does not hold fails here."""
    wrong = "def test_it():\n    assert 1 == 2\n"
    with pytest.raises(AssertionError):
        test_snippet_runs("page", 1, wrong, target, tmp_path)

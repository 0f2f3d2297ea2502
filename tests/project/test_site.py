"""The site that `make docs` makes, and the pages and pictures in it that tools write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tools import concept_pictures, protocol_reference
from tools.site_links import on_page_markdown

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself to show a page; links are for the reader.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|icon)\b[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
    r"""|(?:url\(|@import)\s*["']?(?:https?:)?//[^)]*""",
    re.IGNORECASE,
)


def build(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet would let warnings pass
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(out)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_has_no_warning_and_needs_no_other_host(tmp_path: Path) -> None:
    """It builds strictly (every page in the navigation, every link and anchor right), and fetches nothing elsewhere."""
    done = build(tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    made = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    assert len(made) > 20
    assert not [(path.name, found[0]) for path in made for found in FETCHED.finditer(path.read_text())]


def test_faults_of_the_site_are_seen(tmp_path: Path) -> None:
    """A page outside the navigation, a link and an anchor that lead nowhere are told, and fail the build."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# FDFO\n\n[gone](gone.md) [gone](#gone)\n")
    (tmp_path / "docs/more.md").write_text("# More\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("nav:\n")[0] + "nav: [index.md]\n"
    for name in ("hooks", "extra_css"):
        config = re.sub(rf"^{name}:.*\n", "", config, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and done.stderr.count("WARNING") == 3, done.stderr
    for said in ("more.md", "'gone.md'", "'#gone'"):
        assert said in done.stderr


def test_what_comes_from_another_host_is_seen() -> None:
    """Scripts, styles, pictures and fonts of other hosts are found, links and our own files are not."""
    for fetched in (
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "<img alt=x src=http://example/x.png>",
        "@font-face { src: url(https://fonts.example/x.woff2) }",
    ):
        assert FETCHED.search(fetched)
    assert not FETCHED.search('<a href="https://example.org">x</a><script src="assets/x.js"></script>')


def test_links_out_of_the_docs_become_paths() -> None:
    """On the site a link to a file that is not part of it is the file's path; links between pages stay."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="decisions/0001.md"))
    text = "[why](../models.md), [the model](../../models/tiny-llada2/README.md), [`Makefile`](../../Makefile)"
    assert on_page_markdown(text, page) == "[why](../models.md), the model (`models/tiny-llada2/README.md`), `Makefile`"


def test_the_protocol_reference_is_fresh() -> None:
    """Both pages are what the comments of the protos make; that each thing has a comment is a rule of `buf lint`."""
    for path, text in protocol_reference.pages().items():
        assert (ROOT / path).read_text() == text, "run `make protos`"
        assert "None" not in text


def test_the_pictures_of_the_concepts_are_fresh() -> None:
    """Each is what its script draws, and stands on the page."""
    page = (ROOT / "docs/concepts.md").read_text()
    for name, draw in concept_pictures.DRAWN.items():
        assert (concept_pictures.PICTURES / name).read_text() == draw(), "run `python tools/concept_pictures.py`"
        assert f"](pictures/{name})" in page

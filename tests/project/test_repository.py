"""What holds for every file of the repository."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from common import __version__
from common.settings import flags_of
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"__pycache__", "build", "dist"}

# Put together here so that this file is not one of those that name them.
BUILD_PLACES = re.compile(
    "|".join(
        [
            "/" + r"work\b",
            r"(?<![\w.])/" + r"(root|home|Users)/",
            r"\.\." + r"/shared\b",
            r"\." + "library",
            r"py" + r"pi\.(org|python)",
            "python" + r"hosted\.org",
            "registry" + r"\.npmjs",
            "download" + r"\.pytorch",
        ]
    )
)


def _files() -> Iterator[Path]:
    """All files but those that tools make; a path is relative to the repository."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_OURS
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in (".ci", ".github"))
        ]
        yield from (Path(folder, name).relative_to(ROOT) for name in names)


def test_no_file_names_the_machine_it_was_made_on() -> None:
    """Nothing points outside the repository: no home folder, no build folder, no registry's host."""
    found = [
        f"{path}:{line_number}: {line.strip()[:120]}"
        for path in _files()
        for line_number, line in enumerate((ROOT / path).read_bytes().decode(errors="replace").splitlines(), start=1)
        if BUILD_PLACES.search(line)
    ]
    assert not found


def test_the_search_for_machine_paths_finds_one() -> None:
    """The pattern sees a build folder and lets ordinary paths pass, so the check above can fail."""
    assert BUILD_PLACES.search("see /" + "work/main/x.py")
    assert BUILD_PLACES.search("cd ../" + "shared/facts")
    assert not BUILD_PLACES.search("models/tiny-llada2 and /usr/bin/env, network/worker/shared/pages")


def test_one_version() -> None:
    """The version in common is the one the package is built with, and the changelog has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_readmes_test_command() -> None:
    """README tells `make test`, and .ci/run runs just that."""
    assert re.search(r"^\$? ?make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test </dev/null"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_every_flag_has_a_row() -> None:
    """Each flag of both services stands in docs/flags.md, in the table of each service that has it."""
    _, tables = (ROOT / "docs/flags.md").read_text().split("## Scheduler\n")
    scheduler, worker = tables.split("## Worker\n")
    for table, settings in ((scheduler, SchedulerSettings), (worker, WorkerSettings)):
        rows = "".join(line for line in table.splitlines(keepends=True) if line.startswith("| `--"))
        assert not {flag for flag in flags_of(settings) if not flag.startswith("--no-") and f"`{flag}`" not in rows}


def test_every_test_says_what_holds() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{path.name}: {match[1]}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for match in re.finditer(r'def (test_\w+)\([^)]*\)[^:]*:\n(?!\s+r?""")', path.read_text())
    ]
    assert not silent

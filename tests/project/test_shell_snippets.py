"""Every shell snippet of the documents: commands of `fdfo` run or at least parse, the rest names what is there.

A snippet is a block marked `sh`, or the lines after `$ ` of a block without a mark.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdfo_client.cli import COMMANDS, build_parser
from tests.chaos.scenario import names as scenario_names
from tests.e2e.served import serving

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGET = "127.0.0.1:50051"
ASKS_A_SERVER = re.compile(r"\bfdfo (generate|chat|info|top|doctor|eval|bench|replay)\b")

# Commands of fdfo that are parsed and not run, by how they begin, and why.
NOT_RUN = {
    "serve": "the one server that the others ask is started by the test, on a free port",
    "trace": "starts services of its own, twice; tests/client/test_trace_cli.py runs both forms",
    "top": "is live until Ctrl-C; tests/e2e/test_commands.py runs it with --once",
    "doctor --model-path FOLDER": "FOLDER is the reader's",
    "doctor --device cuda": "shows what fails without a GPU; tests/client/test_doctor.py has each finding",
    "generate --tls-ca-file": "needs the server of the block before it; tests/security/test_tls.py has one",
    "bench": "takes seconds; tests/client/test_bench_cli.py runs each flag",
    "replay": "takes seconds; tests/client/test_bench_cli.py replays what it recorded",
    "chaos": "takes minutes, but for --list; tests/chaos runs the short scenarios",
}
RUN_ALL_THE_SAME = {"chaos --list"}
# Commands of others: whose test, or why none.
OTHERS = {
    "curl": "needs the gateway; tests/e2e/test_openai.py asks it through the package openai",
    "smg": "the package's own; tests/e2e/test_openai.py starts it",
    "kubectl": "needs a cluster; the files that it names are looked for here",
    "export": "the shell's own",
    "docker": "needs a daemon; the files that it names are looked for here",
}
# Blocks that run as they stand, by their page and their first word.
SCRIPTS = {("docs/security.md", "mkdir"): "openssl"}


def pages() -> list[str]:
    found = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@functools.cache
def blocks(page: str) -> list[str]:
    """The snippets of a page, without `$ ` and what was printed; each line is a whole command."""
    found = []
    for mark, text in BLOCK.findall((ROOT / page).read_text()):
        if not mark:
            text = "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith("$ "))
        if text:
            found.append(text.replace("\\\n", " ").replace(".venv/bin/", ""))
    return found


def commands(page: str) -> Iterator[str]:
    """Line by line, but for blocks that run whole."""
    for block in blocks(page):
        if (page, block.split()[0]) not in SCRIPTS:
            yield from (line for line in block.splitlines() if shlex.split(line, comments=True))


def words_of(command: str) -> list[str]:
    """The words of the last command of a pipe, without variables before it and the comment behind it."""
    words = shlex.split(command, comments=True)
    while "|" in words:
        words = words[words.index("|") + 1 :]
    return [*itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words)]


def reason_not_to_run(words: list[str]) -> str | None:
    """The beginning in NOT_RUN, for the words after `fdfo`."""
    text = " ".join(words)
    if text in RUN_ALL_THE_SAME:
        return None
    return next((begin for begin in NOT_RUN if f"{text} ".startswith(f"{begin} ")), None)


PAGES = [page for page in pages() if blocks(page)]
RUN = [
    page
    for page in PAGES
    if any(words_of(c)[0] == "fdfo" and reason_not_to_run(words_of(c)[1:]) is None for c in commands(page))
]


def check(command: str) -> None:
    """Whatever a command names is there. Raises AssertionError."""
    first, *words = words_of(command)
    for word in words:  # paths of the repository
        folder = word.partition("/")[0]
        if "/" in word and folder and (ROOT / folder).is_dir():
            assert (ROOT / word).exists(), f"{command}: no {word}"
    if first == "fdfo" and words[0] == "chaos":
        named = {word for word in words[1:] if not word.startswith("-") and "/" not in word}
        assert named <= {*scenario_names(), "all"}, command
    elif first == "fdfo":
        try:
            build_parser(words[:1]).parse_args(words)
        except SystemExit as error:
            raise AssertionError(f"{command}: is refused") from error
    elif first == "make":
        for target in (word for word in words if "=" not in word):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    elif first == "python":
        assert importlib.util.find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).is_file(), command
    elif first == "pip":  # the extras that it names are ours
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\w+", "".join(re.findall(r"fdfo\[(.*?)\]", command)))) <= extras.keys(), command
    else:
        assert first in OTHERS, f"{command}: say in OTHERS how this is tried"


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_is_there(page: str) -> None:
    """Flags are those of the command, targets those of the Makefile; modules, scenarios and files exist."""
    for command in commands(page):
        check(command)


@pytest.mark.parametrize(
    "wrong",
    [
        "fdfo generate --no-such-flag x",
        "fdfo nothing",
        "fdfo chaos no-such-scenario",
        "make nothing",
        "python -m no_such_module",
        "kubectl apply -k docs/nowhere",
        "unknown command",
    ],
)
def test_a_command_that_is_not_there_is_seen(wrong: str) -> None:
    """Each kind of command fails when what it names does not exist."""
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the small model, for all that the snippets ask."""
    with serving(tmp_path_factory.mktemp("serve") / "log") as served:
        yield served.target


@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run(page: str, target: str, tmp_path: Path) -> None:
    """What asks the server at the usual port asks one that runs, as typed, and ends with status 0."""
    script = ["set -eo pipefail", f'fdfo() {{ "{sys.executable}" -m fdfo_client "$@"; }}']
    for command in commands(page):
        first, *words = words_of(command)
        if first == "fdfo" and reason_not_to_run(words) is None:
            asked = command.replace(TARGET, target)
            script.append(ASKS_A_SERVER.sub(rf"\g<0> --target {target}", asked) if asked == command else asked)
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize(("page", "first"), list(SCRIPTS))
def test_a_script_runs(page: str, first: str, tmp_path: Path) -> None:
    """It runs as it stands, and leaves the files that the commands after it name."""
    if shutil.which(SCRIPTS[page, first]) is None:
        pytest.skip(f"needs {SCRIPTS[page, first]}")
    (script,) = (block for block in blocks(page) if block.split()[0] == first)
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = {word for command in commands(page) for word in words_of(command) if word.startswith("trial/")}
    assert len(named) > 3 and not {name for name in named if not (tmp_path / name).is_file()}


def test_no_reason_is_left_over() -> None:
    """What is told of commands that do not run is told of commands that there are, and names tests that there are."""
    every = [words_of(command) for page in PAGES for command in commands(page)]
    skipped = {reason_not_to_run(words[1:]) for words in every if words[0] == "fdfo"}
    assert skipped - {None} == set(NOT_RUN)
    for reason in [*NOT_RUN.values(), *OTHERS.values()]:
        for path in re.findall(r"tests/[\w/]+(?:\.py)?", reason):
            assert (ROOT / path).exists(), reason


@pytest.mark.parametrize("page", pages())
def test_commands_in_the_text_are_there(page: str) -> None:
    """`make X` and `fdfo X` inside a sentence name a target and a command."""
    text = BLOCK.sub("", (ROOT / page).read_text())
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert set(re.findall(r"`(?:\.venv/bin/)?fdfo ([a-z]+)", text)) <= set(COMMANDS)

"""Scenarios as data: every file that ships is valid, and what is wrong in one is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fdfo_client import cli
from fdfo_client.commands import chaos
from tests.chaos.__main__ import BEGIN, END, main, markdown
from tests.chaos.runner import Result, RunResult
from tests.chaos.scenario import BadScenario, names, parse, read

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", names())
def test_every_scenario_that_ships_is_valid(name: str) -> None:
    """Both versions of each file can be read, and the short one is given up no later than the long one."""
    assert read(name, short=True).limit_s <= read(name).limit_s


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "summary: is missing"),
        ({"sumary": ""}, "sumary: unknown; there are summary, "),
        ({"load": {"requests": "many"}}, "load.requests: must be a whole number, not 'many'"),
        ({"load": {"requests": True}}, "load.requests: must be a whole number, not True"),
        ({"load": {"kind": "odd"}}, "load.kind: must be one of 'mixed', "),
        ({"load": 3}, "load: must be a table, not 3"),
        ({"services": {"worker_flags": "--x"}}, "services.worker_flags: must be a list, not '--x'"),
        ({"services": {"environment": {"A": 1}}}, "services.environment.A: must be text, not 1"),
        ({"services": {"workers": 0}}, "services: at least one worker"),
        ({"events": [{"do": "burn"}]}, "events[0].do: must be one of 'kill', "),
        ({"events": [{"do": "kill", "rules": {"drop": 1}}]}, "events[0].rules.drop: unknown; there are drop_request"),
        ({"events": [{"do": "cut"}]}, "events[0].do: 'cut' needs services.proxy = 'tcp'"),
        ({"events": [{"do": "kill", "who": "worker 1"}]}, "events[0].who: 'worker 1' is not worker"),
        ({"events": [{"do": "kill", "every_s": 1}]}, "events[0].until_s: must be above at_s"),
        ({"events": [{"do": "pause"}]}, "events[0].for_s: must be above 0 for 'pause'"),
        ({"runs": [{"name": "a", "load": {"x": 1}}]}, "runs[0].load.x: unknown"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "runs: two have the same name"),
        ({"bounds": [{"figure": "x", "run": "b", "at_most": 1}]}, "bounds[0].run: no run is named 'b'"),
        ({"bounds": [{"figure": "x"}]}, "bounds[0]: at_least or at_most is missing"),
        ({"short": {"load": {"x": 1}}}, "short.load.x: unknown"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(content: dict[str, Any], message: str) -> None:
    """Each kind of mistake is refused with the path of the key in the file."""
    good = {"summary": "x"} if content and "sumary" not in content else {}
    with pytest.raises(BadScenario) as error:
        parse("x", {**good, **content})
    assert str(error.value).startswith(message)


def test_runs_and_the_short_version_change_what_they_name() -> None:
    """Tables are merged key by key, lists are replaced, and the rest stays."""
    content = {
        "summary": "x",
        "services": {"workers": 2, "worker_flags": ["--a"]},
        "load": {"requests": 9, "seed": 5},
        "events": [{"do": "kill"}],
        "runs": [{"name": "one"}, {"name": "two", "services": {"worker_flags": ["--b"]}, "events": []}],
        "short": {"load": {"requests": 3}},
    }
    one, two = parse("x", content).runs
    assert (one.services.workers, one.services.worker_flags, len(one.events)) == (2, ["--a"], 1)
    assert (two.services.workers, two.services.worker_flags, len(two.events)) == (2, ["--b"], 0)
    assert (one.load.requests, one.load.seed) == (9, 5)
    assert [(run.load.requests, run.load.seed) for run in parse("x", content, short=True).runs] == [(3, 5), (3, 5)]


def test_the_command_lists_scenarios_anywhere_in_the_file_system(tmp_path: Path) -> None:
    """`fdfo chaos --list` names every scenario, from another folder too."""
    words = [sys.executable, "-m", "fdfo_client", "chaos", "--list"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    listed = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()] == names()


def test_outside_a_checkout_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed package has no scenarios: one line says where they are, with status 2."""
    monkeypatch.setattr(chaos, "CHECKOUT", tmp_path)
    assert cli.main(["chaos", "worker-kills"]) == 2
    assert "run it in a checkout" in capsys.readouterr().err


def test_wrong_usage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown scenario, none at all, and a page without the marks end with status 2 and a line that says so."""
    assert main(["no-such"]) == 2
    assert "no-such: no such scenario; there are broken-connections, " in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("nothing")
    for words, message in (([], "name a scenario"), (["soak", "--markdown", str(page)], BEGIN)):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err


def test_the_table_tells_what_passed_failed_and_was_skipped() -> None:
    """A row for each scenario with its figures, or with its first fault, or with why it was not run."""
    scenario = read("soak")
    results = [
        Result(scenario, [RunResult("", {"tokens/s": 1234.5})], []),
        Result(scenario, [], ["2 requests failed, not 0", "more"]),
        Result(scenario, [], [], "no history"),
    ]
    rows = [line.split("|")[3].strip() for line in markdown(results).splitlines()[4:]]
    assert rows == ["passed: tokens/s 1234", "**failed**: 2 requests failed, not 0", "skipped: no history"]


def test_the_page_of_results_has_the_marks() -> None:
    """docs/reliability.md has a place for results that `--markdown` finds."""
    page = (ROOT / "docs/reliability.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1

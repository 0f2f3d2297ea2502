"""Flags from dataclasses: what is read, what is refused, and the way back to a command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.configuration import parse_settings as parse_all
from common.settings import add_flags, build_parser, flags_of, setting, settings_from, to_argv
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

S = TypeVar("S", bound=Any)


def parse_settings(cls: type[S], argv: list[str]) -> S:
    return parse_all(cls, argv, env_prefix="X_", environment={})


def _even(text: str) -> None:
    if len(text) % 2:
        raise ValueError("an even number of characters is needed")


@dataclass(frozen=True, kw_only=True)
class Example:
    folder: Path = setting(help="where to look", metavar="DIR")
    count: int = setting(3, help="how many; 100% of them", minimum=0, maximum=10)
    wait_s: float = setting(0.5, help="how long", minimum=0.1, flag="--wait")
    limit: int | None = setting(None, help="at most", minimum=1)
    kind: str = setting("a", help="which", choices=("a", "b"))
    name: str | None = setting(None, help="called", check=_even)
    fast: bool = setting(True, help="quickly")
    loud: bool = setting(False, help="noisily")


def test_defaults_stand_when_only_the_required_flag_is_given() -> None:
    """Flags that are not given leave the defaults of the fields."""
    assert parse_settings(Example, ["--folder", "x"]) == Example(folder=Path("x"))


def test_each_type_is_read() -> None:
    """bool, int, float, str, Path and the optional ones are read as what their field says."""
    line = "--folder x --count 7 --wait 2 --limit 4 --kind b --name four --no-fast --loud"
    wanted = Example(folder=Path("x"), count=7, wait_s=2.0, limit=4, kind="b", name="four", fast=False, loud=True)
    assert parse_settings(Example, line.split()) == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--folder: must be given: by this flag, by X_FOLDER or in the file of --config"),
        ("--folder x --count 11", "argument --count: '11' is not a whole number from 0 to 10"),
        ("--folder x --count 1.5", "argument --count: '1.5' is not a whole number from 0 to 10"),
        ("--folder x --limit 0", "argument --limit: '0' is not a whole number of at least 1"),
        ("--folder x --wait nan", "argument --wait: 'nan' is not a number of at least 0.1"),
        ("--folder x --wait inf", "argument --wait: 'inf' is not a number of at least 0.1"),
        ("--folder x --kind c", "argument --kind: 'c' is none of a, b"),
        ("--folder x --name odd", "argument --name: 'odd': an even number of characters is needed"),
        ("--folder x --cou 3", "unrecognized arguments: --cou 3; did you mean --count?"),
    ],
)
def test_a_wrong_value_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong ends with status 2 and a line that names the flag and what is allowed."""
    with pytest.raises(SystemExit) as end:
        parse_settings(Example, line.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_help_shows_defaults_and_examples() -> None:
    """The help page has every flag, its default and the examples."""
    page = build_parser(Example, "example", "An example.", ["example --folder here"]).format_help()
    assert flags_of(Example) == {
        *("--folder", "--count", "--wait", "--limit", "--kind", "--name", "--fast", "--no-fast", "--loud", "--no-loud")
    }
    assert all(flag in page for flag in flags_of(Example))
    assert "how many; 100% of them (default: 3)" in page
    assert "quickly (default: on)" in page
    assert "examples:\n  example --folder here" in page


def test_two_dataclasses_share_a_parser() -> None:
    """Flags can be added in part; a field that was skipped keeps its default."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Example, skip={"count", "folder"})
    parser.add_argument("--folder", type=Path)
    got = settings_from(Example, parser.parse_args(["--folder", "y", "--kind", "b"]))
    assert got == Example(folder=Path("y"), kind="b")
    with pytest.raises(SystemExit):
        parser.parse_args(["--count", "3"])


@given(
    st.builds(
        Example,
        folder=st.sampled_from([Path("x"), Path("-x"), Path("a b"), Path("--loud")]),
        count=st.integers(0, 10),
        wait_s=st.floats(0.1, 1e9),
        limit=st.none() | st.integers(1),
        kind=st.sampled_from(["a", "b"]),
        name=st.none() | st.sampled_from(["", "--no-fast ", "=1", "ab"]),
        fast=st.booleans(),
        loud=st.booleans(),
    )
)
def test_to_argv_is_the_way_back(example: Example) -> None:
    """The command line made of any settings is read as the same settings."""
    assert parse_settings(Example, to_argv(example)) == example


@pytest.mark.parametrize("cls", [SchedulerSettings, WorkerSettings])
def test_flags_of_the_services_are_field_names(cls: type[SchedulerSettings] | type[WorkerSettings]) -> None:
    """A service's flag is its field's name with dashes; the two timeouts are called as the field calls them."""
    unlike = {"hang_timeout_s": "--hang-timeout", "sync_round_timeout_s": "--sync-round-timeout"}
    names = {unlike.get(field.name, "--" + field.name.replace("_", "-")) for field in fields(cls)}
    assert {flag for flag in flags_of(cls) if not flag.startswith("--no-")} == names
    assert parse_settings(cls, ["--model-path", "m"]) == cls(model_path=Path("m"))


def test_workers_of_a_scheduler() -> None:
    """--workers takes host:port and names of DNS, one or several, and nothing else."""
    several = parse_settings(SchedulerSettings, ["--model-path", "m", "--workers", "a:1, [::1]:65535"])
    assert (several.worker_targets, several.worker_names) == (("a:1", "[::1]:65535"), ())
    mixed = parse_settings(SchedulerSettings, ["--model-path", "m", "--workers", "dns:///b.c:2,a:1"])
    assert (mixed.worker_targets, mixed.worker_names) == (("a:1",), ("b.c:2",))
    names = ("dns:///a", "dns://a:1", "dns:///:1", "dns://8.8.8.8/a:1", "dns:a:1")
    for wrong in ("", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "a:x", "::1:1", "a:1,a:1", *names):
        with pytest.raises(SystemExit):
            parse_settings(SchedulerSettings, ["--model-path", "m", f"--workers={wrong}"])


def test_devices_of_a_worker() -> None:
    """--device takes the CPU and numbered CUDA devices, and nothing else."""
    for right in ("cpu", "cuda", "cuda:1"):
        assert parse_settings(WorkerSettings, ["--model-path", "m", "--device", right]).device == right
    for wrong in ("", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(SystemExit):
            parse_settings(WorkerSettings, ["--model-path", "m", f"--device={wrong}"])

"""What settings are in effect: flags over variables over a file over defaults, and what is refused of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.configuration import as_yaml, parse_settings, read_file
from common.settings import setting, settings_of
from scheduler_svc import settings as of_scheduler
from scheduler_svc.settings import SchedulerSettings
from worker_svc import settings as of_worker
from worker_svc.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class Example:
    folder: Path = setting(help="where to look", metavar="DIR")
    max_count: int = setting(3, help="how many", minimum=0, maximum=10)
    wait_s: float = setting(0.5, help="how long", minimum=0.1, flag="--wait")
    limit: int | None = setting(None, help="at most", minimum=1)
    kind: str = setting("a", help="which", choices=("a", "b"))
    name: str | None = setting(None, help="called")
    fast: bool = setting(True, help="quickly")
    port: int = setting(1, help="where", minimum=0)


def parse(line: str = "", file: Path | None = None, environment: Mapping[str, str] | None = None) -> Example:
    argv = [*line.split(), *([] if file is None else ["--config", str(file)])]
    return parse_settings(Example, argv, env_prefix="APP_", environment=environment or {})


def file_of(folder: Path, text: str) -> Path:
    path = folder / "app.yaml"
    path.write_text(text)
    return path


def test_flags_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """Each of four settings comes from the highest of the places that name it."""
    file = file_of(tmp_path, "folder: of-file\nmax-count: 1\nwait: 1\nkind: b\n")
    got = parse("--max-count 3", file, {"APP_MAX_COUNT": "2", "APP_WAIT": "2"})
    assert got == Example(folder=Path("of-file"), max_count=3, wait_s=2.0, kind="b")


@pytest.mark.parametrize(
    ("text", "is_fast", "name"),
    [("fast: false\nname: 007", False, "007"), ("fast: true\nname: 'null'", True, "null"), ("name: null", True, None)],
)
def test_a_file_gives_the_text_that_stands_there(tmp_path: Path, text: str, is_fast: bool, name: str | None) -> None:
    """A value is read as a flag's would be, zeros at its front included; null stands for what is absent by default."""
    got = parse("--folder x", file_of(tmp_path, text))
    assert (got.fast, got.name) == (is_fast, name)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("APP_MAX_COUNT", "11", "APP_MAX_COUNT: '11' is not a whole number from 0 to 10"),
        ("APP_FAST", "yes", "APP_FAST: 'yes' is neither true nor false"),
        ("APP_KIND", "c", "APP_KIND: 'c' is none of a, b"),
        ("APP_NAME", "", "APP_NAME: is empty; unset it, or give it a value"),
        ("APP_MAX_COUNTS", "1", "APP_MAX_COUNTS: no such setting; did you mean APP_MAX_COUNT?"),
        ("APP_ZZZ", "1", "APP_ZZZ: no such setting; --help lists all"),
        ("APP_WAIT_S", "1", "APP_WAIT_S: no such setting; did you mean APP_WAIT?"),
        ("APP_PORT", "http://x", "APP_PORT: 'http://x' is not a whole number of at least 0"),
    ],
)
def test_a_wrong_variable_is_refused(variable: str, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the variable and what is allowed, or the name that is nearest."""
    with pytest.raises(SystemExit, match="2"):
        parse("--folder x", environment={variable: text})
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nmax-count: x", "FILE line 2: max-count: 'x' is not a whole number from 0 to 10"),
        ("max_count: 3", "FILE line 1: max_count: no such setting; did you mean max-count?"),
        ("kind: a\nkind: b", "FILE line 2: kind: is there twice, also at FILE line 1"),
        ("max-count: null", "FILE line 1: max-count: has no value; leave the line out for the default"),
        ("kind: [a, b]", "FILE line 1: kind: must be one value; several stand in one, with commas"),
        ("- kind", "--config: FILE: must have lines `name: value`, as --print-config prints them"),
        ("fast: yes", "FILE line 1: fast: 'yes' is neither true nor false"),
        ("{", "--config: FILE is no YAML: "),
        (None, "--config: FILE: No such file or directory"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the file, the line, the key and what is allowed."""
    path = tmp_path / "missing.yaml" if text is None else file_of(tmp_path, text)
    with pytest.raises(SystemExit, match="2"):
        parse("--folder x", path)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {said.replace('FILE', str(path))}" in last_line


@pytest.mark.parametrize(
    ("cls", "prefix", "service"),
    [
        (SchedulerSettings, of_scheduler.ENV_PREFIX, "FDFO_SCHEDULER"),
        (WorkerSettings, of_worker.ENV_PREFIX, "FDFO_WORKER"),
    ],
)
def test_variables_that_kubernetes_sets_for_a_service_are_no_settings(
    cls: type[SchedulerSettings] | type[WorkerSettings], prefix: str, service: str
) -> None:
    """In a pod beside Services called as ours, or as ours and more, all links of those are passed over; a port that the
    pod's own manifest sets under the same name counts."""
    links: dict[str, str] = {}
    for name in (service, f"{service}_METRICS", f"{service}_HEADLESS_2"):
        links |= {
            f"{name}_SERVICE_HOST": "10.0.0.7",
            f"{name}_SERVICE_PORT": "50051",
            f"{name}_SERVICE_PORT_GRPC": "50051",
            f"{name}_PORT": "tcp://10.0.0.7:50051",
            f"{name}_PORT_50051_TCP": "tcp://10.0.0.7:50051",
            f"{name}_PORT_50051_TCP_PROTO": "tcp",
            f"{name}_PORT_50051_TCP_PORT": "50051",
            f"{name}_PORT_50051_TCP_ADDR": "10.0.0.7",
        }
    argv = ["--model-path", "m"]
    assert parse_settings(cls, argv, env_prefix=prefix, environment=links) == cls(model_path=Path("m"))
    links[f"{service}_PORT"] = "6000"
    assert parse_settings(cls, argv, env_prefix=prefix, environment=links).port == 6000


def test_a_pod_with_both_services_sets_each_apart() -> None:
    """Variables of the one service say nothing to the other."""
    environment = {"FDFO_SCHEDULER_LOG_LEVEL": "debug", "FDFO_WORKER_PAGE_SIZE": "64", "FDFO_API_KEY": "k"}
    argv = ["--model-path", "m"]
    scheduler = parse_settings(SchedulerSettings, argv, env_prefix=of_scheduler.ENV_PREFIX, environment=environment)
    worker = parse_settings(WorkerSettings, argv, env_prefix=of_worker.ENV_PREFIX, environment=environment)
    assert scheduler == SchedulerSettings(model_path=Path("m"), log_level="debug")
    assert worker == WorkerSettings(model_path=Path("m"), page_size=64)


def test_print_config_tells_values_and_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints every setting with where it comes from and ends with status 0."""
    file = file_of(tmp_path, "kind: b\n")
    with pytest.raises(SystemExit, match="0"):
        parse("--folder x --print-config", file, {"APP_FAST": "false"})
    assert capsys.readouterr().out.splitlines() == [
        "folder: x  # flag",
        "max-count: 3  # default",
        "wait: 0.5  # default",
        "limit: null  # default",
        f"kind: b  # {file} line 1",
        "name: null  # default",
        "fast: false  # APP_FAST",
        "port: 1  # default",
    ]


@hypothesis_settings(max_examples=25)
@given(
    st.builds(
        Example,
        folder=st.sampled_from([Path("x"), Path("-x"), Path("a b"), Path("null"), Path("# ü")]),
        max_count=st.integers(0, 10),
        wait_s=st.floats(0.1, 1e300),
        limit=st.none() | st.integers(1),
        kind=st.sampled_from(["a", "b"]),
        name=st.none()
        | st.sampled_from(["", "true", "007", "1e3", "a: b # c", "two\nlines ", "'", "*x", "~", "\x7f", "😀"]),
        fast=st.booleans(),
    )
)
def test_what_print_config_prints_is_a_file(tmp_path_factory: pytest.TempPathFactory, example: Example) -> None:
    """Whatever is printed gives the same settings again when it is the file."""
    path = file_of(tmp_path_factory.getbasetemp(), as_yaml(example, {}))
    values = {name: value for name, (value, _) in read_file(Example, path).items()}
    assert Example(**values) == example


@pytest.mark.parametrize("cls", [SchedulerSettings, WorkerSettings])
def test_every_setting_of_the_services_can_be_printed_and_read(
    tmp_path: Path, cls: type[SchedulerSettings] | type[WorkerSettings]
) -> None:
    """The defaults of both services pass through YAML, and no name of a setting is that of a service link."""
    settings = cls(model_path=Path("m"))
    printed = as_yaml(settings, {})
    assert set(yaml.safe_load(printed)) == {each.key for each in settings_of(cls)}
    assert len(yaml.safe_load(printed)) == len(fields(cls))
    values = {name: value for name, (value, _) in read_file(cls, file_of(tmp_path, printed)).items()}
    assert cls(**values) == settings
    assert not [each.key for each in settings_of(cls) if re.search(r"service-(host|port)|port-\d", each.key)]

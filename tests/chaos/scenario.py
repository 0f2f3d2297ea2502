"""A scenario as data: what runs, what is sent, what goes wrong, and what must hold. One TOML file each."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

FOLDER = Path(__file__).parent / "scenarios"

Do = Literal["kill", "terminate", "pause", "rules", "cut", "stall", "half-open"]
NEEDS_PROXY: dict[str, str] = {"rules": "grpc", "cut": "tcp", "stall": "tcp", "half-open": "tcp"}

T = TypeVar("T")


class BadScenario(Exception):
    """One line: the file, the key in it, and what is wrong."""


@dataclass(frozen=True)
class Services:
    """What is started. Flags go to every worker or scheduler; `previous` names those that run the last release.

    proxy: what stands between each worker and all schedulers.
    """

    model: Literal["tiny", "simulated"] = "tiny"
    workers: int = 1
    schedulers: int = 1
    worker_flags: list[str] = field(default_factory=list)
    scheduler_flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    proxy: Literal["", "grpc", "tcp"] = ""
    previous: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """What is sent: `requests` of them, or new ones for `duration_s`.

    kind: "mixed" has greedy and drawn tokens, both algorithms, stop strings and multi-byte text from the shipped
        problems; "random" has prompts of `prompt_tokens` random tokens, answered in full; "killed clients" runs client
        processes that abort some of their `requests_per_client` requests and are killed at a random moment of
        `lives_s`.
    concurrency: so many at a time, over all schedulers, or at each of them with `at_each_scheduler`.
    over_s: sent evenly over so many seconds instead, however many are under way.
    poison_token_id: one more request has this token in its prompt; it is to fail.
    hostile: so many hostile messages beside it to a worker and a scheduler, half each.
    """

    kind: Literal["mixed", "random", "killed clients"] = "mixed"
    requests: int = 64
    duration_s: float = 0.0
    output_tokens: list[int] = field(default_factory=lambda: [64, 64])
    prompt_tokens: int = 32
    concurrency: int = 32
    at_each_scheduler: bool = False
    over_s: float = 0.0
    poison_token_id: int = 0
    hostile: int = 0
    requests_per_client: int = 25
    clients_at_once: int = 4
    lives_s: list[float] = field(default_factory=lambda: [0.0, 2.0])
    timeout_s: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class Rules:
    """What the gRPC proxy does to a call, each with its probability. The whole is a table of what may happen.

    A dropped request or reply ends the call with UNAVAILABLE, as a lost connection does. A reordered call waits for
    the next one to overtake it.
    """

    drop_request: float = 0.0
    drop_reply: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    delay_ms: float = 50.0


@dataclass(frozen=True)
class Event:
    """Something that goes wrong at `at_s` seconds after the load's start, or from then on `every_s` until `until_s`.

    who: "worker" or "scheduler" takes them in turn, "worker 1" that one, "each worker", "each scheduler" and "each"
        one after the other, the next when the last is back.
    for_s: how long a pause, a stall, a half-open connection or the proxies' rules last.
    """

    do: Do
    who: str = "worker"
    at_s: float = 0.0
    every_s: float = 0.0
    until_s: float = 0.0
    for_s: float = 0.0
    restart: bool = True
    rules: Rules = Rules()


@dataclass(frozen=True)
class Bound:
    """A figure of a run, or its ratio to the same figure of another run, must lie within these."""

    figure: str
    run: str = ""
    relative_to: str = ""
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Checks:
    """What must hold beside the bounds.

    failed: requests that may fail; with a poisoned one it is that one and no other. error: what each of them says.
    equal: answers equal those of the same load without events ("calm"), or those of the first run ("first run").
    idle_within_s: the pool is whole, nothing is held, queued or running, so long after the load's end.
    """

    failed: int = 0
    error: str = ""
    equal: Literal["", "calm", "first run"] = ""
    idle_within_s: float = 5.0


@dataclass(frozen=True)
class Run:
    """One start of services with one load. Several runs of a scenario are compared by bounds."""

    name: str
    services: Services
    load: Load
    events: list[Event]


@dataclass(frozen=True)
class Scenario:
    """A file: its summary, its runs, its checks, and the seconds after which it is given up."""

    name: str
    summary: str
    runs: list[Run]
    checks: Checks
    bounds: list[Bound]
    limit_s: float


@dataclass(frozen=True)
class _File:
    summary: str
    limit_s: float = 120.0
    services: Services = Services()
    load: Load = Load()
    events: list[Event] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    checks: Checks = Checks()
    bounds: list[Bound] = field(default_factory=list)


def names() -> list[str]:
    """The scenarios that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str, *, short: bool = False) -> Scenario:
    """A shipped scenario, or that of a file; `short`: as its table [short] changes it. Raises BadScenario."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadScenario(f"{name}: no such scenario; there are {', '.join(names())}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadScenario(f"{path.name}: {error}") from None
    try:
        return parse(path.stem, content, short=short)
    except BadScenario as error:
        raise BadScenario(f"{path.name}: {error}") from None


def parse(name: str, content: dict[str, Any], *, short: bool = False) -> Scenario:
    """A scenario from the content of its file. Raises BadScenario naming the key."""
    content = dict(content)
    changes = content.pop("short", {})
    if not isinstance(changes, dict):
        raise BadScenario("short: must be a table")
    if short:
        content = _merged(content, changes)
    file = _build(_File, content, "")
    _build(_File, _merged(content, changes), "short.")  # checked even where it is not asked for
    common = {key: content.get(key, {}) for key in ("services", "load")} | {"events": content.get("events", [])}
    runs = []
    for index, own in enumerate(file.runs or [{"name": ""}]):
        place = f"runs[{index}]."
        run = _build(Run, {"name": "", **_merged(common, own)}, place if file.runs else "")
        _check_run(run, place if file.runs else "")
        runs.append(run)
    run_names = [run.name for run in runs]
    if len(set(run_names)) < len(run_names):
        raise BadScenario("runs: two have the same name")
    for index, bound in enumerate(file.bounds):
        for key in ("run", "relative_to"):
            if getattr(bound, key) and getattr(bound, key) not in run_names:
                raise BadScenario(f"bounds[{index}].{key}: no run is named {getattr(bound, key)!r}")
        if bound.at_least is None and bound.at_most is None:
            raise BadScenario(f"bounds[{index}]: at_least or at_most is missing")
    return Scenario(name, file.summary, runs, file.checks, file.bounds, file.limit_s)


def _check_run(run: Run, place: str) -> None:
    if run.services.workers < 1 or run.services.schedulers < 1:
        raise BadScenario(f"{place}services: at least one worker and one scheduler")
    for index, event in enumerate(run.events):
        here = f"{place}events[{index}]"
        wanted = NEEDS_PROXY.get(event.do)
        if wanted is not None and run.services.proxy != wanted:
            raise BadScenario(f"{here}.do: {event.do!r} needs services.proxy = {wanted!r}")
        kind, _, number = event.who.removeprefix("each").strip().partition(" ")
        count = {"worker": run.services.workers, "scheduler": run.services.schedulers}.get(kind, 0)
        if event.who != "each" and (not count or (number and not (number.isdecimal() and int(number) < count))):
            raise BadScenario(f"{here}.who: {event.who!r} is not worker, scheduler, one with its number, or each")
        if event.every_s and event.until_s <= event.at_s:
            raise BadScenario(f"{here}.until_s: must be above at_s")
        if event.do in ("pause", "stall", "half-open", "rules") and event.for_s <= 0:
            raise BadScenario(f"{here}.for_s: must be above 0 for {event.do!r}")


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _build(kind: type[T], content: dict[str, Any], place: str) -> T:
    """The dataclass `kind` from a table, checked by the types of its fields."""
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(typing.cast(Any, kind))}
    for key in content:
        if key not in fields:
            raise BadScenario(f"{place}{key}: unknown; there are {', '.join(fields)}")
    for key, each in fields.items():
        if key not in content and each.default is each.default_factory is dataclasses.MISSING:
            raise BadScenario(f"{place}{key}: is missing")
    return kind(**{key: _value(hints[key], value, f"{place}{key}") for key, value in content.items()})


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _value(arguments[0], value, place)
    if origin is Literal:
        if value not in arguments:
            raise BadScenario(f"{place}: must be one of {', '.join(map(repr, arguments))}, not {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), _value(dict, value, place), f"{place}.")
    wanted = origin or hint
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        kind = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
        raise BadScenario(f"{place}: must be {kind.get(wanted, 'a list')}, not {value!r}")
    if origin is list:
        return [_value(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if origin is dict and arguments[1] is not Any:
        return {key: _value(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    return value

"""Which settings are in effect: flags over the environment over a file over the defaults.

    settings = parse_settings(WorkerSettings, env_prefix="FDFO_WORKER_", prog="python -m worker_svc")

    --page-size 64                  a flag
    FDFO_WORKER_PAGE_SIZE=64        the prefix and the flag's name in capitals; a switch is true or false
    page-size: 64                   in the YAML file of --config

A key that is no setting and a value that is not allowed are refused wherever they stand. Kubernetes puts variables such
as FDFO_WORKER_PORT=tcp://10.0.0.7:50052 into a pod when a Service is called fdfo-worker; these are no settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from common.settings import Setting, build_parser, flags_of, settings_from, settings_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

_LINK_NAME = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class BadSetting(Exception):
    """One line: where it stands, its name, what is allowed."""


class Found(NamedTuple):
    """The value of a setting and where it stands."""

    value: Any
    source: str


def read_environment(cls: type[DataclassInstance], prefix: str, environment: Mapping[str, str]) -> dict[str, Found]:
    """The fields of `cls` that variables with this prefix set, by name. Raises BadSetting."""
    settings = {setting.key.upper().replace("-", "_"): setting for setting in settings_of(cls)}
    found = {}
    for variable, text in environment.items():
        key = variable.removeprefix(prefix)
        if key == variable or _is_service_link(key, text):
            continue
        setting = _find(key, settings, variable, prefix)
        if not text:
            raise BadSetting(f"{variable}: is empty; unset it, or give it a value")
        found[setting.name] = Found(_convert(setting, text, variable), variable)
    return found


def _is_service_link(key: str, text: str) -> bool:
    """Whether Kubernetes may have set it, for a Service whose name begins as the prefix does."""
    is_port = key == "PORT" or key.endswith("_PORT")
    return _LINK_NAME.fullmatch(key) is not None or (is_port and _LINK_VALUE.match(text) is not None)


def read_file(cls: type[DataclassInstance], path: Path) -> dict[str, Found]:
    """The fields of `cls` that a YAML file sets, by name. Raises BadSetting."""
    import yaml  # whoever has no file needs no package for it

    try:
        # Nodes, and not their values: they know their line, and the text that a flag would be given.
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise BadSetting(f"--config: {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadSetting(f"--config: {path} is no YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise BadSetting(f"--config: {path}: must have lines `name: value`, as --print-config prints them")
    settings = {setting.key: setting for setting in settings_of(cls)}
    found: dict[str, Found] = {}
    for key, node in root.value:
        source = f"{path} line {key.start_mark.line + 1}"
        setting = _find(str(key.value), settings, f"{source}: {key.value}")
        if not isinstance(node, yaml.ScalarNode):
            raise BadSetting(f"{source}: {setting.key}: must be one value; several stand in one, with commas")
        if setting.name in found:
            raise BadSetting(f"{source}: {setting.key}: is there twice, also at {found[setting.name].source}")
        if node.tag == "tag:yaml.org,2002:null":
            if setting.default is not None:
                raise BadSetting(f"{source}: {setting.key}: has no value; leave the line out for the default")
            found[setting.name] = Found(None, source)
        else:
            found[setting.name] = Found(_convert(setting, node.value, f"{source}: {setting.key}"), source)
    return found


def _find(key: str, settings: Mapping[str, Setting], where: str, prefix: str = "") -> Setting:
    if key not in settings:
        raise BadSetting(f"{where}: no such setting{_hint(key, settings, prefix)}")
    return settings[key]


def _hint(key: str, keys: Collection[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "; --help lists all"


def _convert(setting: Setting, text: str, where: str) -> Any:
    try:
        return setting.from_text(text)
    except ValueError as error:
        raise BadSetting(f"{where}: {error}") from None


def parse_settings(
    cls: type[S],
    argv: Sequence[str] | None = None,
    *,
    env_prefix: str,
    environment: Mapping[str, str] = os.environ,
    prog: str | None = None,
    description: str = "",
    examples: Sequence[str] = (),
) -> S:
    """The settings of a process, from its command line (`sys.argv` when None), its environment and its file.

    Ends the process with status 0 for --help and --print-config, and with status 2 and one line for what is wrong.
    """
    parser = build_parser(cls, prog or cls.__name__, description, examples)
    group = parser.add_argument_group(
        f"a flag, else a variable such as {env_prefix}PORT, else the file, else the default"
    )
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings, as --print-config prints it")
    group.add_argument(
        "--print-config", action="store_true", help="print what is in effect and where it comes from, and end"
    )
    given, rest = parser.parse_known_args(argv)
    if rest:
        key = rest[0].partition("=")[0]
        parser.error(
            f"unrecognized arguments: {' '.join(rest)}{_hint(key, flags_of(cls) | {'--config', '--print-config'})}"
        )
    try:
        below = read_file(cls, given.config) if given.config is not None else {}
        below |= read_environment(cls, env_prefix, environment)
    except BadSetting as error:
        parser.error(str(error))
    for setting in settings_of(cls):
        if setting.default is dataclasses.MISSING and setting.name not in below and setting.name not in given:
            variable = env_prefix + setting.key.upper().replace("-", "_")
            parser.error(f"--{setting.key}: must be given: by this flag, by {variable} or in the file of --config")
    settings = settings_from(cls, given, {name: found.value for name, found in below.items()})
    if given.print_config:
        sources = {name: found.source for name, found in below.items()} | dict.fromkeys(vars(given), "flag")
        sys.stdout.write(as_yaml(settings, sources))
        parser.exit()
    return settings


def as_yaml(settings: DataclassInstance, sources: Mapping[str, str]) -> str:
    """A file for --config with all settings; behind each stands where it comes from. `sources`: by field name."""
    import yaml

    lines = []
    for setting in settings_of(type(settings)):
        value = getattr(settings, setting.name)
        plain = str(value) if isinstance(value, Path) else value
        line = yaml.safe_dump({setting.key: plain}, allow_unicode=True, width=sys.maxsize).rstrip("\n")
        lines.append(f"{line}  # {sources.get(setting.name, 'default')}\n")
    return "".join(lines)

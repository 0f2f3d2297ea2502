"""Command-line flags from a frozen dataclass: one field, one flag.

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        model_path: Path = setting(help="folder of the model", metavar="DIR")
        port: int = setting(50051, help="port to listen on", minimum=0, maximum=65535)
        verbose: bool = setting(False, help="say more")          # --verbose / --no-verbose

Fields are bool, int, float, str or Path, or one of these or None (absent). `common.configuration` reads the same
fields from the environment and from a file too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A service ends with it where the same flags and files will not do another time either; argparse's for wrong flags.
EXIT_WRONG_CONFIGURATION = 2

S = TypeVar("S", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True)
class _Flag:
    """What a field says of its flag; kept in the field's metadata under this class."""

    help: str
    metavar: str | None
    choices: Sequence[str] | None
    minimum: float | None
    maximum: float | None
    check: Callable[[str], None] | None
    flag: str | None


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field as whoever reads settings sees it. `default` is dataclasses.MISSING for one that must be given."""

    name: str
    key: str  # its flag without the dashes before it
    default: Any
    from_text: Callable[[str], Any]  # raises ValueError, saying what is allowed


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    check: Callable[[str], None] | None = None,
    flag: str | None = None,
) -> Any:
    """A dataclass field with its flag. Without a default the flag is required.

    `minimum` and `maximum` are inclusive. `check` raises ValueError, saying what is allowed. `flag` replaces the name
    made from the field's.
    """
    return dataclasses.field(
        default=default, metadata={_Flag: _Flag(help, metavar, choices, minimum, maximum, check, flag)}
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; a service has too many flags to list them before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser(
    cls: type[DataclassInstance], prog: str, description: str, examples: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser with one flag a field of `cls`; the examples, one command line each, close its help."""
    epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, cls)
    return parser


def add_flags(parser: argparse._ActionsContainer, cls: type[DataclassInstance], skip: Collection[str] = ()) -> None:
    """Add the flags of all fields of `cls` but those named in `skip` to a parser or a group of one. What it parses has
    the flags that were given and no defaults."""
    for field, flag, kind in _fields(cls):
        if field.name in skip:
            continue
        name = _flag_name(field, flag)
        if kind is bool:
            parser.add_argument(
                name,
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=f"{flag.help} (default: {'on' if field.default else 'off'})",
            )
            continue
        shown = "" if field.default in (None, dataclasses.MISSING) else f" (default: {field.default})"
        parser.add_argument(
            name,
            dest=field.name,
            type=_flag_type(_converter(kind, flag)),
            choices=flag.choices,
            metavar=flag.metavar,
            default=argparse.SUPPRESS,
            help=(flag.help + shown).replace("%", "%%"),
        )


def settings_from(
    cls: type[S], namespace: argparse.Namespace, below: Mapping[str, Any] = types.MappingProxyType({})
) -> S:
    """The settings among parsed arguments; a field that was not given is as `below` says, by name, else the default."""
    names = {field.name for field, _, _ in _fields(cls)}
    return cls(**{name: value for name, value in (dict(below) | vars(namespace)).items() if name in names})


def to_argv(settings: DataclassInstance) -> list[str]:
    """The command line that `parse_settings` reads as these settings; values that are the default are left out."""
    argv: list[str] = []
    for field, flag, kind in _fields(type(settings)):
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        name = _flag_name(field, flag)
        if kind is bool:
            argv.append(name if value else "--no-" + name.removeprefix("--"))
        elif value is None:
            raise ValueError(f"{name}: None cannot be said on a command line; the default is {field.default!r}")
        else:
            argv.append(f"{name}={value}")  # one word, so that a value may begin with a dash
    return argv


def flags_of(cls: type[DataclassInstance]) -> set[str]:
    """All flag names that `cls` takes, the --no- forms too."""
    names = set()
    for field, flag, kind in _fields(cls):
        name = _flag_name(field, flag)
        names.add(name)
        if kind is bool:
            names.add("--no-" + name.removeprefix("--"))
    return names


def settings_of(cls: type[DataclassInstance]) -> list[Setting]:
    """All fields of `cls`, in the order of its flags."""
    return [
        Setting(field.name, _flag_name(field, flag).removeprefix("--"), field.default, _converter(kind, flag))
        for field, flag, kind in _fields(cls)
    ]


def _flag_name(field: dataclasses.Field[Any], flag: _Flag) -> str:
    return flag.flag or "--" + field.name.replace("_", "-")


def _fields(cls: type[DataclassInstance]) -> list[tuple[dataclasses.Field[Any], _Flag, type]]:
    """Each field with its flag and its type, `None` taken off; a class's own come before those it inherits."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        rows.append((field, field.metadata[_Flag], hint))
    return rows


def _converter(kind: type, flag: _Flag) -> Callable[[str], Any]:
    """What makes a value of a text; raises ValueError, saying what is allowed."""
    low, high = flag.minimum, flag.maximum
    if kind in (int, float):
        wanted = "a whole number" if kind is int else "a number"
        if low is not None and high is not None:
            wanted += f" from {low:g} to {high:g}"
        elif low is not None:
            wanted += f" of at least {low:g}"
        elif high is not None:
            wanted += f" of at most {high:g}"

    def convert(text: str) -> Any:
        if kind is bool:
            if text not in ("true", "false"):
                raise ValueError(f"{text!r} is neither true nor false")
            return text == "true"
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                value = math.nan
            # A comparison with NaN is false, so NaN (infinity apart) never passes.
            inside = (low is None or value >= low) and (high is None or value <= high) and math.isfinite(value)
            if not inside:
                raise ValueError(f"{text!r} is not {wanted}")
            return value
        if flag.choices is not None and text not in flag.choices:
            raise ValueError(f"{text!r} is none of {', '.join(flag.choices)}")
        if flag.check is not None:
            try:
                flag.check(text)
            except ValueError as error:
                raise ValueError(f"{text!r}: {error}") from None
        return kind(text)

    return convert


def _flag_type(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def of_flag(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None  # argparse shows the words of no other

    return of_flag

"""One line of `fdfo doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """What was looked at and found. `advice`: what to do, with every WARN and FAIL."""

    level: Level
    what: str
    found: str
    advice: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding("OK", what, found)


def warn(what: str, found: str, advice: str) -> Finding:
    return Finding("WARN", what, found, advice)


def fail(what: str, found: str, advice: str) -> Finding:
    return Finding("FAIL", what, found, advice)

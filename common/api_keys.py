"""Files of API keys.

A server's file has one key a line, `name:key`; the name is the caller's identity. It may stand on several lines, so
that a key can be replaced without a gap. A caller's file has its key alone. Empty lines and lines that begin with # are
nothing. No error text shows a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from common.errors import ServiceError
from common.reloaded import Reloaded

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 1024
# A slash cannot stand in a name, so `name/request id` names a request of all clients.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")


class ApiKeys:
    """The keys of a file, as they are now. Raises ServiceError when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = Reloaded([path], lambda: _read(path))

    def name_of(self, key: str) -> str | None:
        """Whose key it is; None for an unknown one. How long it takes does not depend on which one fits."""
        digest, found = _digest(key), None
        for known, name in self._file.value.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def read_api_key(path: Path) -> str:
    """The key in a caller's own file: one line, the key alone. Raises ServiceError."""
    lines = _lines(path)
    if len(lines) != 1 or not _KEY.fullmatch(lines[0]):
        raise ServiceError(f"{path}: must hold one API key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible characters")
    return lines[0]


def _read(path: Path) -> dict[bytes, str]:
    """Name by digest of the key."""
    names: dict[bytes, str] = {}
    for line in _lines(path):
        name, colon, key = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise ServiceError(f"{path}: a line is not name:key; a name has 1 to 64 letters, digits, dots, - and _")
        if not _KEY.fullmatch(key):
            raise ServiceError(
                f"{path}: the key of {name} must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible characters; "
                "`openssl rand -hex 32` makes one"
            )
        if names.setdefault(_digest(key), name) != name:
            raise ServiceError(f"{path}: {name} and {names[_digest(key)]} have the same key")
    if not names:
        raise ServiceError(f"{path}: there is no key in it")
    return names


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ServiceError(f"{path}: {reason}") from None
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

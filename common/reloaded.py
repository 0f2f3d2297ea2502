"""What is read from files and read again when they change, as certificates and keys do that are replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import ServiceError

T = TypeVar("T")
log = logging.getLogger(__name__)  # not structlog, which the client library does without


class Reloaded(Generic[T]):
    """The value that `read` makes of the files; paths that are None are left out.

    Raises what `read` raises at first. Later a ServiceError of it is logged, and the value before stays.
    """

    def __init__(self, paths: Iterable[Path | str | None], read: Callable[[], T]) -> None:
        self._paths = [Path(path) for path in paths if path is not None]
        self._read = read
        self._stamps = self._look()
        self._value = read()

    @property
    def value(self) -> T:
        """Of the files as they are now. A look costs a few microseconds a file."""
        self.if_changed()
        return self._value

    def if_changed(self) -> T | None:
        """The new value if the files have changed since the last look and can be used, else None."""
        stamps = self._look()  # before the files are read: what changes meanwhile is seen at the next look
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ServiceError as error:
            log.error("what %s held before is kept: %s", names, error)
            return None
        log.info("%s: read again", names)
        return self._value

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()  # of what a link leads to: mounted secrets are replaced by a new link
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

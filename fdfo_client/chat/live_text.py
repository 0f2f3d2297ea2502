"""Text on a terminal whose end may still change: final text stays, what may change behind it is drawn anew each time.

Drawn again is the terminal's row in which the final text ends, and all behind it. So the cursor only ever goes up over
rows that were drawn here, and the terminal may scroll meanwhile.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

from fdfo_client._types import Piece

MASK = "░"
TAB = " " * 4
DIM, PLAIN = "\x1b[2m", "\x1b[22m"
TO_END_OF_SCREEN = "\x1b[J"
FALLBACK_SIZE = os.terminal_size((80, 24))


def is_live(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether `out` is a terminal with a cursor that can be moved."""
    return out.isatty() and environment.get("TERM", "dumb") != "dumb"


def terminal_size(out: TextIO) -> os.terminal_size:
    """Columns and rows now."""
    size = os.get_terminal_size(out.fileno())
    return size if size.columns and size.lines else FALLBACK_SIZE


class LiveText:
    """One text. `size` gives columns and rows; without `has_style` nothing is dimmed."""

    def __init__(self, out: TextIO, size: Callable[[], os.terminal_size], *, has_style: bool = True) -> None:
        self._out = out
        self._size = size
        self._style = (DIM, PLAIN) if has_style else ("", "")
        self._row = ""  # final text of the row in which it ends
        self._drawn = ""  # that and what may change, as drawn last

    def show(self, final: str = "", pieces: Sequence[Piece] = ()) -> None:
        """`final` goes on the final text; the pieces stand behind it, in the place of those shown last."""
        columns, num_lines = self._size()
        num_rows = len(_rows(self._drawn, columns))
        erase = (f"\x1b[{num_rows - 1}A" if num_rows > 1 else "") + "\r" + TO_END_OF_SCREEN
        text = self._row + printable(final)
        self._row = _rows(text, columns)[-1].text
        tail = printable("".join(piece.text or MASK * piece.num_masks for piece in pieces))
        rows = _rows(self._row + tail, columns)
        if len(rows) >= num_lines > 1:  # what has left the screen could not be erased
            tail = (self._row + tail)[len(self._row) : rows[num_lines - 1].start]
        self._drawn = self._row + tail
        begin, end = self._style if tail else ("", "")
        self._out.write(erase + text + begin + tail + end)
        self._out.flush()

    def end(self) -> None:
        """Leave the final text, and the cursor at the beginning of a line."""
        self.show()
        if self._row:
            self._out.write("\n")
            self._out.flush()


class _Row(NamedTuple):
    text: str
    start: int  # its place in the whole text


def _rows(text: str, columns: int) -> list[_Row]:
    """The rows that a terminal makes of a text which begins at the left; at least one. A full row ends when more
    comes."""
    rows, start, column = list[_Row](), 0, 0
    for place, char in enumerate(text):
        width = 0 if char == "\n" else char_width(char)
        if char == "\n" or column + width > columns:
            rows.append(_Row(text[start:place], start))
            start, column = place + (char == "\n"), 0
        column += width
    return [*rows, _Row(text[start:], start)]


def char_width(char: str) -> int:
    """Columns that a terminal gives to a printable character."""
    if char == "\xad":  # by its category it is invisible, and terminals show it
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def printable(text: str) -> str:
    """The text without what moves the cursor or changes the terminal, but for newlines."""
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Zl", "Zp") else "\ufffd"
        for char in text.replace("\r", "").replace("\t", TAB)
    )

"""As much of a terminal as `fdfo chat` asks for: what stands on it after some output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fdfo_client.chat.live_text import char_width

CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(.)", re.DOTALL)


@dataclass
class Row:
    """Cells, a wide character taking two; and what ended the row, a newline or nothing: then the text ran over."""

    cells: list[tuple[str, bool]] = field(default_factory=list)  # text, is dim
    end: tuple[str, bool] = ("", False)


class Terminal:
    """Rows that scroll up at the bottom of the screen; the cursor cannot go above its top."""

    def __init__(self, columns: int, num_lines: int) -> None:
        self.columns, self.num_lines = columns, num_lines
        self.rows = [Row()]
        self.row, self.column = 0, 0
        self.is_dim = False

    def write(self, output: str) -> None:
        for match in CONTROL.finditer(output):
            numbers, command, char = match.groups()
            if char is None:
                self._control(numbers, command)
            elif char == "\r":
                self.column = 0
            elif char == "\n":
                self._next_row((char, self.is_dim))
            else:
                assert char.isprintable(), f"{char!r} reaches the terminal"
                self._put(char)

    def _control(self, numbers: str, command: str) -> None:
        if command == "A":
            self.row = max(self.row - int(numbers or 1), len(self.rows) - self.num_lines, 0)
        elif command == "J":
            assert not numbers
            del self.rows[self.row + 1 :], self.rows[self.row].cells[self.column :]
            self.rows[self.row].end = ("", False)
        elif command == "m":
            assert numbers in ("2", "22")
            self.is_dim = numbers == "2"
        else:
            assert numbers.startswith("?"), f"{numbers}{command} is unknown here"  # modes of the line editor

    def _next_row(self, end: tuple[str, bool]) -> None:
        self.rows[self.row].end = end
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append(Row())

    def _put(self, char: str) -> None:
        width = char_width(char)
        if self.column + width > self.columns:
            self._next_row(("", False))
        cells = self.rows[self.row].cells
        if not width:
            before, is_dim = cells[self.column - 1]
            cells[self.column - 1] = (before + char, is_dim)
            return
        cells += [(" ", False)] * (self.column - len(cells))
        cells[self.column : self.column + width] = [(char, self.is_dim), *[("", self.is_dim)] * (width - 1)]
        self.column += width

    def text(self, is_dim: bool) -> str:
        """All that was written in this style and is still there, newlines too, also what scrolled off."""
        return "".join(text for row in self.rows for text, dim in (*row.cells, row.end) if dim == is_dim)

    def lines(self) -> list[str]:
        """The rows as one sees them."""
        return ["".join(text for text, _ in row.cells).rstrip() for row in self.rows]

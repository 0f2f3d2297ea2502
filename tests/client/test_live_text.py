"""What stands on the terminal while an answer is drawn."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdfo_client import Piece
from fdfo_client.chat.live_text import DIM, MASK, LiveText, char_width, is_live, printable
from tests.client.terminal import Terminal

TEXT = st.lists(st.sampled_from(["a", "b ", "\n", "界", "e\u0301", "\x1b[2J", "\t", "░"]), max_size=8).map("".join)
PIECE = st.one_of(TEXT.map(lambda text: Piece(text, 0)), st.integers(1, 9).map(lambda num: Piece("", num)))


class Screen(io.StringIO):
    """An output whose text goes to a terminal at once."""

    def __init__(self, columns: int = 20, num_lines: int = 6) -> None:
        super().__init__()
        self.terminal = Terminal(columns, num_lines)
        self.text = LiveText(self, lambda: os.terminal_size((columns, num_lines)))

    def write(self, text: str) -> int:
        self.terminal.write(text)
        return super().write(text)


def shown(pieces: list[Piece]) -> str:
    return printable("".join(piece.text or MASK * piece.num_masks for piece in pieces))


@settings(deadline=None, max_examples=100)
@given(
    shows=st.lists(st.tuples(TEXT, st.lists(PIECE, max_size=4)), max_size=8),
    columns=st.integers(2, 12),
    num_lines=st.integers(2, 6),
    before=st.integers(0, 8),
)
def test_the_terminal_always_shows_final_text_and_the_last_pieces(
    shows: list[tuple[str, list[Piece]]], columns: int, num_lines: int, before: int
) -> None:
    """Whatever its size and however it scrolled: each final character once, the pieces dim behind it, as many as the
    screen holds; at the end the final text alone, and the cursor at the beginning of a line."""
    screen = Screen(columns, num_lines)
    screen.write("\n" * before)
    final = "\n" * before
    for more, pieces in shows:
        screen.text.show(more, pieces)
        final += printable(more)
        tail = screen.terminal.text(is_dim=True)
        assert screen.terminal.text(is_dim=False) == final
        assert shown(pieces).startswith(tail)
        if tail != shown(pieces):
            assert len(screen.terminal.rows) >= num_lines - 1
    screen.text.end()
    assert screen.terminal.text(is_dim=True) == "" and screen.terminal.column == 0
    assert screen.terminal.text(is_dim=False) in (final, final + "\n")


def test_a_block_as_it_is_denoised() -> None:
    """Text that may change is dim, masks are signs, and done text takes their place."""
    screen = Screen()
    screen.text.show(pieces=[Piece("3 ", 0), Piece("", 2), Piece(" 5", 0), Piece("", 3)])
    assert screen.terminal.lines() == ["3 ░░ 5░░░"] and screen.terminal.text(is_dim=False) == ""
    screen.text.show("3 4 5", [Piece(" 6", 0), Piece("", 2)])
    assert screen.terminal.lines() == ["3 4 5 6░░"] and screen.terminal.text(is_dim=True) == " 6░░"
    screen.text.show(" 7")
    screen.text.end()
    assert screen.terminal.lines() == ["3 4 5 7", ""]


def test_a_full_row_is_not_a_line() -> None:
    """A newline behind a row that text fills to its last column makes no empty row."""
    screen = Screen(columns=4)
    screen.text.show("abcd", [Piece("e", 0)])
    screen.text.show("\nx")
    assert screen.terminal.lines() == ["abcd", "x"]


def test_a_terminal_that_becomes_narrower() -> None:
    """What was drawn is erased by the rows that it has now."""
    size, out = [(40, 9)], io.StringIO()
    text = LiveText(out, lambda: os.terminal_size(size[0]))
    text.show(pieces=[Piece("x" * 30, 0)])
    size[0] = (10, 9)
    out.truncate(0)
    text.show()
    assert "\x1b[2A\r\x1b[J" in out.getvalue()


def test_without_style_there_is_none() -> None:
    """NO_COLOR leaves the movements of the cursor and no attribute."""
    out = io.StringIO()
    LiveText(out, lambda: os.terminal_size((20, 5)), has_style=False).show(pieces=[Piece("ab", 0), Piece("", 2)])
    assert "ab░░" in out.getvalue() and DIM not in out.getvalue() and "m" not in out.getvalue()


@pytest.mark.parametrize(
    ("char", "width"), [("a", 1), ("é", 1), ("\u0301", 0), ("\u200d", 0), ("界", 2), ("ア", 2), ("😀", 2), ("░", 1)]
)
def test_widths(char: str, width: int) -> None:
    """Combining characters take no column, East Asian ones and emoji two."""
    assert char_width(char) == width


def test_text_cannot_steer_the_terminal() -> None:
    """Control characters of an answer become U+FFFD, tabs spaces, carriage returns nothing."""
    assert printable("a\x1b[2Jb\x9b\x07\tc\r\nd\u2028") == "a\ufffd[2Jb\ufffd\ufffd    c\nd\ufffd"


def test_pipes_and_dumb_terminals_are_not_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a terminal whose cursor moves is."""
    out = io.StringIO()
    assert not is_live(out, {"TERM": "xterm"})
    monkeypatch.setattr(out, "isatty", lambda: True)
    assert is_live(out, {"TERM": "xterm"})
    assert not is_live(out, {"TERM": "dumb"}) and not is_live(out, {})

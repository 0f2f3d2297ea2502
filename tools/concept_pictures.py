"""Draw the pictures of docs/concepts.md: `python tools/concept_pictures.py`. Boxes, words, arrows; nothing measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
INK, GREY, LINE, PALE = "#1d2b36", "#33424e", "#9aa7b0", "#e6ebef"
BLUE, SET_BEFORE, GREEN, ORANGE, VIOLET, RED = "#2b6cb0", "#bcd3ea", "#2f855a", "#f0c9a8", "#b9a5e2", "#c53030"


class Drawing:
    """An SVG that grows by boxes, words and arrows; x and y in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f'<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "") -> None:
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"/>')
        if words:
            colour = "#fff" if fill in (BLUE, GREEN, RED) else INK
            self.text(x + width / 2, y + height / 2 + 4, words, "middle", colour, size=12)

    def text(self, x: float, y: float, words: str, anchor: str = "start", fill: str = GREY, size: int = 13) -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escape(words)}</text>'
        )

    def title(self, x: float, y: float, words: str) -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{INK}" font-weight="bold">{escape(words)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" stroke-width="1.4" '
            'marker-end="url(#a)"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{LINE}"{dash}/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def block() -> str:
    """Five forwards over one block of eight positions."""
    words, set_in = ("The", "answer", "is", "4", "+", "5", "=", "9"), (1, 1, 1, 3, 2, 3, 2, 4)
    drawing = Drawing(960, 300, "One block over five forwards")
    drawing.text(90, 24, "the text before it", "middle")
    drawing.text(90, 41, "KV kept, read only", "middle")
    drawing.title(200, 30, "one block: 8 positions here, 32 in LLaDA2")
    told = ("sure of three", "sure of two more", "sure of two more", "sure of the last", "commit")
    for forward, what in enumerate(told, start=1):
        y = 52 + (forward - 1) * 42
        drawing.box(20, y, 140, 32, PALE, "… earlier text")
        for place, (word, when) in enumerate(zip(words, set_in, strict=True)):
            fill = GREEN if forward == 5 else BLUE if when == forward else SET_BEFORE if when < forward else PALE
            drawing.box(200 + place * 66, y, 62, 32, fill, word if when <= forward else "")
        drawing.text(742, y + 20, f"forward {forward}: {what}")
    for x, fill, meaning in ((200, PALE, "mask"), (290, BLUE, "set now"), (400, SET_BEFORE, "set before")):
        drawing.box(x, 272, 16, 16, fill)
        drawing.text(x + 22, 285, meaning)
    drawing.box(530, 272, 16, 16, GREEN)
    drawing.text(552, 285, "done: its KV is final, the next block begins")
    return drawing.svg()


def _cells(drawing: Drawing, x: float, y: float, cells: Sequence[tuple[str, str]], width: float = 44) -> None:
    for place, (fill, words) in enumerate(cells):
        drawing.box(x + place * width, y, width - 4, 24, fill, words)


def one_round() -> str:
    """Two rounds between scheduler and worker, three rows."""
    drawing = Drawing(960, 320, "Two rounds")
    work, done, new = (BLUE, ""), (GREEN, "done"), (VIOLET, "")
    drawing.title(20, 45, "scheduler")
    drawing.line(110, 41, 940, 41)
    drawing.title(20, 170, "worker")
    for x, name in ((190, "round 1"), (610, "round 2")):
        drawing.text(x + 100, 125, name, "middle", INK)
    for place, (name, first, second) in enumerate(
        (
            ("A", (work, work, work, done), (new, new, new)),
            ("B", (work,) * 4, (work, work, done)),
            ("C", (work,) * 4, (work,) * 3),
        )
    ):
        drawing.text(175, 155 + place * 32, name, "end")
        _cells(drawing, 190, 138 + place * 32, first)
        _cells(drawing, 610, 138 + place * 32, second)
    drawing.arrow(150, 41, 188, 132)
    drawing.text(130, 28, "start A, B, C: prompt and block")
    drawing.arrow(366, 132, 420, 44)
    drawing.text(404, 86, "A: its block's tokens", "start")
    drawing.text(404, 103, "B, C: snapshots", "start")
    drawing.arrow(562, 41, 606, 132)
    drawing.text(520, 28, "continue A, B, C: names only")
    drawing.arrow(742, 132, 796, 44)
    drawing.text(780, 86, "B: its block's tokens")
    drawing.text(780, 103, "A, C: snapshots")
    drawing.text(278, 256, "four forwards, no word in between", "middle")
    drawing.text(676, 256, "A is in its next block", "middle")
    drawing.text(
        20,
        296,
        "A round replies as soon as one of its rows is done. The others go on where they are: same slot, same KV,",
    )
    drawing.text(20, 313, "nothing is sent again.")
    return drawing.svg()


def overlap() -> str:
    """One and two rounds in flight."""
    drawing = Drawing(960, 300, "One round in flight, and two")
    fills = (BLUE, VIOLET)
    for top, title, gap in (
        (0, "one round in flight: the device waits for each round trip", 70),
        (150, "two: it goes straight on", 0),
    ):
        drawing.title(20, top + 26, title)
        drawing.text(100, top + 62, "scheduler", "end")
        drawing.text(100, top + 116, "device", "end")
        for number in range(5):
            begin = 130 + number * (110 + gap)
            if begin + 110 > 950:
                break
            drawing.box(begin, top + 98, 106, 28, fills[number % 2], f"round {number + 1}")
            end = begin + 108
            drawing.arrow(end, top + 96, end + 16, top + 74)
            drawing.box(end + 10, top + 46, 40, 24, ORANGE, "apply")
            if gap:
                drawing.arrow(end + 50, top + 72, end + gap, top + 94)
            elif number < 3:
                drawing.arrow(end + 50, top + 72, begin + 220, top + 94)
    drawing.text(720, 236, "each reply is applied while")
    drawing.text(720, 253, "the device computes")
    return drawing.svg()


def failover() -> str:
    """A worker dies in mid-block."""
    drawing = Drawing(960, 330, "A worker dies and its request goes on at another")
    for y, name in ((40, "client"), (110, "scheduler"), (200, "worker 1"), (280, "worker 2")):
        drawing.title(20, y + 4, name)
        drawing.line(110, y, 940, y, dashed=True)
    _cells(drawing, 150, 188, [(BLUE, "")] * 3 + [(GREEN, "")], 36)
    _cells(drawing, 310, 188, [(BLUE, "")] * 3, 36)
    drawing.text(220, 178, "block 1", "middle")
    drawing.text(360, 178, "block 2", "middle")
    drawing.box(430, 188, 70, 24, RED, "dies")
    drawing.arrow(290, 186, 316, 114)
    drawing.arrow(316, 108, 330, 46)
    drawing.text(340, 72, "text of block 1")
    drawing.arrow(418, 186, 436, 114)
    drawing.text(444, 148, "snapshot of block 2, 3 steps")
    drawing.box(450, 98, 64, 24, ORANGE, "kept")
    drawing.arrow(650, 112, 696, 266)
    drawing.text(676, 238, "start: all tokens before, and the snapshot", "end")
    drawing.box(700, 268, 70, 24, PALE, "prefix")
    _cells(drawing, 774, 268, [(BLUE, "4"), (BLUE, "5"), (GREEN, "")], 36)
    drawing.text(790, 312, "prefix computed again, then steps 4 and 5", "middle")
    drawing.arrow(882, 264, 900, 114)
    drawing.arrow(900, 108, 912, 46)
    drawing.text(896, 72, "text of block 2", "end")
    drawing.text(620, 30, "a pause, nothing else", "middle")
    drawing.line(340, 40, 908, 40)
    return drawing.svg()


DRAWN: dict[str, Callable[[], str]] = {
    "block.svg": block,
    "round.svg": one_round,
    "overlap.svg": overlap,
    "failover.svg": failover,
}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (PICTURES / name).write_text(draw())

"""What `fdfo trace` writes, against what was recorded: the page, in a real browser, and the file for trace viewers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from fdfo_client.trace.page import TOTALS, render
from fdfo_client.trace.timeline import Timeline, timeline
from fdfo_client.trace.trace_events import trace_events
from tests.client.traces import prompts, recorded

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
HOSTILE = "</script><img src=x onerror=alert(1)><!-- & \u2028\u202e"


@cache
def timelines() -> tuple[Timeline, Timeline]:
    """The same prompts with FDFO and in lockstep; one prompt would break out of the page if it could."""
    requests = prompts([3, 9, 2, 5, 4])
    both = tuple(timeline(recorded(fdfo, requests)[0]) for fdfo in (True, False))
    for line in both:
        line.lanes[1].prompt = HOSTILE
    return both[0], both[1]


def page() -> str:
    return render(timelines(), "a test", lambda token_id: f"<{token_id}>")


def chromium(path: Path, *flags: str) -> tuple[str, list[str]]:
    """What it prints of a page, and what the page said on its console; no name can be looked up."""
    command = [
        *(CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={path.parent / 'profile'}",
        ),
        *("--virtual-time-budget=3000", *flags, path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class Elements(HTMLParser):
    """Every element's tag and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def having(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.all if name in attributes]


@needs_chromium
def test_the_page_shows_what_was_recorded(tmp_path: Path) -> None:
    """In a browser the page says nothing on the console, and its lanes, blocks and totals are the recorded ones."""
    path = tmp_path / "trace.html"
    path.write_text(page())
    html, console = chromium(path, "--dump-dom")
    assert console == []
    elements = Elements(html)
    shown = {
        (cell["data-run"], cell["data-total"]): float(cell["data-value"] or "")
        for cell in elements.having("data-total")
    }
    for line in timelines():
        for name, _, unit, _, _ in TOTALS:
            value = getattr(line.totals, name) * (100 if unit == "%" else 1)
            assert shown[line.name, name] == pytest.approx(value), name
        (labels,) = [each for each in elements.having("data-rounds") if each["data-run"] == line.name]
        assert (labels["data-rounds"], labels["data-forwards"]) == (str(len(line.rounds)), str(len(line.forwards)))
    lanes = [
        tuple(int(each[f"data-{name}"] or "") for name in ("blocks", "tokens", "steps", "waits"))
        for each in elements.having("data-request")
    ]
    assert lanes == [
        (
            len(lane.blocks),
            lane.num_tokens,
            sum(len(block.steps) for block in lane.blocks),
            sum(wait.num_forwards for wait in lane.waits),
        )
        for line in timelines()
        for lane in line.lanes
    ]
    assert [each["data-request"] for each in elements.having("data-request")] == [f"r{n}" for n in range(5)] * 2
    assert HOSTILE in [each.get("title") for each in elements.having("data-request")]
    assert not [tag for tag, _ in elements.all if tag == "img"]


USE = """
<script>
const say = (name, value) => { document.body.dataset[name] = String(value); };
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const pointAt = (view, type, ms, track) => {
  const box = view.plot.getBoundingClientRect();
  view.plot.dispatchEvent(new PointerEvent(type, {
    clientX: box.left + view.drawing.x(ms), clientY: box.top + track.top + track.height / 2,
  }));
};
{
  for (const view of views) view.drawing.draw(view.layout); // no frame is drawn where nobody looks
  const sync = views[1], whole = state.to - state.from;
  press("+"); press("+");
  say("zoomed", (state.to - state.from) / whole);
  press("0");
  say("fit", state.to - state.from === whole);
  press("ArrowDown"); press(".");
  say("details", document.getElementById("details").textContent);
  press("Enter");
  say("expanded", document.querySelectorAll(".expanded").length);
  press("Enter");
  const waiting = sync.run.lanes.findIndex((lane) => lane.waits.length), wait = sync.run.lanes[waiting].waits[0];
  const track = sync.layout.tracks.find((each) => each.lane === waiting);
  pointAt(sync, "pointermove", (wait.span[0] + wait.span[1]) / 2, track);
  say("wait", document.getElementById("details").textContent);
  const rounds = sync.layout.tracks.find((each) => each.kind === "rounds");
  pointAt(sync, "pointermove", sync.run.rounds[0].span[0] + 1, rounds);
  say("round", document.getElementById("details").textContent);
  select(sync.run, sync.run.lanes[1], null);
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), turned = [];
  for (let at; (at = texts.nextNode()); ) if (at.data.includes("\u202e")) turned.push(at.parentElement.tagName);
  say("turned", turned);
  const ground = getComputedStyle(document.body).backgroundColor;
  press("t");
  say("theme", getComputedStyle(document.body).backgroundColor !== ground);
  for (const view of views) view.drawing.draw(view.layout);
}
</script>
</body>
"""


@needs_chromium
def test_keys_and_mouse_zoom_open_and_explain(tmp_path: Path) -> None:
    """Zoom and fit, a block by keys with its tokens, an opened lane, what a wait waits for, a round, the theme."""
    path = tmp_path / "trace.html"
    path.write_text(page().replace("</body>", USE))
    html, console = chromium(path, "--dump-dom")
    assert console == []
    (said,) = Elements(html).having("data-zoomed")
    assert float(said["data-zoomed"] or "") == pytest.approx(0.49)
    assert (said["data-fit"], said["data-expanded"], said["data-theme"]) == ("true", "2", "true")
    first = timelines()[0].lanes[0].blocks[0]
    assert "FDFO · answer 1, block 0" in (said["data-details"] or "")
    assert "".join(f"<{token.token_id}>" for token in first.tokens) in (said["data-details"] or "")
    number, wait = next((lane.number, lane.waits[0]) for lane in timelines()[1].lanes if lane.waits)
    assert f"sync · answer {number + 1} waits" in (said["data-wait"] or "")
    for place in wait.waits_for:
        assert timelines()[1].lanes[place].prompt in (said["data-wait"] or "")
    assert said["data-turned"] == "BDI,BDI,BDI", "text that runs backwards: a label in each run, and the details"
    assert f"sync · round {timelines()[1].rounds[0].round_id}" in (said["data-round"] or "")


GROW = """</noscript>
<script>
const parse = JSON.parse;
JSON.parse = (text) => {
  const content = parse(text), [run] = content.runs, [block] = run.lanes[0].blocks;
  block.tokens = [...Array(199999).fill(block.tokens[0]), [0, 7, "x"]];
  run.forwards = Array(200000).fill(run.forwards[0]);
  run.rounds = Array(200000).fill(run.rounds[0]);
  return content;
};
window.requestAnimationFrame = () => 0; // no picture: it takes long without a graphics card
</script>
"""


@needs_chromium
def test_a_page_of_a_large_run_opens(tmp_path: Path) -> None:
    """200,000 tokens, forwards and rounds are more than a browser's stack holds; the page takes their maxima."""
    path = tmp_path / "trace.html"
    use = "<script>document.body.dataset.last = `${state.lastStep} ${views[0].layout.tracks.length}`</script></body>"
    path.write_text(page().replace("</noscript>", GROW).replace("</body>", use))
    html, console = chromium(path, "--dump-dom")
    assert console == []
    assert [each["data-last"] for each in Elements(html).having("data-last")] == [f"7 {3 + len(timelines()[0].lanes)}"]


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn_in_both_schemes(tmp_path: Path, scheme: str) -> None:
    """The picture has the scheme's ground, and in it many colours: something is drawn."""
    path, picture = tmp_path / "trace.html", tmp_path / "trace.png"
    path.write_text(page().replace('<html lang="en">', f'<html lang="en" data-theme="{scheme}">'))
    _, console = chromium(path, "--window-size=1200,800", f"--screenshot={picture}")
    assert console == []
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert (pixels[0, 0].mean() > 0.5) == (scheme == "light")
    assert len({tuple(pixel) for pixel in pixels[::5, ::5].reshape(-1, 3).tolist()}) > 100


def test_the_trace_events_are_the_recorded_ones() -> None:
    """A process a run, a thread an answer; a slice for each round, forward, block, step and wait, at its time."""
    file: dict[str, Any] = json.loads(json.dumps(trace_events(timelines())))
    for pid, line in enumerate(timelines(), start=1):
        events = [event for event in file["traceEvents"] if event["pid"] == pid]
        names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert names["process_name"] == line.name
        slices = {
            kind: [event for event in events if event["ph"] == "X" and event["cat"] == kind]
            for kind in ("round", "forward", "block", "step", "wait")
        }
        assert len(slices["round"]) == len(line.rounds) and len(slices["forward"]) == len(line.forwards)
        blocks = [block for lane in line.lanes for block in lane.blocks]
        assert [event["ts"] for event in slices["block"]] == pytest.approx(
            [block.span.begin_s * 1e6 for block in blocks], abs=0.1
        )
        assert sum(event["args"]["set"] for event in slices["step"]) == sum(len(block.tokens) for block in blocks)
        assert sum(event["args"]["forwards"] for event in slices["wait"]) == line.totals.wasted_row_forwards
        counted = [event["args"] for event in events if event["ph"] == "C"]
        assert sum(args["active"] + args["waiting"] for args in counted) == line.totals.row_forwards


def test_slices_of_a_thread_nest() -> None:
    """Two slices of one thread lie apart or one inside the other, as viewers want it."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace_events(timelines())["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert threads
    for spans in threads.values():
        for begin, end in spans:
            assert not [each for each in spans if begin + 0.5 < each[0] < end - 0.5 and each[1] > end + 0.5]


def test_without_a_tokenizer_the_page_shows_ids() -> None:
    """A token is then its id."""
    ids = re.search(r'"tokens":\[\[(\d+),(\d+),"(\d+)"\]', render(timelines(), "a test"))
    token = timelines()[0].lanes[0].blocks[0].tokens[0]
    assert ids is not None and tuple(map(int, ids.groups())) == (token.offset, token.step, token.token_id)


def test_the_page_needs_nothing_else() -> None:
    """It names no address, and forbids the browser to fetch anything."""
    assert not re.search(r"https?:|//[a-z]", page())
    assert "default-src 'none'" in page()

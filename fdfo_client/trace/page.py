"""Timelines as one HTML page that needs nothing else: no network, no file, no font."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from fdfo_client.trace.clocks import Span
from fdfo_client.trace.timeline import Block, Lane, Timeline, Totals

TokenText = Callable[[int], str]

# Of each total: its name in Totals, what it is called, its unit, digits after the point, what it means.
TOTALS: tuple[tuple[str, str, str, int, str], ...] = (
    ("wall_s", "time", "s", 3, "from sending the first request to the end of the last answer, at the client"),
    ("tokens", "tokens", "", 0, "published tokens of all answers"),
    ("tokens_per_s", "tokens/s", "", 0, "published tokens by time"),
    ("forwards", "forwards", "", 0, "passes of the model, whatever the rows in them"),
    ("tokens_per_forward", "tokens/forward", "", 2, "published tokens by forwards"),
    ("rounds", "rounds", "", 0, "calls of the scheduler to a worker"),
    ("blocks", "blocks", "", 0, "blocks that became done"),
    ("row_forwards", "row-forwards", "", 0, "rows times forwards"),
    ("wasted_row_forwards", "of them wasted", "", 0, "by done rows that kept their place until the slowest was done"),
    ("busy_share", "device busy", "%", 1, "time in forwards and their steps by time; prompts included"),
)


def render(timelines: Sequence[Timeline], title: str, token_text: TokenText | None = None) -> str:
    """The page. `token_text` gives what a token id stands for; without it the page shows ids."""
    data = {
        "title": title,
        "totals": [
            {"name": name, "label": label, "unit": unit, "digits": digits, "meaning": meaning}
            for name, label, unit, digits, meaning in TOTALS
        ],
        "runs": [_run(each, token_text) for each in timelines],
    }
    page = _asset("page.html")
    for mark, text in (
        ("/* STYLE */", _asset("page.css")),
        ("/* SCRIPT */", "".join(map(_asset, ("draw.js", "details.js", "page.js")))),
        ("DATA", _for_script(data)),
    ):
        assert page.count(mark) == 1, mark
        page = page.replace(mark, text)
    return page


def _asset(name: str) -> str:
    return resources.files("fdfo_client.trace").joinpath(name).read_text(encoding="utf-8")


def _for_script(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run(timeline: Timeline, token_text: TokenText | None) -> dict[str, Any]:
    server = timeline.server
    return {
        "name": timeline.name,
        "model": server.served_model_name,
        "facts": {
            "algorithm": server.algorithm,
            "mode": "FDFO" if server.fdfo else "sync",
            "block size": server.block_size,
            "rows": sum(worker.max_rows for worker in server.workers),
            "rounds in flight": server.rounds_in_flight if server.fdfo else 1,
            "version": server.version,
        },
        "blockSize": server.block_size,
        "maxRows": max((worker.max_rows for worker in server.workers), default=1),
        "notes": timeline.notes,
        "totals": _totals(timeline.totals),
        "workers": timeline.workers,
        "lanes": [_lane(lane, token_text) for lane in timeline.lanes],
        "rounds": [
            {
                "worker": each.worker,
                "id": each.round_id,
                "span": _span(each.span),
                "rows": each.num_rows,
                "others": each.num_other_rows,
                "forwards": [each.forwards.start, each.forwards.stop],
                "level": each.level,
            }
            for each in timeline.rounds
        ],
        "forwards": [[each.worker, *_span(each.span), each.num_active, each.num_waiting] for each in timeline.forwards],
        "idle": [[_span(span) for span in timeline.idle(worker)] for worker in range(len(timeline.workers))],
    }


def _totals(totals: Totals) -> dict[str, float]:
    values = {name: getattr(totals, name) for name, *_ in TOTALS}
    values["busy_share"] *= 100
    return values


def _lane(lane: Lane, token_text: TokenText | None) -> dict[str, Any]:
    started_s = lane.started_s
    return {
        "number": lane.number,
        "sample": lane.sample_index,
        "request": lane.request_id,
        "prompt": lane.prompt,
        "promptTokens": lane.prompt_tokens,
        "sent": _ms(lane.sent_s),
        "started": None if started_s is None else _ms(started_s),
        "text": lane.text,
        "firstText": None if lane.first_text_s is None else _ms(lane.first_text_s),
        "ended": None if lane.ended_s is None else _ms(lane.ended_s),
        "tokens": lane.num_tokens,
        "reason": lane.reason,
        "failed": lane.is_failed,
        "prefills": [_span(span) for span in lane.prefills],
        "blocks": [_block(block, token_text) for block in lane.blocks],
        "waits": [
            {"span": _span(each.span), "forwards": each.num_forwards, "for": each.waits_for} for each in lane.waits
        ],
    }


def _block(block: Block, token_text: TokenText | None) -> dict[str, Any]:
    return {
        "index": block.index,
        "span": _span(block.span),
        "steps": [_span(span) for span in block.steps],
        "done": block.is_done,
        "fused": block.is_fused,
        "tokens": [
            [token.offset, token.step, str(token.token_id) if token_text is None else token_text(token.token_id)]
            for token in block.tokens
        ],
    }


def _span(span: Span) -> list[float]:
    return [_ms(span.begin_s), _ms(span.end_s)]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

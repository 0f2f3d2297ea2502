"""Timelines in the trace event format, which ui.perfetto.dev and chrome://tracing show: times in microseconds.

A run is a process. In it a worker's rounds and forwards are threads, and so is each answer; the rows in a forward are
counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fdfo_client.trace.clocks import Span
from fdfo_client.trace.timeline import Block, Lane, Timeline

FIRST_LANE_TID = 1000
Event = dict[str, Any]


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The JSON object of the file."""
    events = [event | {"pid": number} for number, each in enumerate(timelines, start=1) for event in _events(each)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline) -> Iterator[Event]:
    yield _named("process_name", 0, timeline.name)
    tids: dict[tuple[int, str], int] = {}
    for worker, name in enumerate(timeline.workers):
        levels = {round_.level for round_ in timeline.rounds if round_.worker == worker}
        for track in ["forwards", *(f"rounds {level}" for level in sorted(levels))]:
            tids[worker, track] = tid = len(tids) + 1
            yield _named("thread_name", tid, f"{track} of {name}")
    for round_ in timeline.rounds:
        args = {"rows": round_.num_rows, "other_rows": round_.num_other_rows, "forwards": len(round_.forwards)}
        tid = tids[round_.worker, f"rounds {round_.level}"]
        yield _slice(f"round {round_.round_id}", "round", tid, round_.span, args)
    for forward in timeline.forwards:
        args = {"active": forward.num_active, "waiting": forward.num_waiting}
        yield _slice("forward", "forward", tids[forward.worker, "forwards"], forward.span, args)
        name = f"rows in forwards of {timeline.workers[forward.worker]}"
        yield {"ph": "C", "name": name, "ts": _us(forward.span.begin_s), "args": args}
        yield {"ph": "C", "name": name, "ts": _us(forward.span.end_s), "args": {"active": 0, "waiting": 0}}
    for place, lane in enumerate(timeline.lanes):
        tid = FIRST_LANE_TID + place
        sample = f".{lane.sample_index + 1}" if lane.sample_index else ""
        yield _named("thread_name", tid, f"{lane.number + 1}{sample} {lane.prompt[:60]}")
        yield from _of_lane(lane, tid)


def _of_lane(lane: Lane, tid: int) -> Iterator[Event]:
    until_s = lane.started_s if lane.started_s is not None else lane.ended_s
    if until_s is not None:
        yield _slice("queued", "queue", tid, Span(lane.sent_s, until_s), {"request_id": lane.request_id})
    for span in lane.prefills:
        yield _slice("prompt", "prefill", tid, span, {"prompt_tokens": lane.prompt_tokens})
    for block in lane.blocks:
        args = {"tokens": len(block.tokens), "forwards": len(block.steps), "done": block.is_done}
        yield _slice(f"block {block.index}", "block", tid, block.span, args)
        yield from _of_block(block, tid)
    for wait in lane.waits:
        yield _slice(
            "waits", "wait", tid, wait.span, {"forwards": wait.num_forwards, "for_lanes": list(wait.waits_for)}
        )
    if lane.ended_s is not None:
        end = {"tokens": lane.num_tokens, "reason": lane.reason}
        yield {"ph": "i", "s": "t", "name": "end", "cat": "end", "tid": tid, "ts": _us(lane.ended_s), "args": end}


def _of_block(block: Block, tid: int) -> Iterator[Event]:
    """A slice for each forward of the block, but a last one that is the next block's first."""
    for step, span in enumerate(block.steps[: -1 if block.is_fused else None]):
        num_set = sum(token.step == step for token in block.tokens)
        yield _slice(f"step {step}: {num_set} set", "step", tid, span, {"set": num_set})


def _named(what: str, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "tid": tid, "args": {"name": name}}


def _slice(name: str, category: str, tid: int, span: Span, args: dict[str, Any]) -> Event:
    begin, end = _us(span.begin_s), _us(span.end_s)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "tid": tid,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)

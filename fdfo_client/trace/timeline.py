"""A recording laid out in time: a lane per sample with its blocks and waits, the rounds and the forwards above.

All times are seconds from the sending of the first request. What is drawn comes from here, so what is tested is this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._types import ServerInfo
from fdfo_client.trace.clocks import Clocks, Span
from fdfo_client.trace.record import Answer, Recording


class Token(NamedTuple):
    """A published token: its place in the block, its id, and the step of the block that first unmasked it."""

    offset: int
    token_id: int
    step: int


@dataclass
class Block:
    """`steps` are the forwards in which it denoised, its commit included; `tokens` what was published of it.

    `is_fused`: the last of its forwards is the first one of the next block too. `is_done`: the scheduler heard of its
    end.
    """

    index: int
    steps: list[Span] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    is_done: bool = False
    is_fused: bool = False

    @property
    def span(self) -> Span:
        """The time it fills in its lane: a shared last forward belongs to the next block there."""
        return Span(self.steps[0].begin_s, self.steps[-1].begin_s if self.is_fused else self.steps[-1].end_s)


class Wait(NamedTuple):
    """A done row keeps its place in a lockstep round for so many forwards more; `waits_for`: lanes that end last."""

    span: Span
    num_forwards: int
    waits_for: tuple[int, ...]


@dataclass
class Lane:
    """One sample. `number` counts requests from 0 in the order in which they were given."""

    number: int
    sample_index: int
    request_id: str
    prompt: str
    prompt_tokens: int
    sent_s: float
    first_text_s: float | None
    ended_s: float | None
    text: str
    num_tokens: int
    reason: str  # or the error
    is_failed: bool
    prefills: list[Span] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    @property
    def started_s(self) -> float | None:
        """When its first forward began."""
        spans = [*self.prefills, *(block.span for block in self.blocks)]
        return min((span.begin_s for span in spans), default=None)


class Forward(NamedTuple):
    """One forward: rows of this run that denoised in it, and done ones that kept their place."""

    worker: int
    span: Span
    num_active: int
    num_waiting: int


class Round(NamedTuple):
    """One round; `forwards` are places in `Timeline.forwards`, `level` a place where none overlap."""

    worker: int
    generation: int
    round_id: int
    span: Span
    num_rows: int
    num_other_rows: int
    forwards: range
    level: int


@dataclass(frozen=True)
class Totals:
    """Of a whole run. `busy_share`: time in forwards by time, of all workers together. `wasted_row_forwards`: of rows
    that were done and kept their place."""

    wall_s: float
    tokens: int
    blocks: int
    rounds: int
    forwards: int
    row_forwards: int
    wasted_row_forwards: int
    busy_share: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


@dataclass
class Timeline:
    """One run. `notes` say what a reader must know before believing the picture."""

    name: str
    server: ServerInfo
    lanes: list[Lane]
    workers: list[str]
    rounds: list[Round]
    forwards: list[Forward]
    totals: Totals
    notes: list[str]

    def idle(self, worker: int) -> list[Span]:
        """Between a worker's first and last forward, when none ran."""
        gaps, end_s = [], None
        for span in sorted(forward.span for forward in self.forwards if forward.worker == worker):
            if end_s is not None and span.begin_s > end_s:
                gaps.append(Span(end_s, span.begin_s))
            end_s = span.end_s if end_s is None else max(end_s, span.end_s)
        return gaps


def timeline(recording: Recording) -> Timeline:
    """Lay a recording out in time."""
    rounds = sorted(recording.rounds, key=lambda round_: (round_.sent_at_us, round_.round_id))
    workers = sorted({round_.worker for round_ in rounds})
    notes: list[str] = []
    clocks = Clocks(recording, rounds, workers)
    if clocks.note:
        notes.append(clocks.note)
    lanes = _lanes(recording, clocks)
    places = {(lane.request_id, lane.sample_index): place for place, lane in enumerate(lanes)}
    laid_out: list[Round] = []
    forwards: list[Forward] = []
    open_blocks: dict[int, list[Span]] = {}
    levels: dict[int, list[float]] = {}
    for round_ in rounds:
        worker = workers.index(round_.worker)
        spans = clocks.forwards(round_)
        rows = [(places[key], row) for row in round_.rows if (key := (row.request_id, row.sample_index)) in places]
        for place, row in rows:
            _add_row(lanes[place], row, spans, open_blocks.setdefault(place, []))
        _add_waits(lanes, rows, spans)
        first = len(forwards)
        forwards += [Forward(worker, span, *_rows_in(number, rows)) for number, span in enumerate(spans)]
        span = Span(clocks.scheduler(round_.sent_at_us), clocks.scheduler(round_.replied_at_us))
        laid_out.append(
            Round(
                worker,
                round_.generation,
                round_.round_id,
                span,
                len(round_.rows),
                round_.other_rows,
                range(first, len(forwards)),
                _level(levels.setdefault(worker, []), span),
            )
        )
    for place, steps in open_blocks.items():
        if steps:
            index = lanes[place].blocks[-1].index + 1 if lanes[place].blocks else 0
            lanes[place].blocks.append(Block(index, steps))
    _add_tokens(recording, lanes, notes)
    _add_notes(recording, rounds, notes)
    totals = _totals(lanes, rounds, forwards, len(workers))
    return Timeline(recording.name, recording.server, lanes, workers, laid_out, forwards, totals, notes)


def _lanes(recording: Recording, clocks: Clocks) -> list[Lane]:
    lanes = []
    for number, request in enumerate(recording.requests):
        for index, answer in sorted((request.samples or {0: Answer()}).items()):
            sent_s, ended_s = clocks.client(request.sent_s), clocks.client(answer.ended_s or request.ended_s)
            assert sent_s is not None
            lanes.append(
                Lane(
                    number=number,
                    sample_index=index,
                    request_id=request.request_id,
                    prompt=shown_prompt(request.options),
                    prompt_tokens=request.prompt_tokens,
                    sent_s=sent_s,
                    first_text_s=clocks.client(answer.first_text_s),
                    ended_s=ended_s,
                    text=answer.text,
                    num_tokens=len(answer.token_ids),
                    reason=request.error or answer.reason,
                    is_failed=bool(request.error),
                )
            )
    return lanes


def shown_prompt(options: Mapping[str, object]) -> str:
    """A prompt as one reads it: its text, the last message, or how many ids it has."""
    messages, ids = options.get("messages"), options.get("prompt_ids")
    if isinstance(messages, Sequence) and messages:
        return str(messages[-1].get("content", ""))
    return f"{len(ids)} token ids" if isinstance(ids, Sequence) else str(options.get("prompt") or "")


def _add_row(lane: Lane, row: pb.WatchedRow, spans: Sequence[Span], steps: list[Span]) -> None:
    """A row's part of a round: `steps` gathers the forwards of its open block, until that is done."""
    own = spans[row.forwards_before : row.forwards_before + row.forwards]
    before = spans[: row.forwards_before] if own else spans
    if before and (own or row.status == pb.WATCHED_STATUS_PREFILLING):
        lane.prefills.append(Span(before[0].begin_s, before[-1].end_s))
    steps += own
    if not row.accept_length or not steps or any(block.index == row.block_index for block in lane.blocks):
        return
    lane.blocks.append(Block(row.block_index, list(steps), is_done=True, is_fused=row.began_next))
    del steps[: -1 if row.began_next else None]


def _add_waits(lanes: Sequence[Lane], rows: Sequence[tuple[int, pb.WatchedRow]], spans: Sequence[Span]) -> None:
    """Of rows that were done before the round was."""
    ends = {place: row.forwards_before + row.forwards for place, row in rows if row.forwards}
    last = tuple(place for place, end in ends.items() if end == len(spans))
    for place, row in rows:
        end = ends.get(place, len(spans))
        if row.accept_length and end < len(spans):
            lanes[place].waits.append(Wait(Span(spans[end - 1].end_s, spans[-1].end_s), len(spans) - end, last))


def _rows_in(number: int, rows: Iterable[tuple[int, pb.WatchedRow]]) -> tuple[int, int]:
    """Rows that denoise in a round's forward of this number, and that wait in it."""
    active = waiting = 0
    for _, row in rows:
        end = row.forwards_before + row.forwards
        active += row.forwards_before <= number < end
        waiting += bool(row.accept_length and row.forwards) and number >= end
    return active, waiting


def _level(ends_s: list[float], span: Span) -> int:
    """The first level that is free again at the span's begin; `ends_s` are the ends of the last span of each."""
    for level, end_s in enumerate(ends_s):
        if end_s <= span.begin_s:
            ends_s[level] = span.end_s
            return level
    ends_s.append(span.end_s)
    return len(ends_s) - 1


def _add_tokens(recording: Recording, lanes: Iterable[Lane], notes: list[str]) -> None:
    """Published tokens to their blocks, by their positions."""
    size, num_unplaced = recording.server.block_size, 0
    for lane in lanes:
        answer = recording.requests[lane.number].samples.get(lane.sample_index, Answer())
        blocks = {block.index: block for block in lane.blocks}
        for count, (token_id, step) in enumerate(zip(answer.token_ids, answer.first_unmask_steps, strict=True)):
            index, offset = divmod(lane.prompt_tokens + count, size)
            if index in blocks and step < len(blocks[index].steps):
                blocks[index].tokens.append(Token(offset, token_id, step))
            else:
                num_unplaced += 1
    if num_unplaced:
        notes.append(f"{num_unplaced} tokens are not drawn: no forward was told of that set them.")


def _add_notes(recording: Recording, rounds: Sequence[pb.WatchRoundsResponse], notes: list[str]) -> None:
    if missed := max((round_.missed_rounds for round_ in rounds), default=0):
        notes.append(f"{missed} rounds are missing: they came faster than they could be read.")
    elif not recording.is_complete:
        notes.append("Rounds are missing: the scheduler did not tell of all forwards that the answers took.")
    if any(round_.other_rows for round_ in rounds):
        notes.append("Requests of other clients ran too. They are in the forwards and totals, but have no lane.")
    if sum(not round_.forward_begins_us for round_ in rounds if round_.forwards):
        notes.append("Rounds that were on their way when the recording began have no times of their forwards.")
    if failed := sum(bool(request.error) for request in recording.requests):
        notes.append(f"{failed} of {len(recording.requests)} requests failed.")


def _totals(
    lanes: Sequence[Lane],
    rounds: Sequence[pb.WatchRoundsResponse],
    forwards: Sequence[Forward],
    num_workers: int,
) -> Totals:
    wall_s = max((lane.ended_s for lane in lanes if lane.ended_s is not None), default=0.0)
    busy_s = sum(forward.span.end_s - forward.span.begin_s for forward in forwards)
    waiting = sum(round_.waiting_row_forwards for round_ in rounds)
    return Totals(
        wall_s=wall_s,
        tokens=sum(lane.num_tokens for lane in lanes),
        blocks=sum(block.is_done for lane in lanes for block in lane.blocks),
        rounds=len(rounds),
        forwards=sum(round_.forwards for round_ in rounds),
        row_forwards=waiting + sum(round_.denoise_row_forwards for round_ in rounds),
        wasted_row_forwards=waiting,
        busy_share=busy_s / (wall_s * num_workers) if wall_s and num_workers else 0.0,
    )

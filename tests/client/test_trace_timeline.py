"""Recordings of `fdfo trace` laid out in time: lanes, blocks, waits, totals, and what is said of what is missing."""

from __future__ import annotations

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._types import server_info_from_proto
from fdfo_client.trace.clocks import Span, offset_between
from fdfo_client.trace.record import Recording
from fdfo_client.trace.timeline import Token, shown_prompt, timeline
from tests.client.traces import prompts, recorded, row, sent, server, told
from tests.worker.scripted import BLOCK


def close(span: Span) -> Span:
    return pytest.approx(span, abs=1e-6)  # type: ignore[return-value]


def lockstep() -> Recording:
    """Two answers of one block each: `a` is done after one forward and waits two for `b`; a prompt of one token."""
    forwards = [(0.010, 0.020), (0.021, 0.030), (0.032, 0.040)]
    rows = [row("a", 0, 1, True), row("b", 0, 3, True)]
    requests = [
        sent("a", 0.0, 0.045, [(7, 0), (8, 0)], forwards=1),
        sent("b", 0.001, 0.045, [(5, 1), (6, 0), (7, 2)], forwards=3),
    ]
    return Recording("sync", server(), requests, [told(1, 0.005, forwards, rows, waiting=2)])


def test_a_lockstep_round_becomes_blocks_and_a_wait() -> None:
    """Blocks fill the time of their forwards, tokens their positions, and who is done waits for who is not."""
    line = timeline(lockstep())
    a, b = line.lanes
    assert [block.span for block in a.blocks] == [close(Span(0.010, 0.020))]
    assert [block.span for block in b.blocks] == [close(Span(0.010, 0.040))]
    assert len(b.blocks[0].steps) == 3
    assert b.blocks[0].tokens == [Token(1, 5, 1), Token(2, 6, 0), Token(3, 7, 2)]  # position 0 is the prompt's
    (wait,) = a.waits
    assert (wait.span, wait.num_forwards, wait.waits_for) == (close(Span(0.020, 0.040)), 2, (1,))
    assert not b.waits
    assert [(forward.num_active, forward.num_waiting) for forward in line.forwards] == [(2, 0), (1, 1), (1, 1)]
    assert line.idle(0) == [close(Span(0.020, 0.021)), close(Span(0.030, 0.032))]
    assert line.notes == []


def test_the_totals_are_those_of_the_rounds_and_answers() -> None:
    """Time is the client's, forwards and waste are the rounds', and busy is the time in forwards."""
    totals = timeline(lockstep()).totals
    assert totals.wall_s == pytest.approx(0.045)
    assert (totals.tokens, totals.blocks, totals.rounds, totals.forwards) == (5, 2, 1, 3)
    assert (totals.row_forwards, totals.wasted_row_forwards) == (6, 2)
    assert totals.busy_share == pytest.approx(0.027 / 0.045)
    assert totals.tokens_per_s == pytest.approx(5 / 0.045)
    assert totals.tokens_per_forward == pytest.approx(5 / 3)


def test_a_fused_commit_belongs_to_the_next_block() -> None:
    """The forward that both blocks share is drawn once, and is the next block's step 0."""
    first = told(1, 0.0, [(0.01, 0.02), (0.03, 0.04)], [row("a", 0, 2, True, began_next=True)])
    second = told(2, 0.001, [(0.05, 0.06)], [row("a", 1, 1, True)])
    request = sent("a", 0.0, 0.07, [(5, 0)] * 3 + [(6, 0), (6, 1)], forwards=3)
    one, two = timeline(Recording("FDFO", server(), [request], [first, second])).lanes[0].blocks
    assert (one.span, one.is_fused, len(one.steps)) == (close(Span(0.01, 0.03)), True, 2)
    assert (two.span, two.is_fused, len(two.steps)) == (close(Span(0.03, 0.06)), False, 2)
    assert [token.step for token in two.tokens] == [0, 1]


def test_the_prompt_and_a_block_that_is_never_done_are_seen() -> None:
    """Forwards before a row's own computed its prompt; what ran without an end is a block that is not done."""
    round_ = told(1, 0.0, [(0.01, 0.02), (0.02, 0.03)], [row("a", 0, 1, False, forwards_before=1)])
    request = sent("a", 0.0, 0.05, [], forwards=1)
    (lane,) = timeline(Recording("run", server(), [request], [round_])).lanes
    assert lane.prefills == [close(Span(0.01, 0.02))]
    assert [(block.span, block.is_done) for block in lane.blocks] == [(close(Span(0.02, 0.03)), False)]
    assert lane.started_s == pytest.approx(0.01)


def test_rounds_that_overlap_lie_on_levels() -> None:
    """Two rounds in flight are drawn one above the other, a later one in the place that is free again."""
    spans = [(1, 0.0, 0.03), (2, 0.01, 0.05), (3, 0.04, 0.06)]
    rounds = [told(number, sent_s, [(end_s - 0.005, end_s)], []) for number, sent_s, end_s in spans]
    line = timeline(Recording("run", server(), [sent("a", 0.0, 0.1, [])], rounds))
    assert [round_.level for round_ in line.rounds] == [0, 1, 0]
    assert [list(round_.forwards) for round_ in line.rounds] == [[0], [1], [2]]


def test_what_is_missing_is_said() -> None:
    """Missed rounds, other clients' rows, rounds without times, failures and tokens without a forward have a note."""
    untimed = told(2, 0.03, [(0.04, 0.05)], [])
    del untimed.forward_begins_us[:], untimed.forward_ends_us[:]
    rounds = [told(1, 0.0, [(0.01, 0.02)], [row("a", 0, 1, True)], other_rows=2, missed_rounds=3), untimed]
    requests = [sent("a", 0.0, 0.05, [(5, 0), (6, 4)]), sent("b", 0.0, 0.05, [], error="refused")]
    line = timeline(Recording("run", server(), requests, rounds))
    for words in (
        "1 tokens are not drawn",
        "3 rounds are missing",
        "other clients",
        "no times",
        "1 of 2 requests failed",
    ):
        assert any(words in note for note in line.notes), words
    assert line.lanes[1].is_failed and line.lanes[1].reason == "refused"
    cut_off = timeline(Recording("run", server(), requests[:1], [], is_complete=False))
    assert any("did not tell of all forwards" in note for note in cut_off.notes)


def test_clocks_of_other_machines_are_put_on_one_axis() -> None:
    """A worker an hour ahead is moved to between a round's sending and its reply, and the page says how far off."""
    rounds = [told(1, 0.004, [(0.010, 0.020)], [row("a", 0, 1, True)], worker_s=3600.0)]
    line = timeline(Recording("run", server(), [sent("a", 0.0, 0.03, [(5, 0)])], rounds))
    (forward,) = line.forwards
    assert line.rounds[0].span.begin_s < forward.span.begin_s < forward.span.end_s < line.rounds[0].span.end_s
    assert any("different clocks" in note and "3.5 ms" in note for note in line.notes)


def test_an_offset_is_none_where_the_clocks_may_be_one() -> None:
    """Within the bounds zero is taken, else their middle with half their distance as error."""
    assert offset_between([-0.5, -0.1], [0.2, 3.0]) == (0.0, 0.0)
    assert offset_between([10.0, 11.0], [14.0, 12.0]) == (11.5, 0.5)
    assert offset_between([], [1.0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"prompt": "once"}, "once"),
        ({"prompt_ids": [1, 2, 3]}, "3 token ids"),
        ({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]}, "why"),
    ],
)
def test_a_prompt_is_shown_as_one_reads_it(options: dict[str, object], shown: str) -> None:
    """Its text, its last message, or how many ids it has."""
    assert shown_prompt(options) == shown


@pytest.mark.parametrize("fdfo", [True, False])
@pytest.mark.parametrize("fused_commit", [True, False])
def test_a_real_scheduler_is_drawn_as_it_counted(fdfo: bool, fused_commit: bool) -> None:
    """Real rounds of a real loop: every total is the scheduler's counter, every token has its step, and the picture's
    own waits and rows add up to the same."""
    recording, bench = recorded(fdfo, prompts([3, 9, 2, 5, 7, 4, 12]), fused_commit=fused_commit)
    line, counters = timeline(recording), bench.scheduler.counters
    assert line.notes == [] and recording.is_complete
    totals = line.totals
    assert (totals.forwards, totals.rounds) == (counters.forwards, len(recording.rounds))
    assert totals.tokens == 7 * (2 * BLOCK - 1) and totals.blocks == 14
    assert totals.wasted_row_forwards == counters.waiting_row_forwards
    assert totals.row_forwards == counters.waiting_row_forwards + counters.denoise_row_forwards
    assert sum(wait.num_forwards for lane in line.lanes for wait in lane.waits) == counters.waiting_row_forwards
    assert sum(forward.num_waiting for forward in line.forwards) == counters.waiting_row_forwards
    assert sum(forward.num_active for forward in line.forwards) == counters.denoise_row_forwards
    for lane in line.lanes:
        assert [block.index for block in lane.blocks] == [0, 1]
        assert [len(block.tokens) for block in lane.blocks] == [BLOCK - 1, BLOCK]
        assert all(
            before.span.end_s <= after.span.begin_s for before, after in zip(lane.blocks, lane.blocks[1:], strict=False)
        )
        assert lane.ended_s is not None and lane.started_s is not None
        assert lane.sent_s <= lane.started_s <= lane.blocks[-1].span.end_s <= lane.ended_s
        for block in lane.blocks:
            assert max(token.step for token in block.tokens) < len(block.steps)
            assert (block.is_fused, block.is_done) == (fdfo and fused_commit and block.index == 0, True)
    assert max(forward.num_active for forward in line.forwards) == 3


def test_lockstep_waits_for_the_slowest_and_fdfo_for_nobody() -> None:
    """Of the same prompts: in lockstep each wait names a row that runs to the round's end, under FDFO there is none."""
    requests = prompts([3, 9, 2], blocks=1)
    fdfo, sync = (timeline(recorded(mode, requests)[0]) for mode in (True, False))
    assert not any(lane.waits for lane in fdfo.lanes)
    assert {wait.waits_for for lane in sync.lanes for wait in lane.waits} == {(1,)}
    assert fdfo.totals.forwards <= sync.totals.forwards


def test_a_server_that_says_nothing_of_its_workers_is_drawn_too() -> None:
    """No worker, no round, no answer: an empty picture without a failure."""
    empty = server_info_from_proto(pb.GetServerInfoResponse(block_size=4))
    line = timeline(Recording("run", empty, [], []))
    assert (line.lanes, line.rounds, line.totals.wall_s, line.totals.busy_share) == ([], [], 0.0, 0.0)

"""Which blocks end their request: the tensor rule against one that looks at a position after the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import BLOCK, FILL, STOP, Driver, ScriptedRunner, done_blocks, effort, make_loop, start
from worker_svc.rows import SlotColumns

SIZE = 8
TOKENS = st.integers(0, 4)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[bool], int, int, list[int]]:
    """Ids, mask bits, number of prompt positions, limit within the block or behind it, stop ids."""
    num_prompt = draw(st.integers(0, SIZE - 1))
    ids = draw(st.lists(TOKENS, min_size=SIZE, max_size=SIZE))
    masked = draw(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE))
    masked = [bit and place >= num_prompt for place, bit in enumerate(masked)]
    return ids, masked, num_prompt, draw(st.integers(num_prompt + 1, 2 * SIZE)), draw(st.lists(TOKENS, max_size=2))


def naive_ends(
    ids: list[int], masked: list[bool], num_prompt: int, limit: int, stops: list[int], may_leave_masks: bool
) -> bool:
    """Whether a reader of the generated positions, who may not look behind a stop token, is sure of the end."""
    has_stop = False
    for place in range(num_prompt, SIZE):
        if masked[place]:
            return False
        if ids[place] in stops:
            has_stop = True
            if may_leave_masks:
                return True
    return has_stop or limit <= SIZE


@given(rows=st.lists(blocks(), min_size=1, max_size=5), early_end=st.booleans(), edits=st.booleans())
def test_the_rule_is_the_one_of_a_reader(
    rows: list[tuple[list[int], list[bool], int, int, list[int]]], early_end: bool, edits: bool
) -> None:
    """Whatever stands at masked positions, in the prompt and behind the stop; masks may stay only without edits."""
    columns = SlotColumns(len(rows), SIZE, torch.device("cpu"), early_end)
    slots = torch.arange(len(rows))
    for slot, (_, _, num_prompt, limit, stops) in enumerate(rows):
        columns.prompt_length[slot], columns.limit_position[slot] = num_prompt, limit
        columns.stop_token_ids[slot] = torch.tensor(stops + [-1] * (columns.stop_token_ids.shape[1] - len(stops)))
    ids, masked = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    expected = [naive_ends(*row, may_leave_masks=early_end and not edits) for row in rows]
    ends, _ = columns.ends_request(slots, ids, masked, columns.editable(slots), edits)
    assert ends.tolist() == expected


def test_masks_behind_the_stop_token_are_left() -> None:
    """A block of 9 forwards whose stop token is set in the second one ends there, in both modes, and is freed."""
    for mode in (pb.MODE_FDFO, pb.MODE_SYNC):
        loop = make_loop(runner=ScriptedRunner(writes={6: STOP}))
        rows = [start("a", effort(9), stop_token_ids=[STOP]), start("b", effort(9))]
        reply = Driver(loop).run(starts=rows, mode=mode)
        assert reply.rows.statuses[0] == pb.ROW_STATUS_ENDED
        assert reply.rows.forwards[0] == 2
        assert (reply.rows.end_reasons[0], reply.rows.end_positions[0]) == (pb.END_REASON_STOP_TOKEN, 6)
        assert done_blocks(reply)[0][1:7] == [FILL + 1, FILL + 2, FILL + 3, FILL + 4, FILL + 5, STOP]
        assert loop.columns.masked[0, -1], "the masks stayed"
        assert len(loop.sessions["s"].rows) == 1


def test_a_stop_token_behind_a_mask_ends_nothing() -> None:
    """The stop token is set in the first step, the mask before it only later: the block ends when that is filled."""

    class LateFirst(ScriptedRunner):
        def forward(self, *arguments: object) -> torch.Tensor:
            logits = super().forward(*arguments)  # type: ignore[arg-type]
            if len(self.inputs) < 5:
                logits[:, 1] = 0.0  # not sure of the first generated position
            return logits

    runner = LateFirst(writes={2: STOP})
    reply = Driver(make_loop(runner=runner)).run(starts=[start("a", effort(12), stop_token_ids=[STOP])])
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_ENDED]
    assert list(reply.rows.forwards) == [5]
    assert done_blocks(reply)[0][1:3] == [FILL + 1, STOP]


def test_an_algorithm_that_edits_fills_its_block() -> None:
    """JointThreshold may still replace the stop token: its block ends without masks only."""
    runner = ScriptedRunner(writes={6: STOP})
    row = start("a", effort(9), stop_token_ids=[STOP], algorithm="JointThreshold")
    loop = make_loop(runner=runner)
    reply = Driver(loop).run(starts=[row])
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_ENDED]
    assert reply.rows.forwards[0] == 9
    assert not loop.columns.masked[0].any() and loop.config.block_size == BLOCK

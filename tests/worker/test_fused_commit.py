"""Fused commit: a block's last forward is the first one of its next block."""

from __future__ import annotations

import random

import pytest

from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden import test_loops as golden
from tests.worker.scripted import (
    BLOCK,
    FILL,
    MASK,
    STOP,
    Driver,
    ScriptedRunner,
    assert_whole,
    done_blocks,
    effort,
    make_loop,
    names,
    start,
)
from worker_svc.model_runner import Segment


def block_ids(block: int, first: list[int] | None = None) -> list[int]:
    """What the scripted model writes."""
    known = first or []
    return known + [FILL + (block * BLOCK + place) % 8 for place in range(len(known), BLOCK)]


def test_a_block_is_done_in_the_forward_that_begins_the_next() -> None:
    """3 forwards a block become 2 and a shared one; the reply has the done block and the next as it then stands."""
    runner = ScriptedRunner()
    driver = Driver(make_loop(runner=runner, fused_commit=True))
    reply = driver.run(starts=[start("a", effort(3))])
    assert (list(reply.rows.forwards), list(reply.rows.accept_lengths)) == ([3], [BLOCK])
    assert done_blocks(reply) == [block_ids(0, effort(3))]
    assert (list(reply.rows.done_block_indexes), list(reply.rows.block_indexes)) == ([0], [1])
    # The scripted model fills all but one position of an empty block in a step.
    assert unpack_ids(reply.rows.block_ids) == [*block_ids(1)[:-1], MASK]
    assert (list(reply.rows.step_counts), list(reply.rows.block_masks)) == ([1], [0, 0, 0, 128])
    assert runner.inputs[-1].segments == (Segment(1, 1, 0), Segment(0, 1, 1))
    assert runner.inputs[-1].logits_units.tolist() == [0]
    for block in range(1, 4):
        reply = driver.run(continues=names("a"))
        assert done_blocks(reply) == [block_ids(block)] and list(reply.rows.forwards) == [2]
    assert reply.work.allocator_calls == 1, "the next block's page"


def test_a_request_that_ends_in_the_shared_forward_is_told_block_by_block() -> None:
    """The committed block first, as running; then the last one with the end, without another forward."""
    driver = Driver(make_loop(fused_commit=True))
    fills_at_once = {"threshold": 0.0}
    first = driver.run(starts=[start("a", effort(2), tokens_left=BLOCK + 3, algorithm_params=fills_at_once)])
    assert list(first.rows.statuses) == [pb.ROW_STATUS_RUNNING]
    assert done_blocks(first) == [block_ids(0, effort(2))] and list(first.rows.block_indexes) == [1]
    forwards = driver.loop.totals.forwards
    last = driver.run(continues=names("a"))
    assert list(last.rows.statuses) == [pb.ROW_STATUS_ENDED]
    assert (done_blocks(last), list(last.rows.end_positions)) == ([block_ids(1)], [BLOCK + 3])
    assert driver.loop.totals.forwards == forwards
    assert driver.loop.totals.blocks_done == 2
    assert_whole(driver.loop, held=0)


def test_a_last_block_is_not_committed() -> None:
    """A block that ends its request needs no KV, so nothing is shared and no page is taken for a next one."""
    driver = Driver(make_loop(fused_commit=True, num_pages=1))
    reply = driver.run(starts=[start("a", effort(3), tokens_left=5)])
    assert (list(reply.rows.statuses), list(reply.rows.forwards)) == ([pb.ROW_STATUS_ENDED], [2])
    assert_whole(driver.loop, held=0)


def test_without_a_page_the_commit_is_plain() -> None:
    """The block is done as ever, and what has no page is the next block."""
    driver = Driver(make_loop(fused_commit=True, num_pages=1))
    reply = driver.run(starts=[start("a", effort(3))])
    assert (list(reply.rows.accept_lengths), list(reply.rows.forwards)) == ([BLOCK], [3])
    assert list(reply.rows.has_block) == [False]
    reply = driver.run(continues=names("a"))
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_NO_KV_SPACE]


@pytest.mark.parametrize(("algorithm", "mode"), [("JointThreshold", pb.MODE_FDFO), ("LowConfidence", pb.MODE_SYNC)])
def test_where_nothing_is_fused(algorithm: str, mode: pb.Mode) -> None:
    """An algorithm that edits may change the block in its last forward; in SYNC a done block waits for the others."""
    plain, fused = (Driver(make_loop(fused_commit=on)) for on in (False, True))
    row = start("a", effort(3), algorithm=algorithm)
    for fields in ({"starts": [row]}, {"continues": names("a")}, {"continues": names("a")}):
        expected, reply = plain.run(mode=mode, **fields), fused.run(mode=mode, **fields)
        assert reply.rows == expected.rows


def test_a_parked_row_is_fused_when_it_goes_on() -> None:
    """A complete block whose round ended waits with its commit; another row's rounds do not touch it."""
    driver = Driver(make_loop(fused_commit=True))
    reply = driver.run(starts=[start("a", effort(3)), start("b", effort(9))], max_forwards=2)
    assert set(reply.rows.block_masks[:4]) == {0}, "complete"
    for _ in range(2):
        reply = driver.run(continues=names("b"), max_forwards=1)
    assert list(reply.rows.step_counts) == [4]
    reply = driver.run(continues=names("a", "b"))
    assert (done_blocks(reply), list(reply.rows.block_indexes)) == ([block_ids(0, effort(3))], [1, 0])
    assert list(reply.rows.forwards) == [1, 1]


@pytest.mark.parametrize("stops", [False, True])
def test_a_complete_block_goes_on_elsewhere(stops: bool) -> None:
    """Started with a block without masks, the row commits it, beside its next block or, at its end, alone."""
    driver = Driver(make_loop(fused_commit=True))
    prompt, block = [5] * BLOCK, [FILL + place % 8 for place in range(BLOCK)]
    block[7] = STOP if stops else FILL
    row = start("a", prompt, block_ids=pack_ids(block), step_count=4, stop_token_ids=[STOP])
    row.block_mask = pack_bits([False] * BLOCK)
    reply = driver.run(starts=[row])
    assert done_blocks(reply) == [block]
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_ENDED if stops else pb.ROW_STATUS_RUNNING]
    assert list(reply.rows.has_block) == [not stops]
    assert list(reply.rows.forwards) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_small_model_gives_the_same_tokens(temperature: float) -> None:
    """Batch-invariant: fused and not, alone and among others, a forward a round or many, the tokens are the same."""
    prompts = [golden.text_ids(length) for length in (1, golden.B, golden.B + 9, 3 * golden.B + 1)]
    rows = [
        golden.start_row(
            f"r{number}",
            prompt,
            "LowConfidence",
            tokens_left=100,
            sampling=pb.SamplingParams(temperature=temperature, top_p=1.0, seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]

    def answers(fused_commit: bool, rows: list[pb.StartRow], max_forwards: int) -> tuple[list[list[int]], int]:
        driver = Driver(golden.make_loop(batch_invariant=True, fused_commit=fused_commit))
        ids: dict[str, list[int]] = {row.request_id: [] for row in rows}
        order = list(ids)
        reply = driver.run(starts=rows, max_forwards=max_forwards)
        while order:
            done = iter(done_blocks(reply))
            for name, accepted in zip(order, reply.rows.accept_lengths, strict=True):
                ids[name] += next(done) if accepted else []
            ended = zip(order, reply.rows.statuses, strict=True)
            order = [name for name, status in ended if status != pb.ROW_STATUS_ENDED]
            if order:
                reply = driver.run(continues=names(*order), max_forwards=max_forwards)
        assert_whole(driver.loop, held=0)
        return list(ids.values()), driver.loop.totals.denoise_row_forwards

    plain, plain_forwards = answers(False, rows, 0)
    fused, fused_forwards = answers(True, rows, 0)
    assert fused == plain
    assert answers(True, rows, 1)[0] == plain
    assert [answers(True, [row], 0)[0][0] for row in rows] == plain
    num_commits = sum(len(ids) // golden.B - 1 for ids in plain)
    assert plain_forwards - fused_forwards == num_commits


def test_random_lives_of_scripted_requests() -> None:
    """Many requests of random efforts and lengths in few slots give the blocks of the plain loop, in fewer forwards."""
    generator = random.Random(3)
    lives = [(generator.randrange(2, 9), generator.randrange(1, 4 * BLOCK)) for _ in range(30)]
    totals = []
    outputs = []
    for fused_commit in (False, True):
        driver = Driver(make_loop(num_slots=4, num_pages=24, fused_commit=fused_commit))
        waiting = [start(f"r{n}", effort(e), tokens_left=left) for n, (e, left) in enumerate(lives)]
        running: list[str] = []
        blocks: dict[str, list[int]] = {row.request_id: [] for row in waiting}
        while waiting or running:
            starts = [waiting.pop(0) for _ in range(min(4 - len(running), len(waiting)))]
            reply = driver.run(starts=starts, continues=names(*running))
            order = [row.request_id for row in starts] + running
            done = iter(done_blocks(reply))
            for name, accepted in zip(order, reply.rows.accept_lengths, strict=True):
                blocks[name] += next(done) if accepted else []
            ended = zip(order, reply.rows.statuses, strict=True)
            running = [name for name, status in ended if status != pb.ROW_STATUS_ENDED]
        assert_whole(driver.loop, held=0)
        outputs.append(blocks)
        totals.append(driver.loop.totals.denoise_row_forwards)
    assert outputs[0] == outputs[1]
    assert not any(MASK in ids for ids in outputs[1].values())
    assert totals[1] < totals[0]

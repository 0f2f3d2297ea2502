"""More of the golden loops: stop ids, mixed requests together, moves with algorithm state."""

from __future__ import annotations

from typing import Any

import pytest

from common.packing import unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden.test_loops import FOLDER, NAIVE_STEPS, B, make_loop, naive_blocks, run_blocks, start_row, text_ids
from tests.worker.scripted import Driver, assert_whole, names


def run_to_end(driver: Driver, rows: list[pb.StartRow], mode: pb.Mode) -> dict[str, tuple[list[int], int, int]]:
    """All requests together to their ends: ids of the done blocks, end reason, end position, by request."""
    ids: dict[str, list[int]] = {row.request_id: [] for row in rows}
    ends: dict[str, tuple[list[int], int, int]] = {}
    reply, order = driver.run(starts=rows, mode=mode), list(ids)
    while True:
        done = unpack_ids(reply.rows.done_ids)
        for place, name in enumerate(order):
            if reply.rows.accept_lengths[place]:
                ids[name] += done[:B]
                done = done[B:]
            if reply.rows.statuses[place] == pb.ROW_STATUS_ENDED:
                ends[name] = (ids[name], reply.rows.end_reasons[place], reply.rows.end_positions[place])
        order = [name for name in ids if name not in ends]
        if not order:
            return ends
        reply = driver.run(continues=names(*order), mode=mode)


@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
def test_a_stop_id_ends_both_modes_at_the_same_token(algorithm: str) -> None:
    """The first generated token of the second naive block as stop id: both modes end at its first occurrence."""
    prompt = text_ids(B + 9)
    naive = naive_blocks(prompt, 2, algorithm)
    stop = naive[B]
    generated = naive[9:]
    row = start_row("a", prompt, algorithm, stop_token_ids=[stop])
    fdfo = run_to_end(Driver(make_loop()), [row], pb.MODE_FDFO)
    assert fdfo == run_to_end(Driver(make_loop()), [row], pb.MODE_SYNC)
    ids, reason, position = fdfo["a"]
    assert (reason, position) == (pb.END_REASON_STOP_TOKEN, len(prompt) + generated.index(stop))
    assert len(ids) == (position // B) * B
    assert ids[: position - B] == naive[: position - B], "behind the stop token an early end leaves masks"


def test_24_mixed_requests_together_are_each_as_alone() -> None:
    """Batch-invariant, lengths, algorithms, temperatures and stops mixed: same ids and ends; then the pool is whole."""
    rows = [
        start_row(
            f"r{n}",
            text_ids(1 + 13 * n),
            "JointThreshold" if n % 3 == 0 else "LowConfidence",
            tokens_left=5 + 4 * n % 50,
            sampling=pb.SamplingParams(temperature=(n % 4) / 2, top_p=0.95, seed=n),
            stop_token_ids=FOLDER.stop_token_ids if n % 2 else [],
        )
        for n in range(24)
    ]
    loop = make_loop(batch_invariant=True, chunk=3 * B, slots=24)
    together = run_to_end(Driver(loop), rows, pb.MODE_FDFO)
    assert_whole(loop, held=0)
    alone_loop = make_loop(batch_invariant=True, slots=2)
    driver = Driver(alone_loop)
    for row in rows:
        assert run_to_end(driver, [row], pb.MODE_FDFO)[row.request_id] == together[row.request_id]
    assert_whole(alone_loop, held=0)


@pytest.mark.parametrize("forwards", [1, 5, 11])
def test_an_edited_block_goes_on_elsewhere_with_its_state(forwards: int) -> None:
    """JointThreshold, sampled: moved in mid-block with its encoded state after some forwards, the same tokens."""
    prompt = text_ids(2 * B + 3)
    fields: dict[str, Any] = {"sampling": pb.SamplingParams(temperature=1.0, top_p=1, seed=7)}
    row = start_row("me", prompt, "JointThreshold", **fields)
    alone = run_blocks(Driver(make_loop(batch_invariant=True)), row, 1, pb.MODE_FDFO)
    first = Driver(make_loop(batch_invariant=True)).run(starts=[row], max_forwards=forwards)
    assert list(first.rows.has_block) == [True]
    moved = start_row("me", prompt, "JointThreshold", **fields)
    moved.attempt, moved.step_count, moved.algo_state = 2, first.rows.step_counts[0], first.rows.algo_states[0]
    moved.block_ids, moved.block_mask = first.rows.block_ids, first.rows.block_masks
    assert run_blocks(Driver(make_loop(batch_invariant=True)), moved, 1, pb.MODE_FDFO) == alone

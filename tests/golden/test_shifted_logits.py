"""Rows of a model with shifted logits: whoever begins a block without its first token gets the same answer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from common.packing import pack_bits, unpack_floats, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden import published_loops
from tests.golden.loops_of import answers, loop_of, row_of
from tests.model.forwards import model_of, random_ids
from tests.model.published import published
from tests.worker.scripted import Driver, names
from worker_svc.algorithms import ALGORITHMS
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig
from worker_svc.rows import SlotColumns
from worker_svc.starts import BadStart, decode_start
from worker_svc.warm_up import warm_up

NAME = "Fast_dLLM_QwenForCausalLM"
B, SMALL, MASK = 8, 4, 259
PARAMS = {"threshold": 0.5, "sub_block_size": SMALL}
PROMPT = [token % 250 for token in random_ids(2 * B + 3, seed=1)]
COUNT = 3 * B


def make_loop(**switches: Any) -> DenoiseLoop:
    model = published(NAME, head_scale=5.0)
    return loop_of(
        model_of(model.config, model.weights),
        block_size=B,
        mask_id=MASK,
        logit_shift=1,
        batch_invariant=True,
        **switches,
    )


@functools.cache
def reference() -> list[int]:
    forward = published(NAME, head_scale=5.0).forward
    options = {"block_size": B, "small_block_size": SMALL, "mask_id": MASK, "threshold": 0.5}
    return published_loops.fast_dllm(forward, PROMPT, COUNT, stop_ids=(), **options)  # type: ignore[arg-type]


def moved_row(loop: DenoiseLoop, num_blocks: int, name: str = "a", attempt: int = 1) -> pb.StartRow:
    """The request as a scheduler sends it that holds the first done blocks and nothing of the next."""
    known = (PROMPT + reference())[: (2 + num_blocks) * B]
    left = len(PROMPT) + COUNT - len(known)
    row = row_of(name, known, loop, left, algorithm="HierarchyBlock", algorithm_params=PARAMS)
    row.prompt_length, row.attempt = len(PROMPT), attempt
    return row


def rest_of(loop: DenoiseLoop, row: pb.StartRow, mode: pb.Mode = pb.MODE_FDFO) -> list[int]:
    """The ids from the row's block on, up to its end; blocks before it are not told."""
    ids, driver, first = [], Driver(loop, scheduler_id="rest"), row.block_index
    reply = driver.run(starts=[row], mode=mode)
    while True:
        done = unpack_ids(reply.rows.done_ids)
        for place, block in enumerate(reply.rows.done_block_indexes):
            assert block >= first, "a block that is known is told"
            ids += done[place * B : (place + 1) * B]
        if reply.rows.statuses[0] == pb.ROW_STATUS_ENDED:
            return ids[: reply.rows.end_positions[0] + 1 - first * B]
        reply = driver.run(continues=names(row.request_id, attempt=row.attempt), mode=mode)


@pytest.mark.parametrize("mode", [pb.MODE_FDFO, pb.MODE_SYNC])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_start_behind_a_done_block_goes_on_as_before(num_blocks: int, mode: pb.Mode) -> None:
    """Nothing is known of the next block, not even its first token: the rest is the same in both modes."""
    loop = make_loop()
    assert rest_of(loop, moved_row(loop, num_blocks), mode) == reference()[(2 + num_blocks) * B - len(PROMPT) :]
    assert loop.pool.usage().held == 0


def test_the_block_before_is_prefill() -> None:
    """Its forward is not one of the row's, ends no round, and its pages are those that the start took."""
    first = Driver(make_loop()).run(starts=[moved_row(make_loop(), 1)])
    assert list(first.rows.done_block_indexes) == [3] and list(first.rows.accept_lengths) == [B]
    assert first.rows.forwards[0] == first.work.forwards - 1
    assert first.work.allocator_calls == 1


def test_a_shared_page_is_not_written_again() -> None:
    """The block before is computed in a page of its own; what the prefix cache holds stays as it is, bit for bit."""
    loop = make_loop(enable_prefix_caching=True)
    row = row_of("whole", PROMPT, loop, COUNT, algorithm="HierarchyBlock", algorithm_params=PARAMS)
    assert answers(loop, [row], pb.MODE_FDFO) == [reference()]
    computed, k, v = loop.totals.prefill_tokens, loop.kv.k.clone(), loop.kv.v.clone()
    cached = [page for page in range(1, loop.pool.total + 1) if page in loop.pool.cache]
    assert len(cached) == 5
    assert rest_of(loop, moved_row(loop, 2, name="b")) == reference()[4 * B - len(PROMPT) :]
    assert loop.totals.prefill_tokens == computed, "all before it comes from the cache"
    assert torch.equal(loop.kv.k[:, cached], k[:, cached]) and torch.equal(loop.kv.v[:, cached], v[:, cached])


def test_the_first_snapshot_has_the_first_token() -> None:
    """After the block before, and before any step of its own, the block stands there with its first position set."""
    rows = Driver(make_loop()).run(starts=[moved_row(make_loop(), 1)], max_forwards=1).rows
    assert (list(rows.block_indexes), list(rows.step_counts), list(rows.forwards)) == ([3], [0], [0])
    assert unpack_ids(rows.block_ids)[0] == reference()[3 * B - len(PROMPT)]
    assert rows.block_masks == pack_bits([False] + [True] * (B - 1))


@pytest.mark.parametrize("forwards", [1, 2, 4])
def test_a_block_moves_with_its_first_token(forwards: int) -> None:
    """From a snapshot in mid-block another worker goes on to the same answer."""
    loop = make_loop()
    snapshot = Driver(loop).run(starts=[moved_row(loop, 1)], max_forwards=forwards).rows
    assert list(snapshot.block_indexes) == [3] and not snapshot.block_masks[0] & 1
    other = make_loop()
    row = moved_row(other, 1, attempt=2)
    row.block_ids, row.block_mask = snapshot.block_ids, snapshot.block_masks
    row.step_count = snapshot.step_counts[0]
    assert rest_of(other, row) == reference()[3 * B - len(PROMPT) :]


def test_a_pool_that_has_room_for_one_block_only_refuses_the_start() -> None:
    """The block before and the next one get their pages at once, or nothing is taken."""
    loop = make_loop(num_pages=3, page_size=B)
    reply = Driver(loop).run(starts=[moved_row(loop, 1)])
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_NO_KV_SPACE]
    assert loop.pool.usage().free == 3


def test_what_cannot_begin_is_refused() -> None:
    """A first position that is masked while others are set, and an algorithm that edits."""
    loop = make_loop()
    row = moved_row(loop, 1)
    row.block_mask = pack_bits([True] + [False] * (B - 1))
    with pytest.raises(BadStart, match="block_mask: with shifted logits"):
        decode_start(row, loop.start_rules)
    row = moved_row(loop, 1)
    row.step_count = 1
    with pytest.raises(BadStart, match="block_mask: with shifted logits"):
        decode_start(row, loop.start_rules)
    editing = row_of("a", PROMPT, loop, 5, algorithm="JointThreshold")
    with pytest.raises(BadStart, match="algorithm: JointThreshold edits"):
        decode_start(editing, loop.start_rules)
    with pytest.raises(ValueError, match="fused_commit"):
        LoopConfig("f", B, MASK, 64, B, 1, 8, B, fused_commit=True, logit_shift=1)


def test_log_probabilities_are_those_of_the_position() -> None:
    """All masks of a block are filled in one step: each value is of the logits of the position before; the first token,
    which no step set, has none."""
    loop = make_loop()
    params = {"threshold": 0.0, "sub_block_size": B}
    row = row_of("a", PROMPT[: 2 * B], loop, B, algorithm="HierarchyBlock", algorithm_params=params)
    row.want_logprobs = True
    rows = Driver(loop).run(starts=[row]).rows
    ids, values = unpack_ids(rows.done_ids), unpack_floats(rows.done_logprobs)
    forward = published(NAME, head_scale=5.0).forward
    logits = forward(PROMPT[: 2 * B] + ids[:1] + [MASK] * (B - 1), B)[-B:].log_softmax(-1)
    assert values == pytest.approx([0.0, *(float(logits[i - 1, ids[i]]) for i in range(1, B))], abs=1e-4)


def test_the_next_first_token_is_the_most_probable_one() -> None:
    """By row 0; never the mask token, of equals the lowest, and only of rows whose step counts."""
    columns, slots = SlotColumns(3, 4, torch.device("cpu"), logit_shift=1), torch.tensor([2, 0, 1])
    columns.next_first_ids.fill_(5)
    logits = torch.zeros(3, 4, 6)
    logits[:, 0, 3], logits[:, 0, 1], logits[:, 0, 4], logits[:, 1:, 0] = 9.0, 7.0, 7.0, 99.0
    kept = logits.clone()
    columns.note_next_first(slots, torch.tensor([True, False, True]), logits, mask_token_id=3)
    assert columns.next_first_ids.tolist() == [5, 1, 1]
    assert torch.equal(logits, kept), "algorithms and records see them after it"


@pytest.mark.parametrize("block_size", [1, 2, 7])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_warm_up_runs_on_blocks_of_any_size(block_size: int, shift: int) -> None:
    """Also on blocks of one position, which has none to give to the prompt."""
    model = published(NAME)
    loop = loop_of(model_of(model.config, model.weights), block_size=block_size, mask_id=MASK, logit_shift=shift)
    warm_up(loop)
    assert loop.pool.num_free == loop.pool.total


def test_blocks_of_one_position_are_the_autoregressive_loop() -> None:
    """Each block begins with its only token known: the most probable one after all before it."""
    model = published(NAME, head_scale=5.0)
    expected = list(PROMPT)
    for _ in range(5):
        logits = model.forward(expected, 1)[-1]
        logits[MASK] = -torch.inf
        expected.append(int(logits.argmax()))
    loop = loop_of(model_of(model.config, model.weights), block_size=1, mask_id=MASK, logit_shift=1)
    row = row_of("a", PROMPT, loop, 5, algorithm="HierarchyBlock")
    assert answers(loop, [row], pb.MODE_FDFO) == [expected[len(PROMPT) :]]


def test_every_algorithm_that_does_not_edit_runs() -> None:
    """All of them end with the limit, and the warm-up runs them all."""
    loop = make_loop()
    warm_up(loop)
    fitting = [name for name, algorithm in ALGORITHMS.items() if not algorithm.edits]
    rows = [row_of(name, PROMPT[: 2 * B], loop, COUNT, algorithm=name) for name in fitting]
    found = answers(loop, rows, pb.MODE_FDFO)
    assert [len(ids) for ids in found] == [COUNT] * len(fitting)
    assert all(MASK not in ids for ids in found)
    first_tokens = {ids[0] for ids in found}
    forward = published(NAME, head_scale=5.0).forward
    assert first_tokens == {int(forward(PROMPT[: 2 * B], B)[-1].argmax())}

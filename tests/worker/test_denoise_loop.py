"""The one loop on a scripted model: when rounds reply, what rows become, and what happens to slots and pages."""

from __future__ import annotations

import pytest

from common.packing import pack_floats, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import (
    BAD,
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
from worker_svc.run_alone import run_fdfo, run_sync


def statuses(reply: pb.RunRoundResponse) -> list[str]:
    return [pb.RowStatus.Name(status).removeprefix("ROW_STATUS_") for status in reply.rows.statuses]


def three_rows() -> list[pb.StartRow]:
    return [start("a", effort(3)), start("b", effort(8)), start("c", effort(2))]


def test_fdfo_reports_blocks_after_2_3_and_8_forwards_and_a_fourth_request_takes_the_first_free_place() -> None:
    """Blocks that need 3, 8 and 2 forwards are reported as each is done; a new request enters where one left."""
    loop = make_loop(num_slots=3)
    driver = Driver(loop)
    first = driver.run(starts=three_rows())
    assert (first.work.forwards, list(first.rows.accept_lengths)) == (2, [0, 0, BLOCK])
    freed_slot = loop.sessions["s"].rows[names("c")[0].key].slot
    second = driver.run(releases=names("c"), starts=[start("d", effort(5))], continues=names("a", "b"))
    assert (second.work.forwards, list(second.rows.accept_lengths)) == (1, [0, BLOCK, 0])
    assert loop.sessions["s"].rows[names("d")[0].key].slot == freed_slot
    third = driver.run(releases=names("a"), continues=names("b", "d"))
    assert (third.work.forwards, list(third.rows.accept_lengths)) == (4, [0, BLOCK])  # d: forwards 3 to 7
    fourth = driver.run(releases=names("d"), continues=names("b"))
    assert (fourth.work.forwards, list(fourth.rows.accept_lengths)) == (1, [BLOCK])
    assert loop.totals.forwards == 8
    assert loop.totals.waiting_row_forwards == 0


def test_sync_reports_all_three_after_8_forwards_with_11_row_forwards_of_waiting() -> None:
    """In lockstep every row waits for the slowest: 5 + 0 + 6 row-forwards."""
    loop = make_loop()
    reply = Driver(loop).run(starts=three_rows(), mode=pb.MODE_SYNC)
    assert reply.work.forwards == 8
    assert list(reply.rows.accept_lengths) == [BLOCK] * 3
    assert list(reply.rows.forwards) == [3, 8, 2]
    assert reply.work.waiting_row_forwards == 11
    assert reply.work.denoise_row_forwards == 13


def test_run_fdfo_and_run_sync_are_the_loop_with_one_round() -> None:
    """The two entry points differ only in when they return, and give the same blocks."""
    fdfo, sync = make_loop(), make_loop()
    one = run_fdfo(fdfo, Driver(fdfo).request(starts=[start("a", effort(4))]))
    two = run_sync(sync, Driver(sync).request(starts=[start("a", effort(4))]))
    assert one.rows == two.rows
    assert one.work.forwards == two.work.forwards == 4


def test_continuing_rows_make_no_allocator_call_and_keep_slot_and_pages() -> None:
    """A round of rows whose blocks are not done touches neither allocator nor page table."""
    loop = make_loop()
    driver = Driver(loop)
    driver.run(starts=[start("a", effort(8)), start("b", effort(9))], max_forwards=2)
    table = loop.kv.page_table.clone()
    reply = driver.run(continues=names("a", "b"), max_forwards=2)
    assert reply.work.allocator_calls == 0
    assert bool((loop.kv.page_table == table).all())
    assert list(reply.rows.step_counts) == [4, 4]


def test_a_done_row_rolls_over_to_a_block_of_masks_with_step_0() -> None:
    """`continue` of a done row begins the next block; its snapshot shows it from step 0 on."""
    loop = make_loop()
    driver = Driver(loop)
    first = driver.run(starts=[start("a", effort(3))])
    assert done_blocks(first)[0][1:] == [FILL + place % 8 for place in range(1, BLOCK)]
    second = driver.run(continues=names("a"), max_forwards=1)
    assert list(second.rows.block_indexes) == [1]
    assert list(second.rows.step_counts) == [1]


def test_a_row_that_no_round_names_is_parked() -> None:
    """It keeps slot and pages, does not run, and goes on where it stood."""
    loop = make_loop()
    driver = Driver(loop)
    driver.run(starts=[start("a", effort(8)), start("b", effort(3))], max_forwards=1)
    driver.run(continues=names("b"), max_forwards=2)
    held = loop.pool.usage().held
    assert held == 2
    reply = driver.run(continues=names("a"))
    assert (reply.work.forwards, list(reply.rows.accept_lengths)) == (7, [BLOCK])


def test_the_last_block_ends_with_its_last_mask_and_the_row_is_freed() -> None:
    """A block that ends its request needs no KV: an algorithm that never edits saves the commit forward."""
    loop = make_loop()
    driver = Driver(loop)
    reply = driver.run(starts=[start("a", effort(3), tokens_left=5)])
    assert statuses(reply) == ["ENDED"]
    assert reply.work.forwards == 2
    assert (reply.rows.end_reasons[0], reply.rows.end_positions[0]) == (pb.END_REASON_LIMIT, 5)
    assert_whole(loop, held=0)
    again = driver.run(continues=names("a"), acked_round_id=0)
    assert statuses(again) == ["ENDED"]
    assert again.rows.end_positions[0] == 5
    missing = driver.run(continues=names("a"))
    assert statuses(missing) == ["SLOT_MISSING"]


def test_an_editing_algorithm_gets_no_early_end() -> None:
    """JointThreshold may still edit after the last mask: its last block takes the step that changes nothing."""
    loop = make_loop()
    reply = Driver(loop).run(starts=[start("a", effort(3), tokens_left=5, algorithm="JointThreshold")])
    assert statuses(reply) == ["ENDED"]
    assert reply.work.forwards == 3


@pytest.mark.parametrize(
    ("stop_at", "tokens_left", "prompt_length", "reason", "position"),
    [
        (4, 20, 1, pb.END_REASON_STOP_TOKEN, 4),
        (20, 4, 1, pb.END_REASON_LIMIT, 4),
        (4, 4, 1, pb.END_REASON_STOP_TOKEN, 4),
        (5, 4, 1, pb.END_REASON_LIMIT, 4),
        (BLOCK - 1, 500, 3, pb.END_REASON_STOP_TOKEN, BLOCK - 1),
    ],
)
def test_the_earlier_of_stop_token_and_limit_ends_the_request(
    stop_at: int, tokens_left: int, prompt_length: int, reason: pb.EndReason, position: int
) -> None:
    """Stop at offset 3 and limit at 20 of one block, the mirror case, and both at one token: the stop token wins."""
    loop = make_loop(runner=ScriptedRunner({stop_at: STOP}))
    prompt = effort(3) + [5] * (prompt_length - 1)
    reply = Driver(loop).run(starts=[start("a", prompt, tokens_left=tokens_left, stop_token_ids=[STOP])])
    assert (reply.rows.end_reasons[0], reply.rows.end_positions[0]) == (reason, position)


def test_stop_tokens_of_the_prompt_do_not_end_a_request() -> None:
    """Stop ids are looked for in generated positions only."""
    loop = make_loop()
    reply = Driver(loop).run(starts=[start("a", [FILL, STOP, 5], stop_token_ids=[STOP])])
    assert statuses(reply) == ["RUNNING"]
    assert list(reply.rows.accept_lengths) == [BLOCK]


def test_mask_ids_in_the_prompt_are_text() -> None:
    """A prompt position that holds the mask id is not filled."""
    loop = make_loop()
    reply = Driver(loop).run(starts=[start("a", [MASK, 5, MASK, MASK])])
    assert done_blocks(reply)[0][:4] == [MASK, 5, MASK, MASK]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 10 * BLOCK + 7])
def test_prompts_of_every_length_fill_exactly_the_positions_after_them(length: int) -> None:
    """The first denoise block is length // B and keeps the prompt's tail."""
    loop = make_loop()
    prompt = [5] * length
    reply = Driver(loop).run(starts=[start("a", prompt)])
    assert list(reply.rows.done_block_indexes) == [length // BLOCK]
    tail = length % BLOCK
    expected = prompt[:tail] + [FILL + place % 8 for place in range(tail, BLOCK)]
    assert done_blocks(reply)[0] == expected
    assert list(reply.rows.prefilled_tokens) == [length // BLOCK * BLOCK]


def test_a_long_prompt_advances_by_whole_chunks_beside_denoising_rows() -> None:
    """A chunk ends no round, never stops a denoising row, and the last one carries the row's own block."""
    runner = ScriptedRunner()
    loop = make_loop(runner=runner, chunk=3 * BLOCK)
    driver = Driver(loop)
    reply = driver.run(
        starts=[start("slow", effort(9)), start("long", [5] * (7 * BLOCK + 2)), start("next", [5] * (2 * BLOCK))],
        max_forwards=2,
    )
    assert statuses(reply) == ["RUNNING", "PREFILLING", "PREFILLING"]
    assert list(reply.rows.prefilled_tokens) == [0, 6 * BLOCK, 0]
    assert list(reply.rows.step_counts) == [2]
    reply = driver.run(continues=names("slow", "long", "next"), max_forwards=1)
    assert list(reply.rows.prefilled_tokens) == [0, 7 * BLOCK, 2 * BLOCK]
    assert list(reply.rows.step_counts) == [3, 1, 1]
    assert list(reply.rows.forwards) == [1, 1, 1]
    assert [(s.num_units, s.first_block) for s in runner.inputs[0].segments] == [(3, 0), (1, 0)]
    assert [(s.num_units, s.first_block) for s in runner.inputs[1].segments] == [(3, 3), (1, 0)]
    assert [(s.num_units, s.first_block) for s in runner.inputs[2].segments] == [(1, 6), (2, 0), (1, 0), (1, 7), (1, 2)]
    assert max(len(i.slots) for i in runner.inputs) <= 3 + 3
    assert loop.totals.prefill_tokens == 9 * BLOCK


def test_a_start_takes_its_pages_at_once_or_nothing() -> None:
    """Two prompts that do not fit together cannot block each other half-way."""
    loop = make_loop(num_pages=5)
    reply = Driver(loop).run(starts=[start("a", [5] * (3 * BLOCK)), start("b", [5] * BLOCK)])
    assert statuses(reply) == ["PREFILLING", "NO_KV_SPACE"]
    assert_whole(loop, held=4)


def test_no_slot_is_no_kv_space_too() -> None:
    """With all slots taken a start is answered, not queued; the rows that run go on."""
    loop = make_loop(num_slots=1)
    reply = Driver(loop).run(starts=[start("a", effort(4)), start("b", effort(4))])
    assert statuses(reply) == ["RUNNING", "NO_KV_SPACE"]
    assert reply.work.forwards == 1  # the refusal is told after the current forward


def test_rollover_without_a_page_reports_the_done_block_again_and_keeps_the_row() -> None:
    """The row stays whole and done, the round goes on for the others, and a page freed later lets it go on."""
    loop = make_loop(num_pages=2)
    driver = Driver(loop)
    first = driver.run(starts=[start("a", effort(2)), start("b", effort(9))])
    assert list(first.rows.accept_lengths) == [BLOCK, 0]
    second = driver.run(continues=names("a", "b"))
    assert statuses(second) == ["NO_KV_SPACE", "RUNNING"]
    assert done_blocks(second) == done_blocks(first)
    assert_whole(loop, held=2)
    third = driver.run(releases=names("b"), continues=names("a"))
    assert statuses(third) == ["RUNNING"]
    assert list(third.rows.done_block_indexes) == [1]


def test_pages_larger_than_a_block_are_taken_when_a_block_enters_them() -> None:
    """page_size = 2 B: every second block takes a page, the others make no call."""
    loop = make_loop(page_size=2 * BLOCK)
    driver = Driver(loop)
    driver.run(starts=[start("a", effort(2))])
    assert_whole(loop, held=1)
    assert driver.run(continues=names("a")).work.allocator_calls == 0
    assert driver.run(continues=names("a")).work.allocator_calls == 1
    assert_whole(loop, held=2)


def test_non_finite_logits_end_one_row_and_leave_its_neighbours_alone() -> None:
    """The row is freed with `bad numerics`; the other gives what it gives alone."""
    alone = Driver(make_loop()).run(starts=[start("a", effort(4))])
    loop = make_loop()
    driver = Driver(loop)
    reply = driver.run(starts=[start("bad", [BAD]), start("a", effort(4))])
    assert statuses(reply) == ["BAD_NUMERICS", "RUNNING"]
    assert "not finite" in reply.rows.errors[0]
    assert_whole(loop, held=1)
    assert done_blocks(driver.run(continues=names("a"))) == done_blocks(alone)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("algorithm", {"algorithm": "Nonesuch"}),
        ("algorithm_params", {"algorithm_params": {"speed": 1.0}}),
        ("algorithm_params.threshold", {"algorithm_params": {"threshold": 2.0}}),
        ("block_index", {"block_index": 4000}),
        ("prompt_length", {"prompt_length": 500}),
        ("prefix_ids", {"prefix_ids": b"123"}),
        ("block_ids", {"block_ids": b"\xff" * 4 * BLOCK}),
        ("block_mask", {"block_mask": b"\xff" * 4}),
        ("block_mask", {"block_mask": b"\xff" * 5}),
        ("step_count", {"step_count": 40}),
        ("algo_state", {"algo_state": b"pickle"}),
        ("sampling.temperature", {"sampling": pb.SamplingParams(temperature=float("nan"), top_p=1)}),
        ("sampling.top_p", {"sampling": pb.SamplingParams(top_p=1.5)}),
        ("sampling.min_p", {"sampling": pb.SamplingParams(top_p=1, min_p=-1)}),
        ("algorithm_params", {"algorithm_params": {f"x{n}": 0.5 for n in range(1000)}}),
        ("algorithm", {"algorithm": "x" * 100_000}),
        ("algo_state", {"algorithm": "JointThreshold", "algo_state": bytes([1]) + b"\xff" * 4}),
        ("algo_state", {"algorithm": "JointThreshold", "algo_state": bytes([1]) + bytes(1_000_000)}),
        ("stop_token_ids", {"stop_token_ids": [9999]}),
        ("stop_token_ids", {"stop_token_ids": [2] * 97}),
        ("tokens_left", {"tokens_left": 100_000}),
        ("logprobs", {"want_logprobs": True, "logprobs": b"123"}),
        ("logprobs", {"want_logprobs": True, "logprobs": pack_floats([float("nan")] * BLOCK)}),
        ("logprobs", {"want_logprobs": True, "step_count": 1}),
        ("first_unmask_steps", {"want_first_unmask_steps": True, "first_unmask_steps": pack_ids([1] * BLOCK)}),
        ("first_unmask_steps", {"want_first_unmask_steps": True, "first_unmask_steps": pack_ids([-1] * BLOCK)}),
    ],
)
def test_a_start_that_cannot_run_is_a_row_error_that_names_the_field(field: str, values: dict[str, object]) -> None:
    """It takes nothing, and the good row beside it is undisturbed."""
    loop = make_loop()
    bad = start("bad", effort(3))
    for name, value in values.items():
        if name in ("algorithm_params", "stop_token_ids", "sampling"):
            bad.MergeFrom(pb.StartRow(**{name: value}))  # type: ignore[arg-type]
        else:
            setattr(bad, name, value)
    reply = Driver(loop).run(starts=[bad, start("good", effort(2))])
    assert statuses(reply) == ["BAD_STATE", "RUNNING"]
    assert reply.rows.errors[0].startswith(field)
    assert len(reply.rows.errors[0]) <= 1000
    assert_whole(loop, held=1)


def test_a_higher_attempt_frees_the_older_slot_and_a_lower_one_is_refused() -> None:
    """A request has one slot, whatever the attempts."""
    loop = make_loop(num_slots=1)
    driver = Driver(loop)
    driver.run(starts=[start("a", effort(9), attempt=2)], max_forwards=1)
    assert statuses(driver.run(starts=[start("a", effort(9), attempt=2)])) == ["BAD_STATE"]
    assert statuses(driver.run(starts=[start("a", effort(9), attempt=3)], max_forwards=1)) == ["RUNNING"]
    assert statuses(driver.run(continues=names("a", attempt=2))) == ["SLOT_MISSING"]
    assert_whole(loop, held=1)


def test_a_block_goes_on_on_another_worker_in_mid_block() -> None:
    """Started from a snapshot, it needs only the forwards that were left, and gives the same block."""
    whole = Driver(make_loop()).run(starts=[start("a", effort(8))])
    first = Driver(make_loop()).run(starts=[start("a", effort(8))], max_forwards=5)
    resumed = start(
        "a",
        effort(8),
        attempt=2,
        block_ids=first.rows.block_ids,
        block_mask=first.rows.block_masks,
        step_count=first.rows.step_counts[0],
    )
    second = Driver(make_loop()).run(starts=[resumed])
    assert second.work.forwards == 3
    assert done_blocks(second) == done_blocks(whole)


def test_a_sync_row_that_is_done_is_not_changed_and_does_not_roll_over() -> None:
    """It stands in every forward of the round with the ids it was done with."""
    runner = ScriptedRunner()
    loop = make_loop(runner=runner)
    reply = Driver(loop).run(
        starts=[start("a", effort(2), algorithm="JointThreshold"), start("b", effort(9))], mode=pb.MODE_SYNC
    )
    assert [len(i.logits_units) for i in runner.inputs] == [2] * 9
    assert runner.inputs[-1].ids[0].tolist() == done_blocks(reply)[0]
    assert list(reply.rows.done_block_indexes) == [0, 0]


def test_two_schedulers_share_forwards_and_reply_on_their_own() -> None:
    """One forward carries both; the same request id of two schedulers is two rows."""
    runner = ScriptedRunner()
    loop = make_loop(runner=runner)
    one, two = Driver(loop, "one"), Driver(loop, "two")
    first = one.send(starts=[start("a", effort(3))])
    second = two.send(starts=[start("a", effort(5))])
    for _ in range(6):
        loop.tick()
    assert [len(i.logits_units) for i in runner.inputs] == [2, 2, 2, 1, 1]
    assert isinstance(first[0], pb.RunRoundResponse) and first[0].work.forwards == 3
    assert isinstance(second[0], pb.RunRoundResponse) and second[0].work.forwards == 5


def test_a_mixed_batch_runs_step_once_per_algorithm() -> None:
    """Rows of different algorithms share the forward and give what each gives alone."""
    runner = ScriptedRunner()
    loop = make_loop(runner=runner)
    rows = [start(f"{n}", effort(n), algorithm=["LowConfidence", "JointThreshold"][n % 2]) for n in range(2, 6)]
    reply = Driver(loop).run(starts=rows, mode=pb.MODE_SYNC)
    for row, block in zip(rows, done_blocks(reply), strict=True):
        assert done_blocks(Driver(make_loop()).run(starts=[row])) == [block]
    assert len(runner.inputs) == 5


def test_releases_during_a_round_act_at_the_next_boundary_and_are_idempotent() -> None:
    """A released row says so, once; its pages are free at once; the round goes on for the others."""
    loop = make_loop()
    driver = Driver(loop)
    results = driver.send(starts=[start("a", effort(8)), start("b", effort(4))])
    loop.tick()
    for _ in range(2):
        loop.release(loop.sessions["s"], names("a"))
    assert_whole(loop, held=1)
    while not results:
        loop.tick()
    reply = results[0]
    assert isinstance(reply, pb.RunRoundResponse)
    assert statuses(reply) == ["RELEASED", "RUNNING"]
    assert list(reply.rows.accept_lengths) == [0, BLOCK]


def test_a_hundred_aborts_in_every_phase_leave_the_pool_whole() -> None:
    """Prefilling, denoising, done and parked rows: after each drain nothing is held."""
    loop = make_loop(num_slots=4, num_pages=40, chunk=BLOCK)
    driver = Driver(loop)
    for turn in range(100):
        ids = [f"{turn}-{n}" for n in range(4)]
        driver.run(
            starts=[
                start(ids[0], [5] * (turn % 9) * BLOCK + effort(2)),
                start(ids[1], effort(2)),
                start(ids[2], effort(9)),
                start(ids[3], [5] * 4 * BLOCK),
            ],
            max_forwards=1 + turn % 3,
        )
        driver.run(continues=names(*ids[:2]), max_forwards=1)
        driver.run(releases=names(*ids))
        assert_whole(loop, held=0)
        assert loop.slots.num_free == 4

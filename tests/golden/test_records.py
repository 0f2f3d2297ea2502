"""Log probabilities and first-unmask steps through the loop, against a loop without KV that looks at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from common.packing import unpack_floats, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.algorithms.naive import NaiveRow
from tests.golden.test_loops import NAIVE_STEPS, B, make_loop, naive_blocks, start_row, text_ids
from tests.worker.scripted import BAD, Driver, effort, names, start
from tests.worker.scripted import make_loop as make_scripted_loop
from worker_svc.algorithms.base import StepBatch
from worker_svc.records import Recorder
from worker_svc.rows import SlotColumns

MANY_STEPS = {"LowConfidence": 0.999, "JointThreshold": 0.9}  # thresholds at which blocks take several steps
WANTED: dict[str, Any] = {"want_logprobs": True, "want_first_unmask_steps": True}


@dataclass
class Records:
    """Of the done blocks of one request; all zeros where it did not ask and another did, empty where nobody did."""

    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def run(
    driver: Driver, rows: list[pb.StartRow], num_blocks: int, mode: pb.Mode, max_forwards: int = 0
) -> list[Records]:
    """All rows together until each has its blocks."""
    found = {row.request_id: Records() for row in rows}
    attempts = {row.request_id: row.attempt for row in rows}
    order = list(found)
    reply = driver.run(starts=rows, mode=mode, max_forwards=max_forwards)
    while True:
        done = [name for name, accepted in zip(order, reply.rows.accept_lengths, strict=True) if accepted]
        for place, name in enumerate(done):
            part = slice(4 * B * place, 4 * B * (place + 1))
            found[name].ids += unpack_ids(reply.rows.done_ids[part])
            found[name].steps += unpack_ids(reply.rows.done_first_unmask_steps[part])
            found[name].logprobs += unpack_floats(reply.rows.done_logprobs[part])
        order = [name for name in order if len(found[name].ids) < num_blocks * B]
        if not order:
            return list(found.values())
        continues = [names(name, attempt=attempts[name])[0] for name in order]
        reply = driver.run(continues=continues, mode=mode, max_forwards=max_forwards)


def naive_records(prompt: list[int], num_blocks: int, algorithm: str, **params: Any) -> tuple[Records, int]:
    """The same position by position, from the plain log-softmax of the logits; and how often an edit set a token."""
    records, num_edits = Records(steps=[0] * num_blocks * B, logprobs=[0.0] * num_blocks * B), 0

    def on_step(before: NaiveRow, after: NaiveRow, logits: torch.Tensor) -> None:
        nonlocal num_edits
        for place in range(B):
            at = (before.block_index - len(prompt) // B) * B + place
            if before.masked[place] and not after.masked[place]:
                records.steps[at] = before.step_index
            if before.masked[place] != after.masked[place] or before.ids[place] != after.ids[place]:
                num_edits += not before.masked[place]
                records.logprobs[at] = float(logits[place].double().log_softmax(-1)[after.ids[place]])

    records.ids = naive_blocks(prompt, num_blocks, algorithm, on_step=on_step, **params)
    return records, num_edits


@pytest.mark.parametrize("mode", [pb.MODE_FDFO, pb.MODE_SYNC])
@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
def test_records_are_those_of_the_naive_loop(algorithm: str, mode: pb.Mode) -> None:
    """Alone, over two blocks with a part of the prompt in the first: same steps, same values but for rounding."""
    prompt = text_ids(B + 9)
    threshold = MANY_STEPS[algorithm]
    row = start_row("a", prompt, algorithm, algorithm_params={"threshold": threshold}, **WANTED)
    (found,) = run(Driver(make_loop()), [row], 2, mode)
    naive, num_edits = naive_records(prompt, 2, algorithm, threshold=threshold)
    assert found.ids == naive.ids and found.steps == naive.steps
    assert found.logprobs == pytest.approx(naive.logprobs, abs=1e-4)
    assert found.steps[:9] == [0] * 9 and found.logprobs[:9] == [0.0] * 9, "positions of the prompt"
    assert max(found.steps) >= 1 and all(value < 0 for value in found.logprobs[9:])
    assert (num_edits > 0) == (algorithm == "JointThreshold"), "the prompt must make it edit"


def test_penalties_and_temperatures_do_not_show() -> None:
    """The values are those of the model's own logits, whatever the step did to them."""
    prompt = text_ids(B)
    row = start_row("a", prompt, "JointThreshold", algorithm_params={"penalty_lambda": 3}, **WANTED)
    (found,) = run(Driver(make_loop()), [row], 1, pb.MODE_FDFO)
    naive, _ = naive_records(prompt, 1, "JointThreshold", penalty_lambda=3)
    assert found.ids == naive.ids and found.steps == naive.steps
    assert found.logprobs == pytest.approx(naive.logprobs, abs=1e-4)


def mixed_rows() -> list[pb.StartRow]:
    """Both algorithms, greedy and sampled; some ask for one kind, some for both, some for none."""
    return [
        start_row(
            f"r{n}",
            text_ids(5 + 11 * n),
            "JointThreshold" if n % 2 else "LowConfidence",
            sampling=pb.SamplingParams(temperature=n % 3 / 2, top_p=0.9, seed=n),
            want_logprobs=n % 4 in (0, 1),
            want_first_unmask_steps=n % 4 in (0, 3),
        )
        for n in range(8)
    ]


@pytest.mark.parametrize("mode", [pb.MODE_FDFO, pb.MODE_SYNC])
def test_records_are_the_same_alone_and_in_company(mode: pb.Mode) -> None:
    """Batch-invariant: bit for bit, however the rounds are cut; a row that does not ask has zeros in company."""
    rows = mixed_rows()
    together = run(Driver(make_loop(batch_invariant=True)), rows, 2, mode)
    for row, found in zip(rows, together, strict=True):
        (alone,) = run(Driver(make_loop(batch_invariant=True)), [row], 2, pb.MODE_FDFO, max_forwards=2)
        assert found.ids == alone.ids
        assert found.steps == alone.steps if row.want_first_unmask_steps else not any(found.steps)
        assert found.logprobs == alone.logprobs if row.want_logprobs else not any(found.logprobs)
        assert bool(alone.steps) == row.want_first_unmask_steps and bool(alone.logprobs) == row.want_logprobs


@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
@pytest.mark.parametrize("forwards", [1, 3])
def test_a_block_that_moves_keeps_its_records(algorithm: str, forwards: int) -> None:
    """Started from a snapshot on another worker in mid-block, the records are bit for bit those of one worker."""
    prompt = text_ids(2 * B + 3)
    row = start_row("me", prompt, algorithm, **WANTED)
    other = start_row("other", text_ids(9), "LowConfidence")
    (whole,) = run(Driver(make_loop(batch_invariant=True)), [row], 2, pb.MODE_FDFO)
    first = Driver(make_loop(batch_invariant=True)).run(starts=[other, row], max_forwards=forwards).rows
    assert list(first.has_block) == [True, True]
    moved = start_row("me", prompt, algorithm, attempt=2, **WANTED)
    packed, bits = slice(4 * B, 8 * B), slice(B // 8, B // 4)
    moved.block_ids, moved.block_mask = first.block_ids[packed], first.block_masks[bits]
    moved.step_count, moved.algo_state = first.step_counts[1], first.algo_states[1]
    moved.first_unmask_steps = first.block_first_unmask_steps[packed]
    moved.logprobs = first.block_logprobs[packed]
    assert unpack_ids(first.block_first_unmask_steps[: 4 * B]) == [0] * B, "the other row did not ask"
    (found,) = run(Driver(make_loop(batch_invariant=True)), [moved], 2, pb.MODE_FDFO)
    assert found == whole


def test_a_fused_commit_reports_the_records_of_the_block_it_commits() -> None:
    """Batch-invariant: the same bits as without, alone and in company, and from the snapshot that comes with it."""
    rows = mixed_rows()
    plain = run(Driver(make_loop(batch_invariant=True)), rows, 3, pb.MODE_FDFO)
    fused = run(Driver(make_loop(batch_invariant=True, fused_commit=True)), rows, 3, pb.MODE_FDFO)
    for row, one, other in zip(rows, plain, fused, strict=True):
        assert one.ids == other.ids
        assert one.steps == other.steps or not row.want_first_unmask_steps
        assert one.logprobs == other.logprobs or not row.want_logprobs

    row = rows[0]
    first = Driver(make_loop(batch_invariant=True, fused_commit=True)).run(starts=[row]).rows
    assert list(first.accept_lengths) == [B] and list(first.has_block) == [True]
    moved = start_row("r0", [*text_ids(5), *unpack_ids(first.done_ids)[5:]], "LowConfidence", attempt=2, **WANTED)
    moved.sampling.CopyFrom(row.sampling)
    moved.prompt_length, moved.step_count = 5, first.step_counts[0]
    moved.block_ids, moved.block_mask = first.block_ids, first.block_masks
    moved.first_unmask_steps, moved.logprobs = first.block_first_unmask_steps, first.block_logprobs
    (found,) = run(Driver(make_loop(batch_invariant=True)), [moved], 1, pb.MODE_FDFO)
    assert (found.steps, found.logprobs) == (plain[0].steps[B : 2 * B], plain[0].logprobs[B : 2 * B])


def test_nobody_asks_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a row that asks, no logits are copied, nothing is written, and the reply has no columns."""
    copied: list[torch.Tensor | None] = []
    raw_logits = Recorder.raw_logits

    def spy(self: Recorder, logits: torch.Tensor) -> torch.Tensor | None:
        copied.append(raw_logits(self, logits))
        return copied[-1]

    monkeypatch.setattr(Recorder, "raw_logits", spy)
    loop = make_scripted_loop()
    reply = Driver(loop).run(starts=[start("a", effort(3)), start("b", effort(9), algorithm="JointThreshold")])
    assert copied and set(copied) == {None}
    assert not loop.columns.logprobs.any() and not loop.columns.first_unmask_steps.any()
    rows = reply.rows
    assert not (rows.done_logprobs or rows.done_first_unmask_steps)
    assert not (rows.block_logprobs or rows.block_first_unmask_steps)


def test_only_rows_that_ask_have_their_logits_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three rows asks for log probabilities: the logits of one row are kept."""
    shapes = set()
    raw_logits = Recorder.raw_logits

    def spy(self: Recorder, logits: torch.Tensor) -> torch.Tensor | None:
        raw = raw_logits(self, logits)
        assert raw is not None
        shapes.add((len(logits), len(raw)))
        return raw

    monkeypatch.setattr(Recorder, "raw_logits", spy)
    rows = [start(name, effort(4), want_logprobs=name == "b") for name in "abc"]
    Driver(make_scripted_loop()).run(starts=rows)
    assert shapes == {(3, 1)}


def test_a_row_with_bad_numerics_records_nothing_for_its_neighbour() -> None:
    """The neighbour's values are finite and those it has alone."""
    (alone,) = run(Driver(make_scripted_loop()), [start("a", effort(4), **WANTED)], 1, pb.MODE_FDFO)
    driver = Driver(make_scripted_loop())
    driver.run(starts=[start("bad", [BAD], **WANTED), start("a", effort(4), **WANTED)])
    reply = driver.run(continues=names("a"))
    assert unpack_floats(reply.rows.done_logprobs) == alone.logprobs
    assert unpack_ids(reply.rows.done_first_unmask_steps) == alone.steps


def test_a_slot_that_had_records_shows_none_of_them() -> None:
    """The next request in the slot begins with zeros; so does the next block, before its first step."""
    driver = Driver(make_scripted_loop(num_slots=1))
    driver.run(starts=[start("a", effort(9), **WANTED)])
    driver.run(releases=names("a"))
    reply = driver.run(starts=[start("b", [5] * 7, **WANTED)], max_forwards=1)
    steps = unpack_ids(reply.rows.block_first_unmask_steps)
    assert steps == [0] * B
    values = unpack_floats(reply.rows.block_logprobs)
    masked = [bool(reply.rows.block_masks[place // 8] >> place % 8 & 1) for place in range(B)]
    assert [value != 0 for value in values[7:]] == [not is_masked for is_masked in masked[7:]]
    assert values[:7] == [0.0] * 7


def test_a_position_that_a_block_begins_with_has_no_records() -> None:
    """Shifted models begin a block with a token: in its first step it is at zero, whatever stood in the slot."""
    columns, slots = SlotColumns(1, 4, torch.device("cpu")), torch.tensor([0])
    columns.first_unmask_steps.fill_(9)
    columns.logprobs.fill_(-9.0)
    columns.masked[0, 1:] = True
    block = StepBatch(
        ids=torch.tensor([[0, 2, 0, 0]]),
        masked=torch.tensor([[False, False, True, True]]),
        editable=torch.ones(1, 4, dtype=torch.bool),
        block_index=columns.block_index,
        step_index=columns.step_index,
        sampling=columns.sampling(slots, any_sampling=False),
        params={},
        mask_token_id=1,
    )
    recorder = Recorder(logprob_places=slots, wants_steps=True)
    recorder.record(columns, slots, block, torch.zeros(1, 4, 8), torch.tensor([True]))
    assert columns.first_unmask_steps.tolist() == [[0, 0, 0, 0]]
    assert columns.logprobs.tolist() == [[0.0, pytest.approx(-math.log(8)), 0.0, 0.0]]

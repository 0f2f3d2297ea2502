"""The algorithms, step by step and block by block, against the naive versions."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.batches import defaults, make_batch, make_row, random_logits, run_block, small_model
from tests.algorithms.naive import NAIVE_STEPS, NaiveRow
from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm

MASK = 2
LOW, JOINT = ALGORITHMS["LowConfidence"], ALGORITHMS["JointThreshold"]
every_name = pytest.mark.parametrize("name", sorted(NAIVE_STEPS))
names = pytest.mark.parametrize("name", ["LowConfidence", "JointThreshold"])

PARAMS: dict[str, list[float]] = {
    "threshold": [0, 0.25, 0.5, 0.95, 1],
    "edit_threshold": [0, 0.25, 0.5, 1],
    "max_post_edit_steps": [0, 1, 2, 16],
    "penalty_lambda": [0, 0, 0.5, 3, 100],
    "denoising_steps": [0, 1, 2, 3, 64],
    "entropy_bound": [0, 0.35, 1, 3, 1000],
    "sub_block_size": [1, 2, 3, 8],
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 2},
    {"temperature": 2.0, "top_p": 0.875, "min_p": 0.125},
]


def random_row(rng: random.Random, name: str, block_size: int, vocab_size: int, samples: bool) -> NaiveRow:
    """Any block: prompt in front, masks anywhere behind it, the mask token among the ids that are not masked."""
    num_prompt = rng.randrange(block_size + 1)
    share_masked = rng.choice([0.0, 0.5, 1.0])
    return make_row(
        [
            None if position >= num_prompt and rng.random() < share_masked else rng.randrange(vocab_size)
            for position in range(block_size)
        ],
        MASK,
        num_prompt=num_prompt,
        params={param.name: rng.choice(PARAMS[param.name]) for param in ALGORITHMS[name].params},
        block_index=rng.randrange(100),
        step_index=rng.randrange(100),
        seed=rng.getrandbits(64),
        sample_index=rng.randrange(4),
        **(rng.choice(SAMPLING) if samples else {}),
    )


def run_step(
    algorithm: DllmAlgorithm, rows: list[NaiveRow], logits: Tensor
) -> tuple[list[list[int]], list[list[bool]], list[bool], list[int]]:
    """One step over the rows: ids, mask bits, done and the steps of the edit budget (0 without one)."""
    batch = make_batch(rows)
    state = algorithm.init_step_state(len(rows), "cpu")
    if state:
        state["post_edit_steps"] += torch.tensor([row.post_edit_steps for row in rows])
    done = algorithm.step(batch, logits.clone(), state)
    steps = state["post_edit_steps"].tolist() if state else [0] * len(rows)
    return batch.ids.tolist(), batch.masked.tolist(), done.tolist(), steps


@every_name
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 5),
    block_size=st.integers(1, 9),
    vocab_size=st.integers(4, 12),
    scale=st.sampled_from([0.0, 0.5, 2.0]),
    sampled_rows=st.sampled_from(["none", "some", "all"]),
)
def test_step_agrees_with_the_naive_version(
    name: str, seed: int, num_rows: int, block_size: int, vocab_size: int, scale: float, sampled_rows: str
) -> None:
    """On random blocks, parameters and logits each row of a mixed batch gets what the naive step gives it alone."""
    rng = random.Random(seed)
    rows = [
        random_row(rng, name, block_size, vocab_size, sampled_rows == "all" or (sampled_rows == "some" and index > 0))
        for index in range(num_rows)
    ]
    for row in rows if name == "JointThreshold" else []:
        row.post_edit_steps = rng.randrange(int(row.params["max_post_edit_steps"]) + 1)
    logits = random_logits(seed, num_rows, block_size, vocab_size, scale)
    results = run_step(ALGORITHMS[name], rows, logits)
    for row, values, ids, masked, done, steps in zip(rows, logits.tolist(), *results, strict=True):
        expected = copy.deepcopy(row)
        expected_done = NAIVE_STEPS[name](expected, values)
        assume(expected.closest > 1e-5)  # else float32 and float64 may decide otherwise
        assert (ids, masked, done, steps) == (
            expected.ids,
            expected.masked,
            expected_done,
            expected.post_edit_steps,
        )


@every_name
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 9),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
    samples=st.booleans(),
)
def test_step_keeps_its_promises(name: str, seed: int, block_size: int, scale: float, samples: bool) -> None:
    """A mask bit clears where there is one, none is ever set, the prompt stays, no mask token is written, and a done
    row had no mask and is left as it was."""
    rng = random.Random(seed)
    rows = [random_row(rng, name, block_size, 8, samples) for _ in range(8)]
    results = run_step(ALGORITHMS[name], rows, random_logits(seed, 8, block_size, 8, scale))
    for row, ids, masked, done, _ in zip(rows, *results, strict=True):
        assert sum(masked) < max(1, sum(row.masked))
        assert all(was or not now for was, now in zip(row.masked, masked, strict=True))
        for position in range(block_size):
            if not row.editable[position]:
                assert ids[position] == row.ids[position]
            if masked[position] != row.masked[position] or ids[position] != row.ids[position]:
                assert ids[position] != MASK
            if masked[position]:
                assert ids[position] == row.ids[position]
        if done or (name != "JointThreshold" and not any(row.masked)):
            assert done
            assert not any(row.masked)
            assert ids == row.ids


@every_name
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_block_agrees_with_the_naive_loop(name: str, samples: bool, scale: float) -> None:
    """A batch of blocks run to the end beside each other gives each row's naive block, forwards included, within
    max_steps."""
    block_size, vocab_size = 6, 9
    algorithm, model = ALGORITHMS[name], small_model(5, block_size, vocab_size, scale)
    rng = random.Random(1)
    rows = [random_row(rng, name, block_size, vocab_size, samples) for _ in range(40)]
    batch = make_batch(rows)
    forwards = run_block(algorithm, batch, model, max_steps=100)
    for place, row in enumerate(rows):
        count, done = 0, False
        while not done:
            done = NAIVE_STEPS[name](row, model(torch.tensor([row.ids]))[0].tolist())
            row.step_index += 1
            count += 1
        assert batch.ids[place].tolist() == row.ids
        assert forwards[place] == count <= algorithm.max_steps(block_size, row.params)
    assert not batch.masked.any()
    if name == "JointThreshold":
        assert len(set(forwards)) > 5


@every_name
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([0.0, 0.5, 20.0]), samples=st.booleans())
def test_blocks_end_within_their_bound(name: str, seed: int, scale: float, samples: bool) -> None:
    """Whatever the model and the parameters, no block takes more forwards than max_steps says."""
    rng = random.Random(seed)
    rows = [random_row(rng, name, 4, 6, samples) for _ in range(6)]
    forwards = run_block(ALGORITHMS[name], make_batch(rows), small_model(seed, 4, 6, scale), max_steps=4 + 16 + 1)
    for row, count in zip(rows, forwards, strict=True):
        assert count <= ALGORITHMS[name].max_steps(4, row.params)


@every_name
def test_best_guess_is_the_mask_token(name: str) -> None:
    """A model that is sure of the mask token everywhere still fills every block, with other tokens."""
    algorithm = ALGORITHMS[name]
    batch = make_batch([make_row([None] * 4, MASK, params=defaults(algorithm))])

    def model(ids: Tensor) -> Tensor:
        logits = random_logits(1, 1, 4, 8, 1.0)
        logits[..., MASK] = 1e4
        return logits

    run_block(algorithm, batch, model, algorithm.max_steps(4, defaults(algorithm)))
    assert (batch.ids != MASK).all()


@every_name
def test_mask_token_as_text_is_text(name: str) -> None:
    """The mask token's id in prompt positions is neither filled nor edited, and does not keep a row from being done;
    a masked position may hold any id."""
    algorithm = ALGORITHMS[name]
    params = defaults(algorithm)
    whole_prompt = make_row([MASK, MASK, 5, MASK], MASK, num_prompt=4, params=params)
    start_of_block = make_row([MASK, 5, MASK, None], MASK, num_prompt=3, params=params)
    start_of_block.ids[3] = 7
    logits = torch.zeros(2, 4, 8)
    logits[..., 6] = 9.0
    ids, masked, done, _ = run_step(algorithm, [whole_prompt, start_of_block], logits)
    assert ids == [[MASK, MASK, 5, MASK], [MASK, 5, MASK, 6]]
    assert not any(map(any, masked))
    assert done == [True, False]


@pytest.mark.parametrize(("bound", "num_filled"), [(0.0, 1), (math.log(2), 1), (0.7, 2), (2 * math.log(2), 2)])
def test_entropies_stay_below_the_bound(bound: float, num_filled: int) -> None:
    """A running sum that equals the bound is not below it: of positions with two equal tokens the first is filled at
    the bound of its own entropy, as the fallback; certain ones come one a step at a bound of 0."""
    algorithm = ALGORITHMS["EntropyBounded"]
    logits = torch.full((1, 4, 8), -1e4)
    logits[..., 4 : 5 if bound == 0 else 6] = 0.0
    logits[:, 0, 5] = -1e4  # certain
    row = make_row([None] * 4, MASK, params=defaults(algorithm, entropy_bound=bound))
    _, masked, _, _ = run_step(algorithm, [row], logits)
    assert 4 - sum(masked[0]) == num_filled


@names
@pytest.mark.parametrize(
    ("logit", "threshold", "filled"),
    [(0.0, 0.0, [True] * 4), (4.0, 1.0, [True, False, False, False]), (200.0, 1.0, [True, False, False, False])],
    ids=["threshold 0", "threshold 1", "threshold 1, probability 1"],
)
def test_thresholds_are_strict(name: str, logit: float, threshold: float, filled: list[bool]) -> None:
    """Threshold 0 fills all masks at once; 1 fills one a step, the lowest of equally sure ones, even at 1.0."""
    algorithm = ALGORITHMS[name]
    logits = torch.zeros(1, 4, 8)
    logits[..., 6] = logit
    row = make_row([None] * 4, MASK, params=defaults(algorithm, threshold=threshold))
    _, masked, _, _ = run_step(algorithm, [row], logits)
    assert masked == [[not was_filled for was_filled in filled]]


def test_probability_that_equals_the_threshold_does_not_pass() -> None:
    """Two equal tokens give 0.5 each: at threshold 0.5 only the fallback fills, just below it all masks go."""
    logits = torch.full((2, 4, 8), -1e4)
    logits[..., 4:6] = 0.0
    rows = [make_row([None] * 4, MASK, params={"threshold": threshold}) for threshold in (0.5, 0.499)]
    ids, masked, _, _ = run_step(LOW, rows, logits)
    assert masked == [[False, True, True, True], [False] * 4]
    assert ids[1] == [4] * 4


@names
def test_each_row_has_its_own_parameters(name: str) -> None:
    """Rows of one batch with equal blocks and logits fill by their own thresholds."""
    algorithm = ALGORITHMS[name]
    logits = torch.zeros(1, 4, 3)
    logits[0, :, 1] = torch.tensor([0.0, 1.0, 2.0, 3.0])  # probabilities 0.5, 0.73, 0.88, 0.95
    thresholds = [0.9, 0.7, 0.6, 0.3, 0.99]
    rows = [make_row([None] * 4, MASK, params=defaults(algorithm, threshold=value)) for value in thresholds]
    _, masked, _, _ = run_step(algorithm, rows, logits.expand(5, 4, 3))
    assert [4 - sum(row) for row in masked] == [1, 3, 3, 4, 1]


def test_low_confidence_is_done_one_forward_after_the_last_mask() -> None:
    """Filling the last mask does not make a row done; the forward over the full block does, and changes nothing."""
    batch = make_batch([make_row([1, None, None, 3], MASK, params={"threshold": 0.0})])
    forwards = run_block(LOW, batch, lambda ids: random_logits(1, 1, 4, 8, 5.0), max_steps=2)
    assert forwards == [2]


def swapping_model(ids: Tensor) -> Tensor:
    """Each position wants 5 where 4 stands and 4 where anything else stands."""
    logits = torch.zeros(*ids.shape, 8)
    return logits.scatter_(2, torch.where(ids == 4, 5, 4)[..., None], 10.0)


@pytest.mark.parametrize("max_post_edit_steps", [0, 1, 2, 16])
def test_tokens_that_swap_for_ever_end_with_the_budget(max_post_edit_steps: int) -> None:
    """Two tokens that replace each other are stopped after max_post_edit_steps edits; one more forward, which changes
    nothing, gives the KV."""
    params = defaults(JOINT, max_post_edit_steps=max_post_edit_steps)
    batch = make_batch([make_row([1, None], MASK, num_prompt=1, params=params)])
    forwards = run_block(JOINT, batch, swapping_model, JOINT.max_steps(2, params))
    assert forwards == [1 + max_post_edit_steps + 1]
    assert batch.ids.tolist() == [[1, 4 if max_post_edit_steps % 2 == 0 else 5]]


def test_edits_beside_masks_cost_no_budget() -> None:
    """While a mask remains tokens are edited in every step, and the budget starts only after the last mask."""
    params = defaults(JOINT, threshold=1.0, max_post_edit_steps=1)
    batch = make_batch([make_row([None] * 4, MASK, params=params)])
    state = JOINT.init_step_state(1, "cpu")
    seen = []
    for _ in range(6):
        done = JOINT.step(batch, swapping_model(batch.ids), state)
        seen.append((batch.ids[0].tolist(), int(state["post_edit_steps"]), bool(done)))
    assert seen == [
        ([4, MASK, MASK, MASK], 0, False),
        ([5, 4, MASK, MASK], 0, False),
        ([4, 5, 4, MASK], 0, False),
        ([5, 4, 5, 4], 0, False),
        ([4, 5, 4, 5], 1, False),
        ([4, 5, 4, 5], 2, True),
    ]


def test_joint_threshold_without_a_change_is_done_at_once() -> None:
    """A step that finds no mask and nothing to edit is the last one, with no forward after it."""
    logits = torch.zeros(1, 2, 8)
    logits[0, 0, 4], logits[0, 1, 5] = 9.0, 9.0
    row = make_row([4, 5], MASK, params=defaults(JOINT))
    assert run_step(JOINT, [row], logits)[:3] == ([[4, 5]], [[False, False]], [True])


@pytest.mark.parametrize(("edit_threshold", "edited"), [(0.0, True), (0.6, True), (0.8, False), (1.0, False)])
def test_edits_need_their_own_threshold(edit_threshold: float, edited: bool) -> None:
    """A token is replaced only if the new one's probability, 0.73 here, is above edit_threshold."""
    logits = torch.full((1, 1, 8), -1e4)
    logits[0, 0, 4], logits[0, 0, 5] = 0.0, 1.0
    row = make_row([4], MASK, params=defaults(JOINT, edit_threshold=edit_threshold))
    ids, _, done, _ = run_step(JOINT, [row], logits)
    assert (ids, done) == ([[5 if edited else 4]], [not edited])


def test_positions_filled_in_a_step_are_not_edited_in_it() -> None:
    """An edit threshold that nothing reaches does not keep masks from being filled, nor the other way round."""
    logits = torch.zeros(2, 2, 8)
    logits[..., 5] = 9.0
    rows = [
        make_row([4, None], MASK, params=defaults(JOINT, threshold=0.5, edit_threshold=1.0)),
        make_row([4, None], MASK, params=defaults(JOINT, threshold=1.0, edit_threshold=0.5)),
    ]
    assert run_step(JOINT, rows, logits)[0] == [[4, 5], [5, 5]]


def test_penalty_discourages_repeats() -> None:
    """The penalty lowers the token at the previous position, prompt included, but not at position 0 and not where the
    previous position is masked; a row without penalty in the same batch is untouched."""
    logits = torch.zeros(2, 4, 8)
    logits[..., 5], logits[..., 6] = 3.0, 2.0
    # Position 1 stands after a 5, position 3 after a masked position that happens to hold 5.
    ids: list[int | None] = [5, None, None, None]
    rows = [make_row(ids, MASK, num_prompt=1, params=defaults(JOINT, threshold=0, penalty_lambda=p)) for p in (2, 0)]
    for row in rows:
        row.ids[2] = 5
    first = make_row([None] * 4, MASK, params=defaults(JOINT, threshold=0, penalty_lambda=2))
    assert run_step(JOINT, rows, logits)[0] == [[5, 6, 5, 5], [5, 5, 5, 5]]
    assert run_step(JOINT, [first], logits[:1])[0] == [[5, 5, 5, 5]]


def test_penalty_counts_in_the_probability() -> None:
    """The confidence that the threshold sees is taken after the penalty."""
    logits = torch.full((1, 2, 8), -1e4)
    logits[..., 5], logits[..., 6] = 3.0, 0.0
    # Without the penalty 5 would have 0.95; with 4 taken off, 6 has 0.73.
    for threshold, edited in ((0.7, True), (0.75, False)):
        params = defaults(JOINT, edit_threshold=threshold, penalty_lambda=4)
        row = make_row([5, 7], MASK, num_prompt=1, params=params)
        assert run_step(JOINT, [row], logits)[0] == [[5, 6 if edited else 7]]


@names
def test_seeds_give_other_answers_and_the_same_seed_the_same(name: str) -> None:
    """Sampled blocks with different seeds or samples differ, with the same ones they are equal."""
    algorithm = ALGORITHMS[name]
    rows = [
        make_row([None] * 8, MASK, params=defaults(algorithm), temperature=1.0, seed=seed, sample_index=sample_index)
        for seed, sample_index in ((1, 0), (2, 0), (1, 1), (1, 0))
    ]
    batch = make_batch(rows)
    run_block(algorithm, batch, small_model(3, 8, 20, 0.3), max_steps=100)
    first, *others, again = batch.ids.tolist()
    assert first == again
    assert first not in others
    assert others[0] != others[1]


@names
def test_a_block_that_moves_goes_on_as_before(name: str) -> None:
    """Encoded after any step and decoded elsewhere, the block takes the same steps to the same end."""
    algorithm, model = ALGORITHMS[name], small_model(9, 4, 6, 1.0)
    params = defaults(algorithm)
    row = make_row([None] * 4, MASK, params=params, temperature=0.8, seed=11)
    stayed, moved = make_batch([row]), make_batch([row])
    state, moved_state = algorithm.init_step_state(1, "cpu"), algorithm.init_step_state(1, "cpu")
    for _ in range(algorithm.max_steps(4, params)):
        done = algorithm.step(stayed, model(stayed.ids), state)
        moved_state = algorithm.decode_state(algorithm.encode_state(moved_state), params)
        assert algorithm.step(moved, model(moved.ids), moved_state).equal(done)
        assert moved.ids.equal(stayed.ids)
        if done:
            return
        stayed.step_index += 1
        moved.step_index += 1
    pytest.fail("not done")

"""What holds for every algorithm: its entry, its parameters, its state, and that its step can be captured."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from tests.algorithms.batches import defaults, make_batch, make_row, random_logits
from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
MASK = 2
Result = TypeVar("Result")
JOINT = ALGORITHMS["JointThreshold"]


def run_without_values(function: Callable[[Tensor], Result]) -> Result:
    """Call with a tensor that has a shape and no values: whatever asks for a value, or for a shape that depends on
    one, raises."""
    with FakeTensorMode() as mode:
        return function(mode.from_tensor(torch.zeros(3, 4, 8)))


@every_algorithm
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_step_is_tensor_operations_only(algorithm: DllmAlgorithm, temperature: float) -> None:
    """A step runs, and keeps shapes and dtypes, on tensors without values: it reads none of them on the host."""

    def step(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        row = make_row([1, None, 3, None], MASK, num_prompt=1, params=defaults(algorithm), temperature=temperature)
        batch = make_batch([row] * 3)
        done = algorithm.step(batch, logits, algorithm.init_step_state(3, "cpu"))
        return done, batch.ids, batch.masked

    done, ids, masked = run_without_values(step)
    assert (done.shape, done.dtype) == ((3,), torch.bool)
    assert (ids.shape, ids.dtype) == ((3, 4), torch.int64)
    assert (masked.shape, masked.dtype) == ((3, 4), torch.bool)


@pytest.mark.parametrize(
    "peeks",
    [
        lambda logits: logits[0, 0, 0].item(),
        lambda logits: logits.tolist(),
        lambda logits: bool(logits.any()),
        lambda logits: logits.nonzero(),
        lambda logits: logits[logits > 0],
    ],
    ids=["item", "tolist", "bool", "nonzero", "boolean index"],
)
def test_reading_a_value_is_found_out(peeks: Callable[[Tensor], object]) -> None:
    """The check above fails for a step that reads a tensor on the host or has a shape that depends on data."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        run_without_values(peeks)


@every_algorithm
def test_step_writes_in_place(algorithm: DllmAlgorithm) -> None:
    """Ids, mask bits and state are changed in the tensors that were given, as a captured graph needs it."""
    batch = make_batch([make_row([1, None, 3, 4], MASK, params=defaults(algorithm))])
    state = algorithm.init_step_state(1, "cpu")
    given = {"ids": batch.ids, "masked": batch.masked, **state}
    algorithm.step(batch, random_logits(1, 1, 4, 8, 1.0), state)
    now = {"ids": batch.ids, "masked": batch.masked, **state}
    assert all(now[name] is given[name] for name in given)
    assert not batch.masked.any()


@every_algorithm
def test_entry_and_parameters_are_sound(algorithm: DllmAlgorithm) -> None:
    """The entry has the algorithm's name; parameter names differ, defaults lie in their range and are integers where
    they must be."""
    assert ALGORITHMS[algorithm.name] is algorithm
    assert len({param.name for param in algorithm.params}) == len(algorithm.params)
    for param in algorithm.params:
        assert param.min_value <= param.default <= param.max_value
        assert not param.is_integer or param.default == int(param.default)


def test_published_defaults() -> None:
    """The parameters and defaults are those the documentation of the field gives."""
    assert {name: (algorithm.edits, defaults(algorithm)) for name, algorithm in ALGORITHMS.items()} == {
        "LowConfidence": (False, {"threshold": 0.95}),
        "JointThreshold": (
            True,
            {"threshold": 0.5, "edit_threshold": 0, "max_post_edit_steps": 16, "penalty_lambda": 0},
        ),
        "LowConfidenceDynamic": (False, {"threshold": 0.85, "denoising_steps": 0}),
        "LowConfidenceStatic": (False, {"denoising_steps": 0}),
        "Sequential": (False, {"denoising_steps": 0}),
        "EntropyBounded": (False, {"entropy_bound": 0.35}),
        "HierarchyBlock": (False, {"threshold": 0.9, "sub_block_size": 8}),
    }


@pytest.mark.parametrize("block_size", [4, 32])
def test_bounds_of_a_block(block_size: int) -> None:
    """LowConfidence needs a forward for each position and one for the KV; JointThreshold its edits besides."""
    assert ALGORITHMS["LowConfidence"].max_steps(block_size, {"threshold": 1}) == block_size + 1
    for budget in (0, 16, 1024):
        assert JOINT.max_steps(block_size, defaults(JOINT, max_post_edit_steps=budget)) == block_size + budget + 1


@every_algorithm
def test_next_block_is_all_masks(algorithm: DllmAlgorithm) -> None:
    """The stock algorithms begin every block with masks only, and leave the done one as it is."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    next_ids, masked = algorithm.next_block(ids, algorithm.init_step_state(2, "cpu"), 7)
    assert next_ids.tolist() == [[7] * 3] * 2
    assert masked.tolist() == [[True] * 3] * 2
    assert ids.tolist() == [[1, 2, 3], [4, 5, 6]]


@every_algorithm
def test_next_block_begins_with_the_token_that_is_known(algorithm: DllmAlgorithm) -> None:
    """With shifted logits the first position is set, and the others are masks."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    next_ids, masked = algorithm.next_block(ids, algorithm.init_step_state(2, "cpu"), 7, torch.tensor([8, 9]))
    assert next_ids.tolist() == [[8, 7, 7], [9, 7, 7]]
    assert masked.tolist() == [[False, True, True]] * 2


@every_algorithm
def test_empty_state_is_a_fresh_block(algorithm: DllmAlgorithm) -> None:
    """No bytes decode to the state a block begins with, and a fresh state comes back from its encoding."""
    fresh = algorithm.init_step_state(1, "cpu")
    for data in (b"", algorithm.encode_state(fresh)):
        decoded = algorithm.decode_state(data, defaults(algorithm))
        assert decoded.keys() == fresh.keys()
        assert all(decoded[name].equal(fresh[name]) and decoded[name].dtype == fresh[name].dtype for name in fresh)


@pytest.mark.parametrize("post_edit_steps", [0, 1, 16])
def test_joint_threshold_state_travels(post_edit_steps: int) -> None:
    """The encoding is version 1 and the count, and gives the state back."""
    data = JOINT.encode_state({"post_edit_steps": torch.tensor([post_edit_steps])})
    assert data == struct.pack("<BI", 1, post_edit_steps)
    assert JOINT.decode_state(data, defaults(JOINT))["post_edit_steps"].tolist() == [post_edit_steps]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("LowConfidence", b"\x01", "LowConfidence has no state, got 1 bytes"),
        ("JointThreshold", b"\x02\0\0\0\0", "version 2 of the JointThreshold state is unknown, known is 1"),
        ("JointThreshold", b"\x01\0\0\0", "the JointThreshold state has 4 bytes, not 5"),
        ("JointThreshold", b"\x01\0\0\0\0\0", "the JointThreshold state has 6 bytes, not 5"),
        ("JointThreshold", b"\x01\x11\0\0\0", "post_edit_steps 17 is over max_post_edit_steps 16"),
        ("JointThreshold", b"\x01\xff\xff\xff\xff", "post_edit_steps 4294967295 is over max_post_edit_steps 16"),
    ],
)
def test_bad_state_is_refused(name: str, data: bytes, reason: str) -> None:
    """Bytes that no encoding gives are refused with one line that says what is wrong."""
    algorithm = ALGORITHMS[name]
    with pytest.raises(ValueError, match=f"^{reason}$"):
        algorithm.decode_state(data, defaults(algorithm))

"""Batch-invariant mode: the logits of a request are the same bits whatever is around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.model_folder import read_model_folder
from tests.model.checkpoints import SHIPPED_MODEL
from tests.model.forwards import Bench, Part, in_blocks, random_ids, tiny_model
from worker_svc.models.base import BlockModel
from worker_svc.models.loading import load_model

B = 8
NUM_BLOCKS = 6
OTHERS = {slot: random_ids(16 * B, seed=100 + slot) for slot in range(1, 6)}


def alone(model: BlockModel, ids: list[int], block_size: int) -> Tensor:
    """Block by block, nothing beside it."""
    bench = Bench(model, block_size, batch_invariant=True)
    blocks = in_blocks(ids, block_size)
    return torch.cat([bench.forward(Part(0, index, [block]))[0] for index, block in enumerate(blocks)])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> BlockModel:
    return tiny_model(request.param)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.booleans(), min_size=NUM_BLOCKS - 1, max_size=NUM_BLOCKS - 1),
    others=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.booleans()), max_size=4, unique_by=lambda other: other[0]
    ),
    slot=st.just(0),
    page_seed=st.integers(0, 1000),
    blocks_per_page=st.integers(1, 3),
)
def test_same_bits_in_any_company_and_chunking(
    model: BlockModel,
    cuts: list[bool],
    others: list[tuple[int, int, bool]],
    slot: int,
    page_seed: int,
    blocks_per_page: int,
) -> None:
    """Alone, among others, on other pages, in other chunks: the same bits, for the logits and for the KV."""
    ids = random_ids(NUM_BLOCKS * B, seed=1)
    blocks = in_blocks(ids, B)
    bench = Bench(model, B, True, blocks_per_page, page_seed)
    got = []
    first = 0
    for index in range(1, NUM_BLOCKS + 1):
        if index < NUM_BLOCKS and not cuts[index - 1]:
            continue
        before = [Part(s, first, in_blocks(OTHERS[s], B)[first : first + n]) for s, n, is_before in others if is_before]
        after = [
            Part(s, first, in_blocks(OTHERS[s], B)[first : first + n]) for s, n, is_before in others if not is_before
        ]
        got.append(bench.forward(*before, Part(slot, first, blocks[first:index]), *after)[len(before)])
        first = index
    assert torch.equal(torch.cat(got), alone(model, ids, B))


def test_same_bits_in_another_slot_after_other_work(model: BlockModel) -> None:
    """A slot and pages that others have used before change nothing."""
    ids = random_ids(3 * B, seed=2)
    bench = Bench(model, B, batch_invariant=True, page_seed=5)
    bench.forward(Part(3, 0, in_blocks(OTHERS[1], B)))
    assert torch.equal(bench.forward(Part(3, 0, in_blocks(ids, B)))[0], alone(model, ids, B))


def test_same_bits_for_repeated_forwards_of_one_block(model: BlockModel) -> None:
    """A block that was denoised through other tokens first ends with the bits of one forward over its final tokens."""
    ids = random_ids(2 * B, seed=3)
    blocks = in_blocks(ids, B)
    bench = Bench(model, B, batch_invariant=True)
    bench.forward(Part(0, 0, blocks[:1]))
    for seen in range(B):
        bench.forward(Part(0, 1, [blocks[1][:seen] + [511] * (B - seen)]))
    assert torch.equal(bench.forward(Part(0, 1, blocks[1:]))[0], alone(model, ids, B)[B:])


@pytest.mark.parametrize("block_size", [1, 4])
def test_same_bits_for_small_blocks(model: BlockModel, block_size: int) -> None:
    """Blocks of one token, where shapes of size 1 invite other code paths, and of four."""
    ids = random_ids(5 * block_size, seed=4)
    bench = Bench(model, block_size, batch_invariant=True, page_seed=3, blocks_per_page=2)
    other = Part(1, 0, in_blocks(random_ids(3 * block_size, seed=5), block_size))
    got = bench.forward(other, Part(2, 0, in_blocks(ids, block_size)))[1]
    assert torch.equal(got, alone(model, ids, block_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_same_bits_for_the_shipped_model(dtype: torch.dtype) -> None:
    """The same at the shipped model's sizes."""
    folder = read_model_folder(SHIPPED_MODEL)
    shipped = load_model(folder, dtype=dtype, device="cpu")
    block_size = folder.block_size
    ids = random_ids(4 * block_size, seed=6)
    bench = Bench(shipped, block_size, batch_invariant=True, page_seed=2)
    others = [Part(slot, 0, in_blocks(random_ids(slot * block_size, seed=slot), block_size)) for slot in (1, 2, 5)]
    first = bench.forward(*others, Part(3, 0, in_blocks(ids, block_size)[:3]))[-1]
    second = bench.forward(Part(3, 3, in_blocks(ids, block_size)[3:]), *others)[0]
    assert torch.equal(torch.cat((first, second)), alone(shipped, ids, block_size))

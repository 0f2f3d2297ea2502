"""The model's forward against the slow reference, block by block and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.model_folder import read_model_folder
from tests.model.checkpoints import SHIPPED_MODEL, TINY_CONFIG, random_weights
from tests.model.forwards import Bench, Part, in_blocks, model_of, random_ids, tiny_model
from tests.model.reference import reference_logits
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models.base import BlockModel
from worker_svc.models.loading import load_model

B = 8
MASK = 511


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(TINY_CONFIG)


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tiny_model()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("prompt_length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 4 * B + 3])
def test_a_block_over_cached_blocks_is_the_pass_without_cache(
    model: BlockModel, weights: dict[str, Tensor], prompt_length: int, batch_invariant: bool
) -> None:
    """For every place a prompt can end in a block, cached blocks and one pass without KV give the same logits."""
    ids = random_ids(prompt_length, seed=prompt_length)
    ids += [MASK] * (B - prompt_length % B)
    blocks = in_blocks(ids, B)
    last = len(blocks) - 1
    expected = reference_logits(weights, TINY_CONFIG, ids, B)[-B:]

    one_by_one = Bench(model, B, batch_invariant)
    for index, block in enumerate(blocks[:-1]):
        one_by_one.forward(Part(0, index, [block]))
    assert close(one_by_one.forward(Part(0, last, [blocks[-1]]))[0], expected)

    chunk_then_row = Bench(model, B, batch_invariant)
    if last:
        chunk_then_row.forward(Part(0, 0, blocks[:-1]))
    assert close(chunk_then_row.forward(Part(0, last, [blocks[-1]]))[0], expected)

    all_in_one_chunk = Bench(model, B, batch_invariant)
    assert close(all_in_one_chunk.forward(Part(0, 0, blocks))[0][-B:], expected)


@pytest.mark.parametrize(("block_size", "blocks_per_page"), [(1, 1), (1, 3), (4, 1), (8, 2), (4, 5)])
def test_block_and_page_sizes(
    model: BlockModel, weights: dict[str, Tensor], block_size: int, blocks_per_page: int
) -> None:
    """The block size is free, pages may hold several blocks, and a half-filled page adds nothing."""
    ids = random_ids(7 * block_size, seed=3)
    blocks = in_blocks(ids, block_size)
    bench = Bench(model, block_size, blocks_per_page=blocks_per_page)
    logits = [*bench.forward(Part(2, 0, blocks[:3])), *bench.forward(Part(2, 3, blocks[3:4]))]
    logits += bench.forward(Part(2, 4, blocks[4:]))
    assert close(torch.cat(logits), reference_logits(weights, TINY_CONFIG, ids, block_size))


def test_rows_and_chunks_of_all_lengths_in_one_forward(model: BlockModel, weights: dict[str, Tensor]) -> None:
    """Short rows, long rows, a chunk and a fused pair in one forward each see exactly their own prefix."""
    rows = {slot: random_ids(num_blocks * B, seed=slot) for slot, num_blocks in enumerate((1, 16, 3, 9, 2))}
    bench = Bench(model, B)
    prefixes = [Part(slot, 0, in_blocks(ids, B)[:-1]) for slot, ids in rows.items() if slot not in (0, 3)]
    bench.forward(*prefixes, Part(3, 0, in_blocks(rows[3], B)[:7]))
    parts = [Part(slot, len(ids) // B - 1, in_blocks(ids, B)[-1:]) for slot, ids in rows.items() if slot != 3]
    parts.insert(2, Part(3, 7, in_blocks(rows[3], B)[7:]))
    parts.append(Part(5, 0, in_blocks(rows[1], B)[:4]))
    for part, logits in zip(parts, bench.forward(*parts), strict=True):
        ids = rows[1][: 4 * B] if part.slot == 5 else rows[part.slot]
        assert close(logits, reference_logits(weights, TINY_CONFIG, ids, B)[-len(logits) :])


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": False},
        {"tie_word_embeddings": True},
        {"num_shared_experts": 0},
        {"num_shared_experts": 2},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"topk_group": 4},
        {"num_experts_per_tok": 8},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"partial_rotary_factor": 1.0, "rotary_dim": 16},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_variants_of_the_configuration(changes: dict[str, Any]) -> None:
    """Each key that changes the forward is followed."""
    config = TINY_CONFIG | changes
    weights = random_weights(config, seed=1)
    ids = random_ids(3 * B, seed=7)
    bench = Bench(model_of(config, weights), B)
    logits = [*bench.forward(Part(0, 0, in_blocks(ids, B)[:2])), *bench.forward(Part(0, 2, in_blocks(ids, B)[2:]))]
    assert close(torch.cat(logits), reference_logits(weights, config, ids, B))


def test_the_shipped_model_is_the_reference() -> None:
    """The shipped checkpoint, loaded from its folder, gives the reference's logits."""
    from safetensors.torch import load_file

    folder = read_model_folder(SHIPPED_MODEL)
    shipped = load_model(folder, dtype=torch.float32, device="cpu")
    ids = random_ids(4 * folder.block_size, seed=5)
    blocks = in_blocks(ids, folder.block_size)
    bench = Bench(shipped, folder.block_size)
    logits = [*bench.forward(Part(0, 0, blocks[:3])), *bench.forward(Part(0, 3, blocks[3:]))]
    expected = reference_logits(load_file(SHIPPED_MODEL / "model.safetensors"), folder.config, ids, folder.block_size)
    assert close(torch.cat(logits), expected)


def test_bfloat16_is_close_to_the_reference() -> None:
    """In bf16 the logits are those of fp32 up to rounding (all experts chosen, so that rounding flips no choice)."""
    config = TINY_CONFIG | {"num_experts_per_tok": 16, "topk_group": 4}
    weights = random_weights(config)
    ids = random_ids(3 * B, seed=2)
    logits = Bench(model_of(config, weights, torch.bfloat16), B).forward(Part(0, 0, in_blocks(ids, B)))[0]
    expected = reference_logits(weights, config, ids, B)
    error = (logits - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_no_token_of_a_later_block_leaks(model: BlockModel, batch_invariant: bool) -> None:
    """Changing a token of block j changes block j and nothing before it; in batch-invariant mode not one bit."""
    ids = random_ids(4 * B, seed=4)
    before = Bench(model, B, batch_invariant).forward(Part(0, 0, in_blocks(ids, B)))[0]
    ids[2 * B + 5] += 1
    after = Bench(model, B, batch_invariant).forward(Part(0, 0, in_blocks(ids, B)))[0]
    # Otherwise an expert's product may have another number of rows, and with it another rounding.
    tolerance = 0.0 if batch_invariant else 1e-5
    assert torch.allclose(before[: 2 * B], after[: 2 * B], atol=tolerance, rtol=0)
    assert not torch.isclose(before[2 * B], after[2 * B], atol=1e-4).all()  # both directions inside the block


def test_kv_after_the_commit_is_that_of_a_fresh_forward(model: BlockModel) -> None:
    """After the forward over a block's final tokens nothing is left of the tokens that stood there before."""
    ids = random_ids(3 * B, seed=6)
    blocks = in_blocks(ids, B)
    bench = Bench(model, B)
    for index, block in enumerate(blocks):
        for seen in (0, 3, B):  # masks, some tokens, all
            bench.forward(Part(1, index, [block[:seen] + [MASK] * (B - seen)]))
    fresh = Bench(model, B, page_seed=1)
    fresh.forward(Part(4, 0, blocks))
    assert torch.allclose(bench.final_kv(1, 3), fresh.final_kv(4, 3), atol=1e-5)


def test_only_own_pages_are_written(model: BlockModel) -> None:
    """A forward writes the blocks of its units; the null page and all others stay as they were."""
    bench = Bench(model, B, blocks_per_page=2)
    bench.forward(Part(0, 0, [random_ids(B, seed=0)]), Part(1, 0, in_blocks(random_ids(3 * B, seed=1), B)))
    written = ~bench.kv.k[0].isnan().flatten(1).all(1)
    own = {0, int(bench.kv.page_table[0, 0]), *bench.kv.page_table[1, :2].tolist()}
    assert set(written.nonzero().flatten().tolist()) == own
    assert not bench.kv.k[:, 0].any()
    assert not bench.kv.v[:, 0].any()
    assert bench.kv.k[:, bench.kv.page_table[0, 0], B:].isnan().all()


def test_a_unit_without_a_page_is_stopped(model: BlockModel) -> None:
    """Nothing may be written into the null page, which every row reads."""
    bench = Bench(model, B)
    bench.kv.page_table[0, 1] = 0
    with pytest.raises(RuntimeError):
        bench.forward(Part(0, 1, [random_ids(B, seed=0)]))


def test_a_row_with_nan_does_not_reach_its_neighbours(model: BlockModel, weights: dict[str, Tensor]) -> None:
    """A request whose keys and values are not finite gets such logits; the rows beside it get theirs."""
    ids = random_ids(3 * B, seed=8)
    bench = Bench(model, B)
    bench.forward(Part(0, 0, in_blocks(ids, B)[:2]))
    sick, well = bench.forward(Part(1, 1, [random_ids(B, seed=9)]), Part(0, 2, in_blocks(ids, B)[2:]))
    assert sick.isnan().any()  # slot 1 never computed its first block, and its page is NaN
    assert close(well, reference_logits(weights, TINY_CONFIG, ids, B)[-B:])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_only_where_they_are_wanted(model: BlockModel, batch_invariant: bool) -> None:
    """Logits come for the wanted units in the wanted order; none wanted gives none, and the KV all the same."""
    from worker_svc.model_runner import ForwardInput, Segment

    ids = torch.tensor(in_blocks(random_ids(3 * B, seed=1), B))

    def inputs(wanted: list[int]) -> ForwardInput:
        units = torch.arange(3)
        wanted_units = torch.tensor(wanted, dtype=torch.int64)
        return ForwardInput(ids, torch.zeros_like(units), units, (Segment(0, 3, 0),), wanted_units)

    bench = Bench(model, B, batch_invariant)
    none = bench.runner.forward(inputs([]), bench.kv)
    assert none.shape == (0, B, model.vocab_size)
    assert none.dtype == torch.float32
    assert bench.final_kv(0, 3).isfinite().all()
    every = bench.runner.forward(inputs([0, 1, 2]), bench.kv)
    assert torch.allclose(bench.runner.forward(inputs([2, 0]), bench.kv), every[[2, 0]], atol=1e-5)


def test_batch_invariant_mode_asks_for_one_thread(model: BlockModel) -> None:
    """Several CPU threads would cut sums differently, so the mode refuses them."""
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="one thread"):
            TorchModelRunner(model, Bench(model, B).runner.attention, batch_invariant=True)
    finally:
        torch.set_num_threads(1)

"""The attention backend against attention written out query by query."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.attention.base import AttentionBackend
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput, Segment

NUM_SLOTS, MAX_BLOCKS, KV_HEADS, HEAD_DIM = 5, 12, 2, 8


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [queries, heads, head_dim] over all of k, v: [keys, kv heads, head_dim]."""
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        kv_head = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, kv_head].T / q.shape[-1] ** 0.5
        out[:, head] = scores.softmax(-1) @ v[:, kv_head]
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["torch"])  # flashinfer: test_flash_infer.py
def test_every_unit_sees_its_own_prefix_and_no_more(name: str, data: st.DataObject) -> None:
    """Any mix of rows and chunks over scattered pages equals query-by-query attention over the slot's own blocks."""
    block_size = data.draw(st.sampled_from([1, 4, 32]), "block size")
    blocks_per_page = data.draw(st.integers(1, 3), "blocks per page")
    group = data.draw(st.integers(1, 3), "query heads per kv head")
    chosen = data.draw(
        st.lists(
            st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS - 3), st.sampled_from([1, 1, 1, 2, 3])),
            min_size=1,
            unique_by=lambda segment: segment[0],
        ),
        "slot, first block, blocks",
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100), "seed"))

    num_pages = NUM_SLOTS * MAX_BLOCKS
    kv = KVStore.allocate(
        num_layers=2,
        num_pages=num_pages,
        page_size=block_size * blocks_per_page,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_slots=NUM_SLOTS,
        max_pages_per_slot=MAX_BLOCKS,
        dtype=torch.float32,
        device="cpu",
    )
    kv.page_table[:] = (torch.randperm(num_pages, generator=generator) + 1).view(NUM_SLOTS, MAX_BLOCKS)
    kv.k[:, 1:] = kv.v[:, 1:] = float("nan")

    segments: list[Segment] = []
    units: list[tuple[int, int]] = []
    for slot, first_block, num_blocks in chosen:
        segments.append(Segment(len(units), num_blocks, first_block))
        units += [(slot, first_block + i) for i in range(num_blocks)]
    prefixes = {}
    for slot, first_block, _ in chosen:
        shape = (2, MAX_BLOCKS * block_size, KV_HEADS, HEAD_DIM)
        prefixes[slot] = torch.randn(shape, generator=generator)
        for position in range(first_block * block_size):
            page = kv.page_table[slot, position // kv.page_size]
            kv.k[1, page, position % kv.page_size], kv.v[1, page, position % kv.page_size] = prefixes[slot][:, position]

    def spans(slot: int, block: int) -> Tensor:
        return prefixes[slot][:, block * block_size : (block + 1) * block_size]

    inputs = ForwardInput(
        ids=torch.zeros((len(units), block_size), dtype=torch.int64),
        slots=torch.tensor([slot for slot, _ in units]),
        block_index=torch.tensor([block for _, block in units]),
        segments=tuple(segments),
        logits_units=torch.arange(len(units)),
    )
    q = torch.randn((len(units), block_size, KV_HEADS * group, HEAD_DIM), generator=generator)
    k, v = torch.stack([spans(slot, block) for slot, block in units], dim=1)
    backend: AttentionBackend = ATTENTION_BACKENDS[name]()
    with torch.inference_mode():
        backend.plan(inputs, kv)
        out = backend.run(1, q, k, v)

    for unit, (slot, block) in enumerate(units):
        keys, values = prefixes[slot][:, : (block + 1) * block_size]
        assert torch.allclose(out[unit], naive(q[unit], keys, values), atol=1e-5)
    assert kv.k[0, 1:].isnan().all()  # the other layer is not touched

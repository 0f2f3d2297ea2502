"""The index arrays that FlashInfer is given, read by someone who knows only its documentation."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import paged_reader
from tests.model.forwards import tiny_model
from worker_svc.attention import AttentionUnavailable
from worker_svc.attention.flash_infer import FlashInferAttention
from worker_svc.attention.torch_sdpa import TorchSdpaAttention
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput, Segment

NUM_SLOTS, MAX_BLOCKS, KV_HEADS, HEAD_DIM = 6, 12, 2, 8
WORKSPACE = torch.empty(0, dtype=torch.uint8)


def make_kv(block_size: int, blocks_per_page: int, generator: torch.Generator) -> KVStore:
    """Pages scattered over the slots, and NaN wherever nothing was written, the padding page too."""
    kv = KVStore.allocate(
        num_layers=2,
        num_pages=NUM_SLOTS * MAX_BLOCKS,
        page_size=block_size * blocks_per_page,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_slots=NUM_SLOTS,
        max_pages_per_slot=MAX_BLOCKS,
        dtype=torch.float32,
        device="cpu",
    )
    kv.page_table[:] = (torch.randperm(kv.num_pages, generator=generator) + 1).view(NUM_SLOTS, MAX_BLOCKS)
    kv.k[:, 1:] = kv.v[:, 1:] = float("nan")
    return kv


def make_input(chosen: list[tuple[int, int, int]], block_size: int) -> ForwardInput:
    """Segments (slot, first block, blocks)."""
    segments: list[Segment] = []
    units: list[tuple[int, int]] = []
    for slot, first_block, num_blocks in chosen:
        segments.append(Segment(len(units), num_blocks, first_block))
        units += [(slot, first_block + i) for i in range(num_blocks)]
    return ForwardInput(
        ids=torch.zeros((len(units), block_size), dtype=torch.int64),
        slots=torch.tensor([slot for slot, _ in units]),
        block_index=torch.tensor([block for _, block in units]),
        segments=tuple(reversed(segments)),  # in any order
        logits_units=torch.arange(len(units)),
    )


@st.composite
def forwards(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Forwards of some slots, in order: a prefix in chunks, then blocks that are denoised in place, rolled over, or
    fused with the commit of the one before; slots pause and go on, and the order of a forward's units changes."""
    prefix = {slot: draw(st.integers(0, 4)) for slot in range(draw(st.integers(1, NUM_SLOTS)))}
    reached = dict.fromkeys(prefix, 0)
    result = []
    for _ in range(draw(st.integers(1, 4))):
        chosen: list[tuple[int, int, int]] = []
        for slot, num_prefix in prefix.items():
            if draw(st.sampled_from([False, True, True])):
                if reached[slot] < num_prefix:
                    count = draw(st.integers(1, num_prefix - reached[slot]))
                    chosen.append((slot, reached[slot], count))
                    reached[slot] += count
                elif reached[slot] < MAX_BLOCKS - 1:
                    kind = draw(st.sampled_from(["same block", "next block", "fused"]))
                    chosen.append((slot, reached[slot], 1 + (kind == "fused")))
                    reached[slot] += kind != "same block"
        if chosen:
            result.append(draw(st.permutations(chosen)))
    return result


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_the_arrays_say_is_what_the_torch_backend_computes(data: st.DataObject) -> None:
    """Mixes of chunks, rows in place, rolled-over and fused ones, also padded for a graph: equal to 1e-5, and the pools
    too, but for the padding page."""
    block_size = data.draw(st.sampled_from([1, 4, 8]), "block size")
    blocks_per_page = data.draw(st.integers(1, 3), "blocks per page")
    num_heads = KV_HEADS * data.draw(st.integers(1, 3), "query heads per kv head")
    num_padding = data.draw(st.none() | st.integers(0, 3), "padding units; none = no graph")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    kv_torch = make_kv(block_size, blocks_per_page, generator)
    kv_flash = make_kv(block_size, blocks_per_page, generator)
    kv_flash.page_table.copy_(kv_torch.page_table)
    reference, eager = TorchSdpaAttention(), FlashInferAttention(paged_reader, num_heads, WORKSPACE)
    graphs: dict[int, FlashInferAttention] = {}
    for chosen in data.draw(forwards(), "forwards"):
        inputs = make_input(chosen, block_size)
        num_units = len(inputs.ids)
        shape = (num_units, block_size, num_heads + 2 * KV_HEADS, HEAD_DIM)
        qkv = torch.split(torch.randn(shape, generator=generator), [num_heads, KV_HEADS, KV_HEADS], dim=2)
        with torch.inference_mode():
            reference.plan(inputs, kv_torch)
            expected = reference.run(1, *qkv)
            backend, padded = eager, list(qkv)
            if num_padding is not None:
                width = num_units + num_padding
                backend = graphs.setdefault(width, eager.for_graph(width))
                padded = [torch.cat((x, torch.randn(num_padding, *x.shape[1:]))) for x in qkv]
            backend.plan(inputs, kv_flash)
            out = backend.run(1, *padded)
        assert out.isfinite().all()
        assert torch.allclose(out[:num_units], expected, atol=1e-5)
        for ours, theirs in ((kv_flash.k, kv_torch.k), (kv_flash.v, kv_torch.v)):
            assert torch.equal(ours[:, :-1].nan_to_num(9), theirs[:, :-1].nan_to_num(9))


def test_a_unit_without_a_page_is_found() -> None:
    """It would write where all rows read."""
    kv = make_kv(4, 1, torch.Generator().manual_seed(0))
    kv.page_table[2, 1] = 0
    with pytest.raises(RuntimeError, match="nonzero"):
        FlashInferAttention(paged_reader, KV_HEADS, WORKSPACE).plan(make_input([(2, 0, 2)], 4), kv)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_keys_are_split_but_in_batch_invariant_mode(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--batch-invariant` says reaches every plan, of eager forwards and of a graph's."""
    model: Any = tiny_model(torch.bfloat16)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "flashinfer", paged_reader)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **kwargs: WORKSPACE)
    backend = FlashInferAttention.for_model(model, batch_invariant)
    monkeypatch.undo()
    kv = make_kv(4, 1, torch.Generator().manual_seed(0))
    for one in (backend, backend.for_graph(4)):
        one.plan(make_input([(2, 0, 2), (1, 1, 1)], 4), kv)
        assert one._wrapper.options["disable_split_kv"] is batch_invariant


@pytest.mark.skipif(not paged_reader.HAS_FLASHINFER, reason="the extra `flashinfer` is not installed")
def test_the_installed_package_is_called_as_it_is_written() -> None:
    """The names that are called are there, with the parameters that the reader has, which binds every call."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    ours, theirs = (
        list(inspect.signature(module.append_paged_kv_cache).parameters) for module in (paged_reader, flashinfer)
    )
    assert ours == theirs
    plan = list(inspect.signature(wrapper.plan).parameters)
    assert plan[1:5] == ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
    with pytest.raises(TypeError, match="num_qo_heads"):
        paged_reader.bind("BatchPrefillWithPagedKVCacheWrapper.plan", None, *[None] * 4)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "reason"),
    [
        ("cpu", torch.bfloat16, True, "flashinfer needs --device cuda"),
        ("cuda", torch.float32, True, "flashinfer needs --dtype bfloat16"),
        ("cuda", torch.bfloat16, False, "install the extra `flashinfer`"),
    ],
)
def test_where_it_cannot_work_the_reason_is_told(
    device: str, dtype: torch.dtype, installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No CUDA, the wrong type, no package: one line that says what to do."""
    model: Any = tiny_model(dtype)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    if not installed:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(AttentionUnavailable, match=reason):
        FlashInferAttention.for_model(model, batch_invariant=False)

"""Attention with FlashInfer's paged prefill kernels, in bf16 on CUDA.

A unit, one block of one slot, is one request of FlashInfer's: its B queries over all (i + 1) * B keys of its prefix and
itself, without a mask. That is exact, as all keys are written before any is read and no query of a unit sees less than
another. Units of one slot name the same pages, each as many as it sees:

    unit                        slot 7, block 0    slot 7, block 1    slot 3, block 2      (a page = a block here)
    qo_indptr             0     B                  2B                 3B
    paged_kv_indptr       0     1                  3                  6
    paged_kv_indices            7.0                7.0 7.1            3.0 3.1 3.2          int32 page ids
    paged_kv_last_page_len      B                  B                  B

A chunk of n blocks so reads its prefix n times, from the L2 cache mostly, and computes no score that a mask would drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.attention.base import AttentionBackend, AttentionUnavailable
from worker_svc.host_copies import on_host, upload

if TYPE_CHECKING:
    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput, Segment
    from worker_svc.models.base import BlockModel

TILE_ROWS = 128  # of the largest tile of the kernels; a row is a query of one of the heads that share a kv head
TILES_PER_PROCESSOR = 2


class Kernels(Protocol):
    """What is called of the package `flashinfer`."""

    BatchPrefillWithPagedKVCacheWrapper: Any
    append_paged_kv_cache: Any


class PageArrays(NamedTuple):
    """Where the units of a forward lie in the pool, int32, as `plan` takes it: N units, P page ids in all."""

    qo_indptr: Tensor  # [N + 1], on the host
    indptr: Tensor  # [N + 1], on the host
    indices: Tensor  # [P], on the device
    last_page_len: Tensor  # [N], on the host


class _AppendArrays(NamedTuple):
    """Where the tokens of a forward are written, int32 on the device, as `append_paged_kv_cache` takes it."""

    batch_indices: Tensor  # [N * B]
    positions: Tensor  # [N * B]
    indices: Tensor
    indptr: Tensor
    last_page_len: Tensor


class FlashInferAttention(AttentionBackend):
    """See the module's text.

    `num_units`: the fixed number of units of a captured graph; None = as many as the forward has. Units that fill it up
    read and write the padding page.
    """

    def __init__(
        self,
        kernels: Kernels,
        num_heads: int,
        workspace: Tensor,
        split_keys: bool = True,
        num_units: int | None = None,
    ) -> None:
        self._kernels = kernels
        self._num_heads = num_heads
        self._workspace = workspace
        self._split_keys = split_keys
        self._num_units = num_units
        self._wrapper: Any = None
        self._planned: torch.cuda.Event | None = None

    @classmethod
    def for_model(cls, model: BlockModel, batch_invariant: bool) -> Self:
        """In batch-invariant mode keys are not split, so that the order of a sum is that of the keys."""
        if model.device.type != "cuda":
            raise AttentionUnavailable("flashinfer needs --device cuda")
        if model.dtype is not torch.bfloat16:
            raise AttentionUnavailable("flashinfer needs --dtype bfloat16")
        try:
            import flashinfer
        except ImportError as error:
            raise AttentionUnavailable(f"flashinfer: {error}; install the extra `flashinfer`") from error
        num_tiles = TILES_PER_PROCESSOR * torch.cuda.get_device_properties(model.device).multi_processor_count
        num_bytes = _workspace_bytes(model.num_heads, model.head_dim, TILE_ROWS * -(-num_tiles // model.num_kv_heads))
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)
        return cls(flashinfer, model.num_heads, workspace, split_keys=not batch_invariant)

    def for_graph(self, num_units: int) -> Self:
        """Shares the workspace where it is large enough, as two forwards never run at the same time."""
        return type(self)(self._kernels, self._num_heads, self._workspace, self._split_keys, num_units)

    def plan(self, inputs: ForwardInput, kv: KVStore) -> None:
        if self._planned is not None:
            self._planned.synchronize()  # the wrapper writes again into the buffer that its plan was copied from
        pages = page_arrays(inputs, kv, self._num_units or len(inputs.ids))
        positions = _positions(inputs, len(pages.last_page_len))
        self._kv = kv
        if self._num_units is None:
            self._append = _append_arrays(pages, positions)
            if self._wrapper is None:
                self._wrapper = self._kernels.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, kv_layout="NHD", backend="fa2"
                )
        elif self._wrapper is None:
            longest = torch.zeros(self._num_units * kv.page_table.shape[1], dtype=torch.int32, device=kv.k.device)
            self._append = _append_arrays(pages, positions)._replace(indices=longest)
            # A graph does not count on equal lengths: beside all rows there is room for a last tile of every unit.
            num_rows = len(positions) * self._num_heads // kv.k.shape[3] + self._num_units * TILE_ROWS
            num_bytes = _workspace_bytes(self._num_heads, kv.k.shape[4], num_rows)
            if len(self._workspace) < num_bytes:
                self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=kv.k.device)
            self._wrapper = self._kernels.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                kv_layout="NHD",
                use_cuda_graph=True,
                qo_indptr_buf=self._append.indptr.clone(),
                paged_kv_indptr_buf=self._append.indptr,
                paged_kv_indices_buf=self._append.indices,
                paged_kv_last_page_len_buf=self._append.last_page_len,
                backend="fa2",
            )
        else:
            self._append.positions.copy_(positions)
        self._wrapper.plan(
            pages.qo_indptr,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            num_qo_heads=self._num_heads,
            num_kv_heads=kv.k.shape[3],
            head_dim_qk=kv.k.shape[4],
            page_size=kv.page_size,
            causal=False,
            q_data_type=kv.k.dtype,
            kv_data_type=kv.k.dtype,
            max_token_per_sequence=inputs.ids.shape[1],  # else it looks for the longest, one after the other
            disable_split_kv=not self._split_keys,
        )
        if kv.k.device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record(torch.cuda.current_stream(kv.k.device))

    def _drop_pool(self) -> None:
        del self._kv

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._kv.k[layer], self._kv.v[layer]
        batch_indices, positions, indices, indptr, last_page_len = self._append
        self._kernels.append_paged_kv_cache(
            k.flatten(0, 1), v.flatten(0, 1), batch_indices, positions, pool, indices, indptr, last_page_len, "NHD"
        )
        out: Tensor = self._wrapper.run(q.flatten(0, 1), pool)
        return out.view(q.shape)


def _workspace_bytes(num_heads: int, head_dim: int, num_rows: int) -> int:
    """Partial results in fp32 where the keys of a unit are split: a sum and its weight for each head and row."""
    return num_heads * num_rows * (head_dim + 1) * 4 + 4096


def page_arrays(inputs: ForwardInput, kv: KVStore, num_units: int) -> PageArrays:
    """Of the units of a forward, and after them padding units up to `num_units`. Host work per unit, not per page."""
    block_size, device = inputs.ids.shape[1], kv.k.device
    assert kv.page_size % block_size == 0
    blocks_per_page = kv.page_size // block_size
    blocks = _blocks_of(inputs.segments, num_units)
    num_pages = blocks // blocks_per_page + 1
    indptr = np.concatenate(([0], num_pages.cumsum()))
    num_padding, own_pages = num_units - len(inputs.ids), int(indptr[len(inputs.ids)])
    ends = upload(indptr, device, torch.int64)
    places = torch.arange(own_pages, device=device)
    units = torch.searchsorted(ends[1:], places, right=True)
    indices = kv.page_table[inputs.slots[units], places - ends[units]].to(torch.int32)
    # A unit without a page would write into the null page, which all rows of the torch backend read.
    torch._assert_async((indices > 0).all())
    if num_padding:
        padding = torch.full((num_padding,), kv.padding_page, dtype=torch.int32, device=device)
        indices = torch.cat((indices, padding))
    return PageArrays(
        qo_indptr=on_host(np.arange(num_units + 1) * block_size, device, torch.int32),
        indptr=on_host(indptr, device, torch.int32),
        indices=indices,
        last_page_len=on_host((blocks % blocks_per_page + 1) * block_size, device, torch.int32),
    )


def _blocks_of(segments: Sequence[Segment], num_units: int) -> NDArray[np.int64]:
    """The block of each unit; padding units stand at block 0."""
    blocks = [0] * num_units
    for first_unit, count, first_block, _ in segments:
        if count == 1:
            blocks[first_unit] = first_block
        else:
            blocks[first_unit : first_unit + count] = range(first_block, first_block + count)
    return np.array(blocks, dtype=np.int64)


def _positions(inputs: ForwardInput, num_units: int) -> Tensor:
    """int32 [num_units * B] on the device: the position of each token in its slot; padding units stand at block 0."""
    block_size, device = inputs.ids.shape[1], inputs.ids.device
    blocks = torch.zeros(num_units, dtype=torch.int64, device=device)
    blocks[: len(inputs.ids)] = inputs.block_index
    positions = blocks[:, None] * block_size + torch.arange(block_size, device=device)
    return positions.flatten().to(torch.int32)


def _append_arrays(pages: PageArrays, positions: Tensor) -> _AppendArrays:
    """The same units as requests to write to."""
    device, num_units = positions.device, len(pages.last_page_len)
    requests = torch.arange(num_units, dtype=torch.int32, device=device)
    return _AppendArrays(
        batch_indices=requests.repeat_interleave(len(positions) // num_units),
        positions=positions,
        indices=pages.indices,
        indptr=pages.indptr.to(device, non_blocking=True, copy=True),
        last_page_len=pages.last_page_len.to(device, non_blocking=True, copy=True),
    )

"""Attention with torch's `scaled_dot_product_attention`: gather the pages of a row, then attend.

The pool is read and written in blocks, not pages: page_size is a multiple of the block size and a unit sees whole
blocks only, so a gather of blocks is exact. What lies behind the last block of a row, in its last page or in the
padding of a batch, is read from the null page: softmax gives it weight 0, but 0 * NaN is NaN, so stale memory must not
be read.

    pool block = page * blocks_per_page + block % blocks_per_page          (page 0, and so pool block 0, is all zeros)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker_svc.attention.base import AttentionBackend
from worker_svc.host_copies import upload

if TYPE_CHECKING:
    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput, Segment

# Rows up to this many tokens share a batch; above it, rows whose lengths lie between the same powers of two do.
SHORTEST_BUCKET_TOKENS = 128


@dataclass(frozen=True)
class _Batch:
    """Units that one call of `scaled_dot_product_attention` answers: single units of several slots, or one segment."""

    units: torch.Tensor | slice  # which of the forward's U units
    num_rows: int  # 1 for a segment of several units
    pool_blocks: torch.Tensor  # int64 [num_rows * padded blocks]: what to gather
    mask: torch.Tensor | None  # bool: [num_rows, 1, 1, keys], or [queries, keys] for a segment; None = all visible


class TorchSdpaAttention(AttentionBackend):
    """See the module's text; on every device that torch knows."""

    _k: torch.Tensor
    _v: torch.Tensor
    _write_blocks: torch.Tensor
    _batches: list[_Batch]

    def plan(self, inputs: ForwardInput, kv: KVStore) -> None:
        num_units, block_size = inputs.ids.shape
        assert kv.page_size % block_size == 0
        num_layers, _, _, *heads = kv.k.shape
        self._k = kv.k.view(num_layers, -1, block_size, *heads)
        self._v = kv.v.view(num_layers, -1, block_size, *heads)
        self._table = kv.page_table
        self._blocks_per_page = kv.page_size // block_size
        self._write_blocks = self._pool_blocks(inputs.slots, inputs.block_index)
        # A unit without a page would write into the null page, which all rows read.
        torch._assert_async((self._write_blocks >= self._blocks_per_page).all())

        buckets: dict[int, list[Segment]] = {}
        self._batches = []
        for segment in inputs.segments:
            if segment.num_units > 1:
                self._batches.append(self._plan_segment(segment, inputs))
            else:
                length = (segment.first_block + 1) * block_size
                bucket = (max(length, SHORTEST_BUCKET_TOKENS) - 1).bit_length()
                buckets.setdefault(bucket, []).append(segment)
        for segments in buckets.values():
            self._batches.append(self._plan_rows(segments, inputs, all_units=len(segments) == num_units))

    def _drop_pool(self) -> None:
        del self._k, self._v, self._table

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_pool, v_pool = self._k[layer], self._v[layer]
        k_pool.index_copy_(0, self._write_blocks, k)
        v_pool.index_copy_(0, self._write_blocks, v)
        if len(self._batches) == 1:  # all units: nothing to pick and put back
            return _attend(self._batches[0], q, k_pool, v_pool)
        out = torch.empty_like(q)
        for batch in self._batches:
            out[batch.units] = _attend(batch, q[batch.units], k_pool, v_pool)
        return out

    def _pool_blocks(self, slots: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Where the blocks `blocks` of `slots` lie in the pool; the two shapes broadcast."""
        pages = self._table[slots, blocks // self._blocks_per_page]
        return pages * self._blocks_per_page + blocks % self._blocks_per_page

    def _plan_rows(self, segments: list[Segment], inputs: ForwardInput, all_units: bool) -> _Batch:
        """Single units, padded to the longest of them."""
        block_size, device = inputs.ids.shape[1], inputs.ids.device
        units: torch.Tensor | slice = slice(None)
        if not all_units:
            units = upload([s.first_unit for s in segments], device)
        last_block = inputs.block_index[units][:, None]
        blocks = torch.arange(max(s.first_block for s in segments) + 1, device=device)
        pool_blocks = self._pool_blocks(inputs.slots[units][:, None], blocks)
        mask = None
        if len({s.first_block for s in segments}) > 1:
            visible = blocks <= last_block
            pool_blocks = pool_blocks.where(visible, 0)
            mask = visible.repeat_interleave(block_size, dim=1)[:, None, None, :]
        return _Batch(units, len(segments), pool_blocks.flatten(), mask)

    def _plan_segment(self, segment: Segment, inputs: ForwardInput) -> _Batch:
        """Consecutive blocks of one slot: a query sees its own block and those before it."""
        block_size, device = inputs.ids.shape[1], inputs.ids.device
        units = slice(segment.first_unit, segment.first_unit + segment.num_units)
        blocks = torch.arange(segment.first_block + segment.num_units, device=device)
        visible = blocks <= blocks[segment.first_block :, None]
        mask = visible.repeat_interleave(block_size, dim=0).repeat_interleave(block_size, dim=1)
        pool_blocks = self._pool_blocks(inputs.slots[segment.first_unit], blocks)
        return _Batch(units, 1, pool_blocks, mask)


def _attend(batch: _Batch, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
    """q: [units, B, num_heads, head_dim]; the pools of one layer: [pool blocks, B, num_kv_heads, head_dim].

    Query heads that share a kv head are folded into another dimension, so that kv heads are never copied.
    """
    num_units, block_size, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    group = num_heads // num_kv_heads
    k, v = (
        pool.index_select(0, batch.pool_blocks).view(batch.num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        for pool in (k_pool, v_pool)
    )  # [rows, kv heads, keys, head_dim]
    if batch.num_rows == num_units:
        # One mask for all queries of a row, so the group goes into the queries: [rows, kv heads, group * B, head_dim]
        q = q.view(num_units, block_size, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = scaled_dot_product_attention(q, k, v, attn_mask=batch.mask)
        out = out.view(num_units, num_kv_heads, group, block_size, head_dim).permute(0, 3, 1, 2, 4)
    else:
        # One row with a mask per query, so kv heads become the batch: [kv heads, group, queries, head_dim]
        q = q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        k, v = (x.transpose(0, 1).expand(-1, group, -1, -1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=batch.mask).permute(2, 0, 1, 3)
    return out.reshape(num_units, block_size, num_heads, head_dim)

"""The memory that holds keys and values: one paged pool for all layers, and the map from slots to pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class KVStore:
    """Keys and values of all slots.

    `k`, `v`: [num_layers, num_pages + 2, page_size, num_kv_heads, head_dim] in the model's dtype. Page 0 is the null
    page: always zeros, never given out, never written. The last one is the padding page: what fills up the batch of a
    captured forward writes there, and no row reads it. `page_table`: int64 [num_slots, max_pages_per_slot] on the
    device of the pool; entry i of a slot is the page of its positions [i * page_size, (i + 1) * page_size), 0 = none.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        max_pages_per_slot: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVStore:
        """A zeroed pool of `num_pages` pages of `page_size` tokens (and null and padding page) and an empty map."""
        shape = (num_layers, num_pages + 2, page_size, num_kv_heads, head_dim)
        return cls(
            k=torch.zeros(shape, dtype=dtype, device=device),
            v=torch.zeros(shape, dtype=dtype, device=device),
            page_table=torch.zeros((num_slots, max_pages_per_slot), dtype=torch.int64, device=device),
        )

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    @property
    def num_pages(self) -> int:
        """Pages that can be given out: 1 to `num_pages`."""
        return self.k.shape[1] - 2

    @property
    def padding_page(self) -> int:
        return self.num_pages + 1

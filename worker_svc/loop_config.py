"""Sizes and switches of a worker's loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopConfig:
    """Sizes and identities that the loop needs beside the model."""

    fingerprint: str
    block_size: int
    mask_token_id: int
    context_length: int  # tokens; rounded up to a whole block inside
    page_size: int
    num_slots: int
    num_pages: int
    chunked_prefill_size: int  # tokens
    fused_commit: bool = False  # FDFO: a block's last forward is the next block's first, where nothing is edited
    lease_s: float = 30.0
    early_end: bool = True  # a block may end its request with masks behind the first stop token
    enable_prefix_caching: bool = True
    logit_shift: int = 0  # 1 = the logits of a position speak of the next one

    def __post_init__(self) -> None:
        """Raises ValueError for switches that exclude each other."""
        if self.logit_shift and self.fused_commit:
            raise ValueError("fused_commit: with shifted logits a block begins with what the commit before it gave")

    @property
    def max_blocks(self) -> int:
        return -(-self.context_length // self.block_size)

    @property
    def max_pages_per_slot(self) -> int:
        return -(-self.max_blocks * self.block_size // self.page_size)

"""Sizes and switches of a worker's loop."""

from __future__ import annotations

from dataclasses import dataclass

from common.model_folder import ModelFolder
from worker_svc.settings import WorkerSettings, default_kv_tokens


class SettingsError(Exception):
    """One line: two settings that do not go together."""


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


def loop_config(folder: ModelFolder, settings: WorkerSettings) -> LoopConfig:
    """The loop's sizes from the settings; raises SettingsError naming the flag."""
    block_size = folder.block_size
    page_size = settings.page_size or block_size
    if page_size % block_size:
        raise SettingsError(f"--page-size {page_size} must be a multiple of the block size {block_size} (--block-size)")
    chunk = settings.chunked_prefill_size
    if chunk < block_size or chunk % block_size:
        raise SettingsError(
            f"--chunked-prefill-size {chunk} must be a multiple of the block size {block_size} (--block-size), such as "
            f"{max(1, chunk // block_size) * block_size}"
        )
    total_tokens = settings.max_total_tokens or default_kv_tokens(
        folder.context_length, page_size, settings.max_running_requests
    )
    if total_tokens < page_size:
        raise SettingsError(f"--max-total-tokens {total_tokens} is less than a page of {page_size}")
    return LoopConfig(
        fingerprint=folder.fingerprint,
        block_size=block_size,
        mask_token_id=folder.mask_token_id,
        context_length=folder.context_length,
        page_size=page_size,
        num_slots=settings.max_running_requests,
        num_pages=total_tokens // page_size,
        chunked_prefill_size=chunk,
        fused_commit=settings.fused_commit and not folder.logit_shift,
        logit_shift=folder.logit_shift,
        lease_s=settings.lease_s,
        early_end=settings.early_end,
        enable_prefix_caching=settings.enable_prefix_caching,
    )

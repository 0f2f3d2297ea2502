"""Attention over the paged pool: one interface, and a backend per way to compute it."""

from __future__ import annotations

from worker_svc.attention.base import AttentionBackend, AttentionUnavailable
from worker_svc.attention.flash_infer import FlashInferAttention
from worker_svc.attention.torch_sdpa import TorchSdpaAttention

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchSdpaAttention,
    "flashinfer": FlashInferAttention,
}

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "AttentionUnavailable"]

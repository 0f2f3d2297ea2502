"""What the runner and the loader need of a model."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from worker_svc.attention.base import AttentionBackend


class BlockModel(nn.Module):
    """A block-diffusion model for inference: a stack of layers over units [U, B] of tokens.

    Made with uninitialised weights on torch's default device; the loader fills them.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def forward_waits(self) -> bool:
        """Whether a forward reads on the host what the device has computed; such a one cannot be captured."""
        return False

    @abstractmethod
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """ids, positions: int64 [U, B]. Returns hidden states [U, B, hidden_size], before the last norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, B, hidden_size] -> [R, B, vocab_size] in the same dtype, by the hidden state of each position."""

    @abstractmethod
    def checkpoint_tensors(self, merged_experts: bool) -> dict[str, torch.Tensor]:
        """For every tensor name of a checkpoint the memory it belongs in: a parameter, or a view into one.

        `merged_experts`: the layout with one tensor per layer for all experts instead of one per expert.
        """

"""The part of a model that one process holds, where several hold it together (tensor parallel).

    q, k, v      this rank's heads (rows)              each rank attends with its own heads, over its own KV
    output       the columns of these heads            the products are summed over the ranks
    gate, up     this rank's rows of each expert       so all ranks have the same work, whichever experts are chosen
    down         the columns of these rows             summed
    embedding    the rows of this rank's tokens        summed: all but one rank add zeros
    head         the rows of this rank's tokens        rank 0 gathers the logits

Norms and the gate that chooses experts are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common.architectures.base import Backbone


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`; with more than one, torch.distributed's default group joins them."""

    rank: int = 0
    size: int = 1

    def misfit(self, config: Backbone) -> str | None:
        """Which size of the model cannot be cut into equal parts, in one line; None: all can."""
        sizes = {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "vocab_size": config.vocab_size,
        }
        if config.experts is None or config.first_moe_layer:
            sizes["intermediate_size"] = config.intermediate_size
        if config.experts is not None:
            sizes["moe_intermediate_size"] = config.experts.intermediate_size
        faults = [f"{key} {value} is not a multiple of it" for key, value in sizes.items() if value % self.size]
        return faults[0] if faults else None

    def part_of(self, config: Backbone) -> Backbone:
        """The sizes of this rank's part; the vocabulary is told whole."""
        experts = config.experts
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
            experts=experts and replace(experts, intermediate_size=experts.intermediate_size // self.size),
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in its dtype; x itself is changed."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def embed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The embeddings of `ids` [...], of whose table this rank has `rows` [vocab_size / size, H] -> [..., H]."""
        if self.size == 1:
            return torch.nn.functional.embedding(ids, rows)
        own = ids - self.rank * len(rows)
        is_ours = (own >= 0) & (own < len(rows))
        x = torch.nn.functional.embedding(own.clamp(0, len(rows) - 1), rows)
        return self.sum(x.masked_fill_(~is_ours[..., None], 0))

    def gather_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's tokens [..., vocab_size / size] -> on rank 0 those of all tokens [..., vocab_size]; on
        the others what they gave."""
        if self.size == 1:
            return own
        if not own.numel():
            return own.new_empty(*own.shape[:-1], own.shape[-1] * self.size)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own.contiguous(), parts, dst=0)
        return own if parts is None else torch.cat(parts, dim=-1)


WHOLE = Shard()

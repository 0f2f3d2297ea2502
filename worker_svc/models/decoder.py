"""The decoder that all served models are, in plain PyTorch and for inference only: what differs stands in its Backbone.

T is the number of tokens, U * B, where units do not matter. Weights are [out, in], as `linear` takes them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from common.architectures.base import Backbone, Experts
from worker_svc.attention.base import AttentionBackend
from worker_svc.models.base import BlockModel
from worker_svc.models.experts import loop_waits, route, run_experts, silu_gate
from worker_svc.models.shard import WHOLE, Shard


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in fp32; cast back before the weight is applied."""
    x_fp32 = x.float()
    scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * scale).to(x.dtype) * weight


def rope_angles(
    positions: torch.Tensor, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """For `rotate`: cos and signed sin of position * theta ** (-2i / rotary_dim), [U, B, 1, rotary_dim].

    In fp32, then cast.
    """
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
    angles = positions[..., None, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [U, B, heads, head_dim]. Pairs (i, i + rotary_dim / 2) turn; dimensions from rotary_dim on pass unchanged."""
    rotary_dim = cos.shape[-1]
    turning = x[..., :rotary_dim]
    partners = turning.roll(rotary_dim // 2, dims=-1)
    return torch.cat((turning * cos + partners * sin, x[..., rotary_dim:]), dim=-1)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v are one product."""

    def __init__(self, config: Backbone, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps, self.names = config.head_dim, config.rms_norm_eps, config.names
        num_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.query_key_value = _weight(num_rows, config.hidden_size, dtype=dtype)
        self.bias = _weight(num_rows, dtype=dtype) if config.qkv_bias else None
        self.query_norm = _weight(self.head_dim, dtype=dtype) if config.qk_norm else None
        self.key_norm = _weight(self.head_dim, dtype=dtype) if config.qk_norm else None
        self.dense = _weight(config.hidden_size, self.num_heads * self.head_dim, dtype=dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, attention: AttentionBackend
    ) -> torch.Tensor:
        """x: [U, B, H] -> [U, B, H]."""
        heads = torch.unflatten(linear(x, self.query_key_value, self.bias), -1, (-1, self.head_dim))
        # q and k go through norm and rotation together: on small batches the number of operations is the time.
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            weights = self.query_norm.expand(self.num_heads, -1), self.key_norm.expand(self.num_kv_heads, -1)
            qk = rms_norm(qk, torch.cat(weights), self.eps)
        q, k = torch.split(rotate(qk, cos, sin), [self.num_heads, self.num_kv_heads], dim=-2)
        return linear(attention.run(layer, q, k, v).flatten(-2), self.dense)

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        names = self.names
        tensors: dict[str, torch.Tensor] = {f"{prefix}{names.output}.weight": self.dense}
        for kind, fused in (("weight", self.query_key_value), ("bias", self.bias)):
            if fused is not None:
                sizes = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
                parts = torch.split(fused, sizes) if len(names.qkv) == 3 else (fused,)
                tensors |= {f"{prefix}{name}.{kind}": part for name, part in zip(names.qkv, parts, strict=True)}
        if self.query_norm is not None and self.key_norm is not None:
            tensors[f"{prefix}{names.q_norm}.weight"] = self.query_norm
            tensors[f"{prefix}{names.k_norm}.weight"] = self.key_norm
        return tensors


class DenseMlp(nn.Module):
    """SwiGLU: the first layers' feed-forward, and the shared experts of the others."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = _weight(2 * intermediate_size, hidden_size, dtype=dtype)
        self.down = _weight(hidden_size, intermediate_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(silu_gate(linear(x, self.gate_up)), self.down)

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.chunk(2)
        return {
            f"{prefix}gate_proj.weight": gate,
            f"{prefix}up_proj.weight": up,
            f"{prefix}down_proj.weight": self.down,
        }


class SparseMlp(nn.Module):
    """Routed experts plus shared ones. The gate's weight and bias are kept in fp32, in which they are used."""

    def __init__(self, config: Experts, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        num_experts, inner = config.num_experts, config.intermediate_size
        self.gate = _weight(num_experts, hidden_size, dtype=torch.float32)
        self.expert_bias = _weight(num_experts, dtype=torch.float32) if config.has_bias else None
        self.gate_up = _weight(num_experts, 2 * inner, hidden_size, dtype=dtype)
        self.down = _weight(num_experts, hidden_size, inner, dtype=dtype)
        num_shared = config.num_shared
        self.shared_experts = DenseMlp(hidden_size, inner * num_shared, dtype) if num_shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = route(tokens, self.gate, self.expert_bias, self.config)
        out = run_experts(tokens, weights, experts, self.gate_up, self.down).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {f"{prefix}gate.weight": self.gate}
        if self.expert_bias is not None:
            tensors[f"{prefix}gate.expert_bias"] = self.expert_bias
        gate, up = self.gate_up.chunk(2, dim=1)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", self.down)):
            if merged_experts:
                tensors[f"{prefix}experts.{name}"] = weight
            else:
                for expert, expert_weight in enumerate(weight):
                    tensors[f"{prefix}experts.{expert}.{name}.weight"] = expert_weight
        if self.shared_experts is not None:
            tensors |= self.shared_experts.checkpoint_tensors(f"{prefix}shared_experts.", merged_experts)
        return tensors


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)); of a shard, `config` has its sizes."""

    def __init__(self, config: Backbone, index: int, dtype: torch.dtype, shard: Shard) -> None:
        super().__init__()
        self.index, self.eps, self.names, self.shard = index, config.rms_norm_eps, config.names, shard
        self.input_norm = _weight(config.hidden_size, dtype=dtype)
        self.attention = Attention(config, dtype)
        self.post_attention_norm = _weight(config.hidden_size, dtype=dtype)
        self.mlp: DenseMlp | SparseMlp
        if config.experts is None or index < config.first_moe_layer:
            self.mlp = DenseMlp(config.hidden_size, config.intermediate_size, dtype)
        else:
            self.mlp = SparseMlp(config.experts, config.hidden_size, dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        own = self.attention(rms_norm(x, self.input_norm, self.eps), cos, sin, self.index, attention)
        x = x + self.shard.sum(own)
        return x + self.shard.sum(self.mlp(rms_norm(x, self.post_attention_norm, self.eps)))

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm,
            **self.attention.checkpoint_tensors(f"{prefix}{self.names.attention}."),
            **self.mlp.checkpoint_tensors(f"{prefix}mlp.", merged_experts),
        }


class Decoder(BlockModel):
    """The whole model or a shard of it, with weights still to be loaded."""

    def __init__(self, config: Backbone, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        super().__init__()
        config = shard.part_of(config)
        self.config, self.dtype, self.shard = config, dtype, shard
        self.num_layers, self.vocab_size = config.num_layers, config.vocab_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_tokens = config.vocab_size // shard.size
        self.embedding = _weight(num_tokens, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList([Layer(config, index, dtype, shard) for index in range(config.num_layers)])
        self.norm = _weight(config.hidden_size, dtype=dtype)
        self.lm_head = None if config.tied_head else _weight(num_tokens, config.hidden_size, dtype=dtype)

    @property
    def forward_waits(self) -> bool:
        return any(loop_waits(mlp.gate_up) for mlp in self.modules() if isinstance(mlp, SparseMlp))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        cos, sin = rope_angles(positions, self.config.rotary_dim, self.config.rope_theta, self.dtype)
        x = self.shard.embed(ids, self.embedding)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.embedding if self.lm_head is None else self.lm_head
        own = linear(rms_norm(hidden, self.norm, self.config.rms_norm_eps), head)
        return self.shard.gather_logits(own)

    def checkpoint_tensors(self, merged_experts: bool) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            f"{self.config.names.embedding}.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            tensors |= layer.checkpoint_tensors(f"model.layers.{index}.", merged_experts)
        return tensors

"""LLaDA2 MoE (LLaDA2.0 and 2.1, `LLaDA2MoeModelLM`): the forward in plain PyTorch, for inference only.

T is the number of tokens, U * B, where units do not matter. Weights are [out, in], as `linear` takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import embedding, linear, silu

from worker_svc.attention.base import AttentionBackend
from worker_svc.models.base import BlockModel

if TYPE_CHECKING:
    from worker_svc.models.configuration_llada2_moe import LLaDA2MoeConfig


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


def top_lowest_index(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of the last dimension, best first; of equals the lower one, which `topk` leaves open."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, config: LLaDA2MoeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group-limited gate, in fp32. x: [T, hidden_size] -> expert weights fp32 [T, k] and experts int64 [T, k].

    The bias decides who is chosen, not with what weight. A group is as good as its two best experts together.
    """
    scores = linear(x.float(), weight).sigmoid()
    choice = scores + bias
    if config.topk_group < config.n_group:
        groups = torch.unflatten(choice, -1, (config.n_group, -1))
        best_groups = top_lowest_index(groups.topk(2, dim=-1).values.sum(-1), config.topk_group)
        dropped = torch.ones(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter_(-1, best_groups, False)
        choice = groups.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
    experts = top_lowest_index(choice, config.num_experts_per_tok)
    weights = scores.gather(-1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor, experts


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum of each token's experts, weighted in fp32. x: [T, H]; weights, experts: [T, k] -> [T, H] in x's dtype.

    gate_up: [E, 2 * I, H], down: [E, H, I]. Tokens are sorted by expert, so that an expert is two products on
    neighbouring rows and an expert without tokens costs nothing. Reading the counts is a device sync per layer.
    """
    num_tokens, k = experts.shape
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x.index_select(0, order // k)
    hidden = x.new_empty(num_tokens * k, gate_up.shape[1])
    _product_per_expert(rows, gate_up, counts, hidden)
    out = torch.empty_like(rows)
    _product_per_expert(_silu_gate(hidden), down, counts, out)
    per_token = out.index_select(0, order.argsort()).view(num_tokens, k, -1)
    return (per_token.float() * weights[..., None]).sum(1).to(x.dtype)


def _product_per_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int], out: torch.Tensor) -> None:
    """out[i] = weight[expert of row i] @ rows[i], for rows sorted by expert."""
    parts = zip(weight.mT.unbind(), torch.split(rows, counts), torch.split(out, counts), strict=True)
    for expert_weight, expert_rows, expert_out in parts:
        if len(expert_rows):
            torch.mm(expert_rows, expert_weight, out=expert_out)


def _silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    """Grouped-query attention with norms on q and k and partial rotary positions."""

    def __init__(self, config: LLaDA2MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        num_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.query_key_value = _weight(num_rows, config.hidden_size, dtype=dtype)
        self.query_norm = _weight(self.head_dim, dtype=dtype) if config.use_qk_norm else None
        self.key_norm = _weight(self.head_dim, dtype=dtype) if config.use_qk_norm else None
        self.dense = _weight(config.hidden_size, self.num_heads * self.head_dim, dtype=dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, attention: AttentionBackend
    ) -> torch.Tensor:
        """x: [U, B, H] -> [U, B, H]."""
        heads = torch.unflatten(linear(x, self.query_key_value), -1, (-1, self.head_dim))
        # q and k go through norm and rotation together: on small batches the number of operations is the time.
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            weights = self.query_norm.expand(self.num_heads, -1), self.key_norm.expand(self.num_kv_heads, -1)
            qk = rms_norm(qk, torch.cat(weights), self.eps)
        q, k = torch.split(rotate(qk, cos, sin), [self.num_heads, self.num_kv_heads], dim=-2)
        return linear(attention.run(layer, q, k, v).flatten(-2), self.dense)

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            f"{prefix}query_key_value.weight": self.query_key_value,
            f"{prefix}dense.weight": self.dense,
        }
        if self.query_norm is not None and self.key_norm is not None:
            tensors[f"{prefix}query_layernorm.weight"] = self.query_norm
            tensors[f"{prefix}key_layernorm.weight"] = self.key_norm
        return tensors


class DenseMlp(nn.Module):
    """SwiGLU: the first layers' feed-forward, and the shared experts of the others."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = _weight(2 * intermediate_size, hidden_size, dtype=dtype)
        self.down = _weight(hidden_size, intermediate_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(_silu_gate(linear(x, self.gate_up)), self.down)

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.chunk(2)
        return {
            f"{prefix}gate_proj.weight": gate,
            f"{prefix}up_proj.weight": up,
            f"{prefix}down_proj.weight": self.down,
        }


class SparseMlp(nn.Module):
    """Routed experts plus shared ones. The gate's weight and bias are kept in fp32, in which they are used."""

    def __init__(self, config: LLaDA2MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = _weight(num_experts, hidden, dtype=torch.float32)
        self.expert_bias = _weight(num_experts, dtype=torch.float32)
        self.gate_up = _weight(num_experts, 2 * inner, hidden, dtype=dtype)
        self.down = _weight(num_experts, hidden, inner, dtype=dtype)
        num_shared = config.num_shared_experts
        self.shared_experts = DenseMlp(hidden, inner * num_shared, dtype) if num_shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = route(tokens, self.gate, self.expert_bias, self.config)
        out = run_experts(tokens, weights, experts, self.gate_up, self.down).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            f"{prefix}gate.weight": self.gate,
            f"{prefix}gate.expert_bias": self.expert_bias,
        }
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
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: LLaDA2MoeConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.eps = index, config.rms_norm_eps
        self.input_norm = _weight(config.hidden_size, dtype=dtype)
        self.attention = Attention(config, dtype)
        self.post_attention_norm = _weight(config.hidden_size, dtype=dtype)
        self.mlp: DenseMlp | SparseMlp
        if index < config.first_k_dense_replace:
            self.mlp = DenseMlp(config.hidden_size, config.intermediate_size, dtype)
        else:
            self.mlp = SparseMlp(config, dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        x = x + self.attention(rms_norm(x, self.input_norm, self.eps), cos, sin, self.index, attention)
        out: torch.Tensor = x + self.mlp(rms_norm(x, self.post_attention_norm, self.eps))
        return out

    def checkpoint_tensors(self, prefix: str, merged_experts: bool) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm,
            **self.attention.checkpoint_tensors(f"{prefix}attention."),
            **self.mlp.checkpoint_tensors(f"{prefix}mlp.", merged_experts),
        }


class LLaDA2Moe(BlockModel):
    """The whole model, with weights still to be loaded."""

    def __init__(self, config: LLaDA2MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.num_layers, self.vocab_size = config.num_hidden_layers, config.vocab_size
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.word_embeddings = _weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList([Layer(config, index, dtype) for index in range(config.num_hidden_layers)])
        self.norm = _weight(config.hidden_size, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else _weight(config.vocab_size, config.hidden_size, dtype=dtype)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        cos, sin = rope_angles(positions, self.config.rotary_dim, self.config.rope_theta, self.dtype)
        x = embedding(ids, self.word_embeddings)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.word_embeddings if self.lm_head is None else self.lm_head
        return linear(rms_norm(hidden, self.norm, self.config.rms_norm_eps), head).float()

    def checkpoint_tensors(self, merged_experts: bool) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            "model.word_embeddings.weight": self.word_embeddings,
            "model.norm.weight": self.norm,
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            tensors |= layer.checkpoint_tensors(f"model.layers.{index}.", merged_experts)
        return tensors

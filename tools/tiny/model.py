"""The forward that the small model is trained with: the worker's arithmetic, differentiable, with all experts at once.

The published names of its tensors, and the stacked ones that it is trained in, meet in `published_tensors`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import embedding, silu

from common.architectures import ARCHITECTURES
from common.architectures.base import Backbone, Experts
from tools.tiny.noise import NoisyBatch
from worker_svc.models.decoder import rms_norm, rope_angles, rotate
from worker_svc.models.experts import route

BLOCK_SIZE = 32
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 16,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "router_dtype": "fp32",
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "use_cache": False,
}


def _matrix(generator: torch.Generator, rows: int, columns: int) -> nn.Parameter:
    """Of a size that keeps the size of what it is multiplied with."""
    return nn.Parameter(torch.randn(rows, columns, generator=generator) * columns**-0.5)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """In the type of x."""
    return functional.linear(x, weight.to(x.dtype))


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class SwiGlu(nn.Module):
    """One feed-forward: the first layer's, or the shared expert."""

    def __init__(self, generator: torch.Generator, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _matrix(generator, inner, hidden_size)
        self.up_proj = _matrix(generator, inner, hidden_size)
        self.down_proj = _matrix(generator, hidden_size, inner)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: float32 [T, H]; the products are computed in `dtype`."""
        return _linear(self.inner(x.to(dtype)), self.down_proj)

    def inner(self, x: Tensor) -> Tensor:
        return silu(_linear(x, self.gate_proj)) * _linear(x, self.up_proj)

    def published_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}{name}.weight": weight for name, weight in self.named_parameters()}


class Moe(nn.Module):
    """All experts on every token, as one wide feed-forward; what the gate does not choose is multiplied by zero."""

    def __init__(self, generator: torch.Generator, hidden_size: int, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.gate = _matrix(generator, config.num_experts, hidden_size)
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        self.load: Tensor  # how often each expert was chosen since `move_bias`
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)
        self.experts = SwiGlu(generator, hidden_size, config.num_experts * config.intermediate_size)
        self.shared = SwiGlu(generator, hidden_size, config.num_shared * config.intermediate_size)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As SwiGlu's."""
        num_experts = self.config.num_experts
        weights, chosen = route(x, self.gate, self.expert_bias, self.config)
        self.load += chosen.flatten().bincount(minlength=num_experts)
        scale = torch.zeros(len(x), num_experts).scatter(-1, chosen, weights)
        inner = self.experts.inner(x.to(dtype)).view(len(x), num_experts, -1) * scale[..., None].to(dtype)
        out: Tensor = _linear(inner.flatten(1), self.experts.down_proj) + self.shared(x, dtype)
        return out

    def move_bias(self, step_size: float) -> None:
        """Towards the experts that were chosen too seldom."""
        self.expert_bias += step_size * (self.load.mean() - self.load).sign()
        self.load.zero_()

    def published_tensors(self, prefix: str) -> dict[str, Tensor]:
        inner = self.config.intermediate_size
        tensors = {f"{prefix}gate.weight": self.gate, f"{prefix}gate.expert_bias": self.expert_bias}
        for expert in range(self.config.num_experts):
            rows = slice(expert * inner, (expert + 1) * inner)
            tensors |= {
                f"{prefix}experts.{expert}.gate_proj.weight": self.experts.gate_proj[rows],
                f"{prefix}experts.{expert}.up_proj.weight": self.experts.up_proj[rows],
                f"{prefix}experts.{expert}.down_proj.weight": self.experts.down_proj[:, rows],
            }
        return tensors | self.shared.published_tensors(f"{prefix}shared_experts.")


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, generator: torch.Generator, config: Backbone, index: int) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
        self.input_norm, self.post_attention_norm = _ones(hidden), _ones(hidden)
        self.query_norm, self.key_norm = _ones(config.head_dim), _ones(config.head_dim)
        self.query_key_value = _matrix(generator, heads * config.head_dim, hidden)
        self.dense = _matrix(generator, hidden, config.num_heads * config.head_dim)
        self.mlp: SwiGlu | Moe
        if config.experts is None or index < config.first_moe_layer:
            self.mlp = SwiGlu(generator, hidden, config.intermediate_size)
        else:
            self.mlp = Moe(generator, hidden, config.experts)

    def attend(
        self, x: Tensor, angles: tuple[Tensor, Tensor], num_clean: int, visible: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """x: [N, U, B, H]; what is to be added to it. See NoisyBatch for the others."""
        config, eps = self.config, self.config.rms_norm_eps
        num_rows, num_units, size, _ = x.shape
        normed = rms_norm(x, self.input_norm, eps).to(dtype)
        heads = _linear(normed, self.query_key_value).view(num_rows, num_units, size, -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=-2)
        q = rotate(rms_norm(q.float(), self.query_norm, eps), *angles).to(dtype)
        k = rotate(rms_norm(k.float(), self.key_norm, eps), *angles).to(dtype)
        # Plain products: torch's fused attention takes three times as long backwards on so small heads and blocks.
        # Query heads of one key head are rows of one product; the keys of a unit are the clean units' and its own.
        queries = q.view(num_rows * num_units, size, config.num_kv_heads, -1, config.head_dim)
        queries = queries.transpose(1, 2).flatten(2, 3)
        keys, values = _with_clean(k, num_clean), _with_clean(v, num_clean)
        hidden = ~visible.flatten(0, 1).repeat_interleave(size, dim=1)[:, None, None]
        scores = (queries @ keys.mT).float() * config.head_dim**-0.5
        out = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(dtype) @ values
        heads_of = (num_rows, num_units, config.num_kv_heads, size, -1)
        return _linear(out.view(heads_of).transpose(2, 3).flatten(3), self.dense)

    def feed_forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [T, H]; what is to be added to it."""
        out: Tensor = self.mlp(rms_norm(x, self.post_attention_norm, self.config.rms_norm_eps), dtype)
        return out

    def published_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm,
            f"{prefix}attention.query_layernorm.weight": self.query_norm,
            f"{prefix}attention.key_layernorm.weight": self.key_norm,
            f"{prefix}attention.query_key_value.weight": self.query_key_value,
            f"{prefix}attention.dense.weight": self.dense,
            **self.mlp.published_tensors(f"{prefix}mlp."),
        }


def _with_clean(heads: Tensor, num_clean: int) -> Tensor:
    """[N, U, B, heads, head_dim] -> [N * U, heads, (num_clean + 1) * B, head_dim]: the clean units, then its own."""
    heads = heads.transpose(2, 3)
    clean = heads[:, :num_clean].transpose(1, 2).flatten(2, 3)
    return torch.cat((clean[:, None].expand(-1, heads.shape[1], -1, -1, -1), heads), dim=3).flatten(0, 1)


class TrainedModel(nn.Module):
    """The whole model with fresh weights, drawn from `seed`."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = ARCHITECTURES[config["architectures"][0]].backbone(config)
        hidden, vocab_size = self.config.hidden_size, self.config.vocab_size
        self.embedding = _matrix(generator, vocab_size, hidden)
        self.layers = nn.ModuleList([Layer(generator, self.config, i) for i in range(self.config.num_layers)])
        self.norm = _ones(hidden)
        self.lm_head = _matrix(generator, vocab_size, hidden)

    def forward(self, batch: NoisyBatch, wanted: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits float32 [T, V] of the tokens where `wanted`, bool [N, U, B]; products are computed in `dtype`."""
        config = self.config
        angles = rope_angles(batch.positions, config.rotary_dim, config.rope_theta, torch.float32)
        x = embedding(batch.ids, self.embedding)
        layers: list[Layer] = list(self.layers)  # type: ignore[arg-type]
        for layer in layers:
            x = x + layer.attend(x, angles, batch.num_clean, batch.visible, dtype)
            # Nobody attends to what comes out of the last layer.
            tokens = x[wanted] if layer is layers[-1] else x.flatten(0, 2)
            tokens = tokens + layer.feed_forward(tokens, dtype)
            x = tokens if layer is layers[-1] else tokens.view_as(x)
        return _linear(rms_norm(x, self.norm, config.rms_norm_eps).to(dtype), self.lm_head).float()

    def move_bias(self, step_size: float) -> None:
        """Every gate's, by the load since the last time."""
        for module in self.modules():
            if isinstance(module, Moe):
                module.move_bias(step_size)

    def published_tensors(self) -> dict[str, Tensor]:
        """By the names of a published checkpoint: parameters, or views into them."""
        tensors: dict[str, Tensor] = {
            "model.word_embeddings.weight": self.embedding,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            tensors |= layer.published_tensors(f"model.layers.{index}.")
        return {name: tensor.detach() for name, tensor in tensors.items()}

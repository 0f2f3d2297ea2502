"""LLaDA2 MoE as slowly and plainly as it can be written: no KV, all positions at once, every expert on every token.

Written from the published description alone, so that it shares no code, no weight layout and no shortcuts with the
worker's model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reference_logits(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int], block_size: int) -> Tensor:
    """Logits float32 [n, V] of the n tokens `ids` at positions 0 to n - 1.

    `weights` by the published tensor names, one tensor per expert; everything is computed in fp32.
    """
    weights = {name: weight.float() for name, weight in weights.items()}
    eps = config.get("rms_norm_eps", 1e-5)
    x = weights["model.word_embeddings.weight"][ids]
    blocks = torch.arange(len(ids)) // block_size
    visible = blocks[None, :] <= blocks[:, None]
    for index in range(config["num_hidden_layers"]):
        layer = _below(weights, f"model.layers.{index}.")
        normed = _norm(x, layer["input_layernorm.weight"], eps)
        x = x + _attention(_below(layer, "attention."), config, normed, visible, eps)
        normed = _norm(x, layer["post_attention_layernorm.weight"], eps)
        mlp = _below(layer, "mlp.")
        is_dense = index < config.get("first_k_dense_replace", 0)
        x = x + (_swiglu(mlp, normed) if is_dense else _moe(mlp, config, normed))
    head = "model.word_embeddings.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return _norm(x, weights["model.norm.weight"], eps) @ weights[head].T


def reference_gate(
    scores: list[float], bias: list[float], *, n_group: int, topk_group: int, k: int, scale: float
) -> dict[int, float]:
    """Which experts one token takes, and with what weight: loops and sorting by (-value, index), nothing else."""
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(choice) // n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(n_group)]
    group_scores = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    best_groups = sorted(range(n_group), key=lambda g: (-group_scores[g], g))[:topk_group]
    candidates = [e for g in sorted(best_groups) for e in groups[g]]
    chosen = sorted(candidates, key=lambda e: (-choice[e], e))[:k]
    total = sum(scores[e] for e in chosen) + 1e-20
    return {e: scores[e] / total * scale for e in chosen}


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _attention(weights: dict[str, Tensor], config: dict[str, Any], x: Tensor, visible: Tensor, eps: float) -> Tensor:
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    projected = x @ weights["query_key_value.weight"].T
    heads = [projected[:, i * head_dim : (i + 1) * head_dim] for i in range(num_heads + 2 * num_kv_heads)]
    outputs = []
    for i in range(num_heads):
        kv_head = i * num_kv_heads // num_heads
        q, k, v = heads[i], heads[num_heads + kv_head], heads[num_heads + num_kv_heads + kv_head]
        if config.get("use_qk_norm", True):
            q = _norm(q, weights["query_layernorm.weight"], eps)
            k = _norm(k, weights["key_layernorm.weight"], eps)
        q, k = _rope(q, config), _rope(k, config)
        scores = (q @ k.T * head_dim**-0.5).masked_fill(~visible, float("-inf"))
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=-1) @ weights["dense.weight"].T


def _rope(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Each pair (i, i + rotary_dim / 2) as a complex number, turned by position * theta ** (-2i / rotary_dim)."""
    rotary_dim = int(x.shape[-1] * config.get("partial_rotary_factor", 0.5))
    half = rotary_dim // 2
    frequencies = config.get("rope_theta", 10000.0) ** (-torch.arange(half) * 2 / rotary_dim)
    angles = torch.arange(len(x))[:, None] * frequencies
    turned = torch.complex(x[:, :half], x[:, half:rotary_dim]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[:, rotary_dim:]), dim=-1)


def _swiglu(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ weights["gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ weights["up_proj.weight"].T)) @ weights["down_proj.weight"].T


def _moe(weights: dict[str, Tensor], config: dict[str, Any], x: Tensor) -> Tensor:
    scores = (x @ weights["gate.weight"].T).sigmoid()
    expert_weights = torch.zeros_like(scores)
    for token, token_scores in enumerate(scores.tolist()):
        chosen = reference_gate(
            token_scores,
            weights["gate.expert_bias"].tolist(),
            n_group=config.get("n_group", 8),
            topk_group=config.get("topk_group", 4),
            k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 2.5),
        )
        for expert, weight in chosen.items():
            expert_weights[token, expert] = weight
    out = torch.zeros_like(x)
    for expert in range(config["num_experts"]):
        out += expert_weights[:, expert, None] * _swiglu(_below(weights, f"experts.{expert}."), x)
    if config.get("num_shared_experts", 0):
        out += _swiglu(_below(weights, "shared_experts."), x)
    return out

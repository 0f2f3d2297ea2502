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
    parts = _nested(weights)
    eps = config.get("rms_norm_eps", 1e-5)
    x = parts["model"]["word_embeddings"]["weight"][ids]
    turns = _turns(len(ids), config)
    blocks = torch.arange(len(ids)) // block_size
    visible = blocks[None, :] <= blocks[:, None]
    for index in range(config["num_hidden_layers"]):
        layer = parts["model"]["layers"][str(index)]
        normed = _norm(x, layer["input_layernorm"]["weight"], eps)
        x = x + _attention(layer["attention"], config, normed, visible, turns, eps)
        normed = _norm(x, layer["post_attention_layernorm"]["weight"], eps)
        is_dense = index < config.get("first_k_dense_replace", 0)
        x = x + (_swiglu(layer["mlp"], normed) if is_dense else _moe(layer["mlp"], config, normed))
    head = parts["model"]["word_embeddings"] if config.get("tie_word_embeddings") else parts["lm_head"]
    logits: Tensor = _norm(x, parts["model"]["norm"]["weight"], eps) @ head["weight"].T
    return logits


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


def _nested(weights: dict[str, Tensor]) -> dict[str, Any]:
    """As the dots of the names say, in fp32."""
    nested: dict[str, Any] = {}
    for name, weight in weights.items():
        *above, last = name.split(".")
        place = nested
        for part in above:
            place = place.setdefault(part, {})
        place[last] = weight.float()
    return nested


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _attention(
    weights: dict[str, Any], config: dict[str, Any], x: Tensor, visible: Tensor, turns: Tensor, eps: float
) -> Tensor:
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    projected = x @ weights["query_key_value"]["weight"].T
    heads = [projected[:, i * head_dim : (i + 1) * head_dim] for i in range(num_heads + 2 * num_kv_heads)]
    outputs = []
    for i in range(num_heads):
        kv_head = i * num_kv_heads // num_heads
        q, k, v = heads[i], heads[num_heads + kv_head], heads[num_heads + num_kv_heads + kv_head]
        if config.get("use_qk_norm", True):
            q = _norm(q, weights["query_layernorm"]["weight"], eps)
            k = _norm(k, weights["key_layernorm"]["weight"], eps)
        q, k = _rope(q, turns), _rope(k, turns)
        scores = (q @ k.T * head_dim**-0.5).masked_fill(~visible, float("-inf"))
        outputs.append(scores.softmax(-1) @ v)
    dense: Tensor = weights["dense"]["weight"]
    return torch.cat(outputs, dim=-1) @ dense.T


def _turns(num_tokens: int, config: dict[str, Any]) -> Tensor:
    """Complex numbers [n, rotary_dim / 2] of length 1 and angle position * theta ** (-2i / rotary_dim)."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * config.get("partial_rotary_factor", 0.5))
    frequencies = config.get("rope_theta", 10000.0) ** (-torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    angles = torch.arange(num_tokens)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def _rope(x: Tensor, turns: Tensor) -> Tensor:
    """Each pair (i, i + rotary_dim / 2) as a complex number, turned."""
    half = turns.shape[1]
    turned = torch.complex(x[:, :half], x[:, half : 2 * half]) * turns
    return torch.cat((turned.real, turned.imag, x[:, 2 * half :]), dim=-1)


def _swiglu(weights: dict[str, Any], x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{part}_proj"]["weight"].T for part in ("gate", "up", "down"))
    gated = x @ gate
    out: Tensor = gated * gated.sigmoid() * (x @ up) @ down
    return out


def _moe(weights: dict[str, Any], config: dict[str, Any], x: Tensor) -> Tensor:
    scores = (x @ weights["gate"]["weight"].T).sigmoid()
    bias = weights["gate"]["expert_bias"].tolist()
    expert_weights = torch.zeros_like(scores)
    for token, token_scores in enumerate(scores.tolist()):
        chosen = reference_gate(
            token_scores,
            bias,
            n_group=config.get("n_group", 8),
            topk_group=config.get("topk_group", 4),
            k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 2.5),
        )
        for expert, weight in chosen.items():
            expert_weights[token, expert] = weight
    out = torch.zeros_like(x)
    for expert in range(config["num_experts"]):
        out += expert_weights[:, expert, None] * _swiglu(weights["experts"][str(expert)], x)
    if config.get("num_shared_experts", 0):
        out += _swiglu(weights["shared_experts"], x)
    return out

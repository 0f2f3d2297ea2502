"""Small random checkpoints in the published format, for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHIPPED_MODEL = Path(__file__).parents[2] / "models" / "tiny-llada2"

# Every part of the architecture in 338,496 parameters: a dense layer, grouped-query attention, a group-limited gate,
# a shared expert, partial rotary positions.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 600000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "num_experts": 16,
    "num_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "norm_head": False,
    "norm_softmax": False,
    "router_dtype": "fp32",
    "pad_token_id": 0,
    "dtype": "float32",
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights by published name; no expert bias is 0, no norm weight 1, or errors in their use would hide."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocab, inner = config["vocab_size"], config["moe_intermediate_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.12

    def norm(size: int) -> Tensor:
        return 0.6 + 0.8 * torch.rand(size, generator=generator)

    def mlp(prefix: str, size: int) -> dict[str, Tensor]:
        return {
            f"{prefix}gate_proj.weight": matrix(size, hidden),
            f"{prefix}up_proj.weight": matrix(size, hidden),
            f"{prefix}down_proj.weight": matrix(hidden, size),
        }

    weights = {"model.word_embeddings.weight": matrix(vocab, hidden), "model.norm.weight": norm(hidden)}
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = matrix(vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        weights[f"{layer}input_layernorm.weight"] = norm(hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = norm(hidden)
        weights[f"{layer}attention.query_key_value.weight"] = matrix((heads + 2 * kv_heads) * head_dim, hidden)
        weights[f"{layer}attention.dense.weight"] = matrix(hidden, heads * head_dim)
        if config.get("use_qk_norm", True):
            weights[f"{layer}attention.query_layernorm.weight"] = norm(head_dim)
            weights[f"{layer}attention.key_layernorm.weight"] = norm(head_dim)
        if index < config["first_k_dense_replace"]:
            weights |= mlp(f"{layer}mlp.", config["intermediate_size"])
            continue
        weights[f"{layer}mlp.gate.weight"] = matrix(config["num_experts"], hidden)
        weights[f"{layer}mlp.gate.expert_bias"] = 0.1 * torch.rand(config["num_experts"], generator=generator) - 0.05
        for expert in range(config["num_experts"]):
            weights |= mlp(f"{layer}mlp.experts.{expert}.", inner)
        if config["num_shared_experts"]:
            weights |= mlp(f"{layer}mlp.shared_experts.", inner * config["num_shared_experts"])
    return weights


def merge_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights in the layout with one tensor per layer and projection, `mlp.experts.gate_proj` [E, ...]."""
    merged: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        prefix, found, rest = name.partition(".mlp.experts.")
        if found:
            stacks.setdefault(f"{prefix}{found}{rest.split('.')[1]}", []).append(weight)  # experts come in order
        else:
            merged[name] = weight
    return merged | {name: torch.stack(parts) for name, parts in stacks.items()}


def write_checkpoint(path: Path, config: dict[str, Any], weights: dict[str, Tensor], num_shards: int = 1) -> None:
    """A model folder: config.json, safetensors in one file or in shards with an index, the shipped tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, path / name)
    if num_shards == 1:
        save_file(weights, path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(weights.items())[shard::num_shards])
        save_file(part, path / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

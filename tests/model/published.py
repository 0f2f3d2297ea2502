"""A tiny random checkpoint of each architecture in its published form, and an independent forward for it.

The forwards are those of transformers (SDAR is Qwen3, Fast-dLLM v2 is Qwen2.5) under a block mask, without KV, and for
LLaDA2 the slow reference.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.model_folder import ModelFolder, read_model_folder
from tests.model.checkpoints import TINY_CONFIG, random_weights
from tests.model.reference import reference_logits
from tests.text.folders import byte_tokenizer

VOCAB = 320
QWEN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": False,
    "torch_dtype": "float32",
}
SDAR = QWEN | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": False, "rope_scaling": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "LLaDA2MoeModelLM": TINY_CONFIG | {"vocab_size": VOCAB},
    "SDARForCausalLM": SDAR
    | {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "intermediate_size": 96, "fuse_cross_entropy": True},
    "SDARMoeForCausalLM": SDAR
    | {
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Fast_dLLM_QwenForCausalLM": QWEN
    | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "intermediate_size": 96,
        "bd_size": 32,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
    },
}
SPECIAL_TEXTS = {
    "LLaDA2MoeModelLM": ("<|endoftext|>", "<|mask|>", "<|role_end|>"),
    "SDARForCausalLM": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"),
    "SDARMoeForCausalLM": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<MASK>"),
    "Fast_dLLM_QwenForCausalLM": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "|<MASK>|"),
}
Forward = Callable[[list[int], int], Tensor]  # ids and block size -> logits float32 [n, V], row i at position i


class Published(NamedTuple):
    """`weights` by published name; `forward` is independent of the worker's."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    forward: Forward


@functools.cache
def published(name: str, seed: int = 0, head_scale: float = 1.0, **changes: Any) -> Published:
    """The architecture's tiny checkpoint, with keys of its configuration changed. A large `head_scale` makes it sure of
    much, as a trained model is."""
    config = CONFIGS[name] | changes
    if name == "LLaDA2MoeModelLM":
        weights = random_weights(config, seed)
        weights["lm_head.weight"] *= head_scale
        return Published(config, weights, lambda ids, size: reference_logits(weights, config, ids, size))
    model = _qwen(name, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.rand(parameter.shape, generator=generator)
            is_vector = parameter.dim() == 1 and not parameter_name.endswith("bias")
            parameter.copy_(0.6 + 0.8 * values if is_vector else (values - 0.5) * 0.5)
        model.lm_head.weight *= head_scale
    return Published(config, _published_tensors(model), functools.partial(_forward, model))


def _qwen(name: str, config: dict[str, Any]) -> Any:
    """The model of transformers that has this architecture's layers."""
    import transformers

    kind = {"SDARForCausalLM": "Qwen3", "SDARMoeForCausalLM": "Qwen3Moe", "Fast_dLLM_QwenForCausalLM": "Qwen2"}[name]
    keys = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    own = getattr(transformers, f"{kind}Config")(**keys, attn_implementation="eager")
    return getattr(transformers, f"{kind}ForCausalLM")(own).eval()


@torch.no_grad()
def _forward(model: Any, ids: list[int], block_size: int) -> Tensor:
    blocks = torch.arange(len(ids)) // block_size
    hidden = torch.zeros(len(ids), len(ids)).masked_fill_(blocks[None, :] > blocks[:, None], float("-inf"))
    positions = torch.arange(len(ids))[None]
    logits: Tensor = model(torch.tensor([ids]), attention_mask=hidden[None, None], position_ids=positions).logits[0]
    return logits.float()


def _published_tensors(model: Any) -> dict[str, Tensor]:
    """By published name, a tensor per expert; transformers keeps them in one, gate above up."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, is_experts, kind = name.partition(".mlp.experts.")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not is_experts:
            tensors[name] = tensor.clone()
            continue
        for expert, weight in enumerate(tensor):
            parts = {"down_proj": weight}
            if kind == "gate_up_proj":
                gate, up = weight.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            tensors |= {f"{prefix}.mlp.experts.{expert}.{part}.weight": w.clone() for part, w in parts.items()}
    return tensors


def write_published(path: Path, name: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """A folder with this checkpoint and a tokenizer of bytes and the architecture's special tokens."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer([], SPECIAL_TEXTS[name]).save(str(path / "tokenizer.json"))
    save_file(weights, path / "model.safetensors")
    return path


def published_folder(path: Path, name: str, **overrides: int) -> ModelFolder:
    """The architecture's tiny checkpoint, written and read as a worker reads it."""
    model = published(name)
    return read_model_folder(write_published(path, name, model.config, model.weights), **overrides)

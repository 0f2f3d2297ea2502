"""SDAR, dense and mixture of experts: Qwen3 and Qwen3-MoE, block-causal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from common.architectures.base import QWEN_NAMES, Architecture, Backbone, Experts, algorithms_from
from common.architectures.config_keys import MAX_EXPERTS, MAX_LAYERS, ConfigKeys, check, check_heads


def dense_backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of Qwen3's configuration class."""
    keys = ConfigKeys(raw)
    return dataclasses.replace(_attention(keys, head_dim=128), intermediate_size=keys.integer("intermediate_size"))


def moe_backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of Qwen3-MoE's configuration class; every layer is one of experts."""
    keys = ConfigKeys(raw)
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [], None)
    # transformers 5 writes another name than the published files have.
    experts_key = "num_local_experts" if "num_local_experts" in raw and "num_experts" not in raw else "num_experts"
    num_experts, per_token = keys.integer(experts_key, most=MAX_EXPERTS), keys.integer("num_experts_per_tok")
    check(per_token <= num_experts, f"num_experts_per_tok {per_token} is over num_experts {num_experts}")
    experts = Experts(
        num_experts=num_experts,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        score="softmax",
        normalise=keys.flag("norm_topk_prob", False),
    )
    return dataclasses.replace(_attention(keys), experts=experts)


def _attention(keys: ConfigKeys, head_dim: int | None = None) -> Backbone:
    """All but the feed-forward. `head_dim`: the default; None = what the hidden size gives each head."""
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False, None)
    keys.only("use_sliding_window", False, None)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads")
    head_dim = keys.integer("head_dim", hidden_size // num_heads if head_dim is None else head_dim)
    check_heads(num_heads, num_kv_heads, head_dim, hidden_size)
    return Backbone(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=keys.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=keys.rotary_dim(head_dim, default_factor=1.0),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tied_head=keys.flag("tie_word_embeddings", False),
        qkv_bias=False,
        qk_norm=True,
        names=QWEN_NAMES,
    )


SDAR = Architecture(
    name="SDARForCausalLM",
    block_size=4,  # checkpoints named -b8 to -b64 have others
    mask_token_texts=("<|MASK|>", "<MASK>"),
    mask_token_id=151669,
    stop_token_texts=("<|endoftext|>", "<|im_end|>"),
    stop_token_ids=(151643, 151645),
    algorithms=algorithms_from("LowConfidenceDynamic"),
    read_backbone=dense_backbone,
    refused={"use_regular_causal": "its prompt is attended causally, token by token, not block by block"},
)

SDAR_MOE = dataclasses.replace(SDAR, name="SDARMoeForCausalLM", read_backbone=moe_backbone)

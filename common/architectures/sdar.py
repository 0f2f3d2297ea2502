"""SDAR, dense and mixture of experts: Qwen3 and Qwen3-MoE, block-causal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from common.architectures.base import Architecture, Backbone, Experts, algorithms_from
from common.architectures.config_keys import MAX_EXPERTS, ConfigKeys, check
from common.architectures.qwen import qwen_attention


def dense_backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of Qwen3's configuration class."""
    keys = ConfigKeys(raw)
    return dataclasses.replace(_attention(keys, head_dim=128), intermediate_size=keys.integer("intermediate_size"))


def moe_backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of Qwen3-MoE's configuration class; every layer is one of experts."""
    keys = ConfigKeys(raw)
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [])
    # transformers 5 writes another name than the published files have.
    experts_key = (
        "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"
    )
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
    """All but the feed-forward; see `qwen_attention`."""
    keys.only("attention_bias", False)
    return qwen_attention(keys, head_dim)


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

"""Fast-dLLM v2: Qwen2.5 with blocks of 32, whose logits speak of the next position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.architectures.base import Architecture, Backbone, algorithms_from
from common.architectures.config_keys import ConfigKeys, check
from common.architectures.qwen import qwen_attention


def backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of Qwen2's configuration class."""
    keys = ConfigKeys(raw)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    check(
        hidden_size % num_heads == 0 or raw.get("head_dim") is not None,
        f"hidden_size {hidden_size} is no multiple of its heads",
    )
    return replace(
        qwen_attention(keys), intermediate_size=keys.integer("intermediate_size"), qkv_bias=True, qk_norm=False
    )


FAST_DLLM_V2 = Architecture(
    name="Fast_dLLM_QwenForCausalLM",
    block_size=32,
    block_size_key="bd_size",
    mask_token_texts=("|<MASK>|",),
    mask_token_id=151665,
    stop_token_texts=("<|im_end|>",),
    stop_token_ids=(151645,),
    algorithms=algorithms_from("HierarchyBlock"),
    read_backbone=backbone,
    logit_shift=1,
)

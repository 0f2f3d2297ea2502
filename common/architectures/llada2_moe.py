"""LLaDA2.0, LLaDA2.0-CAP and LLaDA2.1, mini and flash: one architecture, and configurations that do not differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.architectures.base import Architecture, Backbone, Experts, TensorNames, algorithms_from
from common.architectures.config_keys import MAX_EXPERTS, MAX_LAYERS, ConfigKeys, check, check_heads

NAMES = TensorNames(
    embedding="model.word_embeddings",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    q_norm="query_layernorm",
    k_norm="key_layernorm",
)


def backbone(raw: Mapping[str, Any]) -> Backbone:
    """Absent keys have the defaults of the published configuration class; sizes nobody can guess must be there."""
    keys = ConfigKeys(raw)
    keys.only("hidden_act", "silu")
    keys.only("score_function", "sigmoid")
    keys.only("moe_router_enable_expert_bias", True)
    keys.only("norm_topk_prob", True)
    keys.only("use_rmsnorm", True)
    for key in ("use_bias", "use_qkv_bias", "using_split_qkv_in_self_attention", "norm_head", "norm_softmax"):
        keys.only(key, False)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_kv_heads, num_layers = keys.integer("num_key_value_heads"), keys.integer("num_hidden_layers", most=MAX_LAYERS)
    keys.full_attention(num_layers)
    head_dim = keys.integer("head_dim", hidden_size // num_heads)
    check_heads(num_heads, num_kv_heads, head_dim, hidden_size)
    return Backbone(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=keys.rotary_dim(head_dim, default_factor=0.5),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-5),
        tied_head=keys.flag("tie_word_embeddings", False),
        qkv_bias=False,
        qk_norm=keys.flag("use_qk_norm", True),  # absent in the published files, and on
        names=NAMES,
        experts=_experts(keys),
        first_moe_layer=keys.integer("first_k_dense_replace", 0, least=0),
    )


def _experts(keys: ConfigKeys) -> Experts:
    num_experts = keys.integer("num_experts", most=MAX_EXPERTS)
    per_token = keys.integer("num_experts_per_tok")
    groups, kept = keys.integer("n_group", 8), keys.integer("topk_group", 4)
    check(num_experts % groups == 0, f"num_experts {num_experts} is not a multiple of n_group {groups}")
    size = num_experts // groups
    check(size >= 2, f"n_group {groups} leaves fewer than two of num_experts {num_experts} in a group")
    check(kept <= groups, f"topk_group {kept} is over n_group {groups}")
    check(
        per_token <= kept * size,
        f"num_experts_per_tok {per_token} is over the {kept * size} experts of the kept groups",
    )
    return Experts(
        num_experts=num_experts,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        score="sigmoid",
        has_bias=True,
        num_groups=groups,
        groups_kept=kept,
        scale=keys.number("routed_scaling_factor", 2.5),
        num_shared=keys.integer("num_shared_experts", 0, least=0),
    )


LLADA2_MOE = Architecture(
    name="LLaDA2MoeModelLM",
    block_size=32,
    mask_token_texts=("<|mask|>",),
    mask_token_id=156895,
    stop_token_texts=("<|endoftext|>", "<|role_end|>"),
    stop_token_ids=(156892, 156900),
    # LLaDA2.1 is trained for JointThreshold's edits and LLaDA2.0 is not; no file tells which one it is.
    algorithms=algorithms_from("LowConfidence", "JointThreshold"),
    read_backbone=backbone,
    refused={"expert_capacity": "it chooses experts per block (LLaDA2.2); use a LLaDA2.0 or LLaDA2.1 checkpoint"},
)

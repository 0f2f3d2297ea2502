"""What models with the layers of Qwen read alike from their configuration."""

from __future__ import annotations

from common.architectures.base import QWEN_NAMES, Backbone
from common.architectures.config_keys import MAX_LAYERS, ConfigKeys, check_heads


def qwen_attention(keys: ConfigKeys, head_dim: int | None = None) -> Backbone:
    """All but the feed-forward, as Qwen3 has it: norms of queries and keys, no bias.

    `head_dim`: the default; None = what the hidden size gives each head.
    """
    keys.only("hidden_act", "silu")
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_kv_heads, num_layers = keys.integer("num_key_value_heads"), keys.integer("num_hidden_layers", most=MAX_LAYERS)
    keys.full_attention(num_layers)
    head_dim = keys.integer("head_dim", hidden_size // num_heads if head_dim is None else head_dim)
    check_heads(num_heads, num_kv_heads, head_dim, hidden_size)
    return Backbone(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=num_layers,
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

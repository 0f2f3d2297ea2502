"""The configuration of LLaDA2 MoE, and what of it can be served."""

from __future__ import annotations

import math
from typing import Any

from transformers import PretrainedConfig

from worker_svc.models.base import CheckpointError

# Shapes that nobody can guess. The other keys have the defaults of the published configuration class.
REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)

# Keys that change the forward in a way that is not built, with the values that are. An absent key has the first one.
BUILT_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_bias": (False, None),
    "use_qkv_bias": (False, None),
    "use_rmsnorm": (True, None),
    "using_split_qkv_in_self_attention": (False, None),
    "use_sliding_window": (False, None),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "expert_capacity": (None,),
}
REFUSED_BECAUSE = {
    "expert_capacity": "it chooses experts per block (LLaDA2.2); use a LLaDA2.0 or LLaDA2.1 checkpoint",
    "rope_scaling": "scaled rotary positions are not built; set it to null and keep to the trained context length",
    "quantization_config": "quantised weights are not read; use the bfloat16 or float32 checkpoint",
}

# Far above any published model: a larger number is a broken file, and would keep the loader busy for hours.
MAX_LAYERS = 1024
MAX_EXPERTS = 4096


class LLaDA2MoeConfig(PretrainedConfig):
    """The keys that the forward depends on; all others are kept as they are.

    Sizes default to LLaDA2.0-mini, so that the class can be made without arguments as transformers wants it; a
    checkpoint has to name them (`read_config`).
    """

    model_type = "llada2_moe"

    def __init__(
        self,
        vocab_size: int = 157184,
        hidden_size: int = 2048,
        intermediate_size: int = 5120,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        use_qk_norm: bool = True,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        partial_rotary_factor: float = 0.5,
        num_experts: int = 256,
        num_experts_per_tok: int = 8,
        num_shared_experts: int = 0,
        moe_intermediate_size: int = 512,
        first_k_dense_replace: int = 0,
        n_group: int = 8,
        topk_group: int = 4,
        routed_scaling_factor: float = 2.5,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.use_qk_norm = use_qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.partial_rotary_factor = partial_rotary_factor
        self.rotary_dim = int(self.head_dim * partial_rotary_factor)
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.first_k_dense_replace = first_k_dense_replace
        self.n_group = n_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)


def read_config(raw: dict[str, Any]) -> LLaDA2MoeConfig:
    """The configuration in `raw`, the parsed config.json. Raises CheckpointError naming the key that is not served."""
    for key, built in BUILT_VALUES.items():
        value = raw.get(key, built[0])
        # By type too: 0 and 1 are not false and true here, nor is an empty rope_scaling the same as none.
        if not any(type(value) is type(allowed) and value == allowed for allowed in built):
            why = REFUSED_BECAUSE.get(key, f"only {built[0]!r} is built")
            raise CheckpointError(f"config.json: {key} = {_shorten(value)} is not served: {why}")
    for key in REQUIRED_KEYS:
        if key not in raw:
            raise CheckpointError(f"config.json: {key} is missing")
    known = {key: value for key, value in raw.items() if key in _KNOWN_TYPES}
    rotary = _rope_of_transformers_5(raw)
    for key, value in (known | rotary).items():
        _check_type(key, value)
    config = LLaDA2MoeConfig(**known | rotary)
    _check_sizes(config)
    if raw.get("rotary_dim", config.rotary_dim) != config.rotary_dim:
        raise CheckpointError(
            f"config.json: rotary_dim {_shorten(raw['rotary_dim'])} is not head_dim x partial_rotary_factor, "
            f"{config.rotary_dim}"
        )
    return config


_POSITIVE_INTS = (*REQUIRED_KEYS, "head_dim", "n_group", "topk_group")
_COUNTS = ("num_shared_experts", "first_k_dense_replace")
_FLOATS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor")
_BOOLS = ("use_qk_norm", "tie_word_embeddings")
_KNOWN_TYPES = (*_POSITIVE_INTS, *_COUNTS, *_FLOATS, *_BOOLS)


def _rope_of_transformers_5(raw: dict[str, Any]) -> dict[str, Any]:
    """theta and partial factor from `rope_parameters`, where transformers 5 writes what was two keys before."""
    parameters = raw.get("rope_parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: rope_parameters = {_shorten(parameters)} is not served: only the default type is"
        )
    return {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}


def _check_type(key: str, value: Any) -> None:
    if key in _BOOLS:
        fits, wanted = isinstance(value, bool), "true or false"
    elif key in _FLOATS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits, wanted = is_number and 0 < value < math.inf, "a positive number"
    else:
        least = 0 if key in _COUNTS else 1
        fits, wanted = (
            isinstance(value, int) and not isinstance(value, bool) and value >= least,
            f"an integer >= {least}",
        )
        if key == "head_dim" and value is None:
            fits = True
    if not fits:
        raise CheckpointError(f"config.json: {key} must be {wanted}, not {_shorten(value)}")


def _check_sizes(config: LLaDA2MoeConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    experts, groups = config.num_experts, config.n_group
    experts_kept = config.topk_group * (experts // groups)
    conditions = (
        (config.num_hidden_layers <= MAX_LAYERS, f"num_hidden_layers {config.num_hidden_layers} is over {MAX_LAYERS}"),
        (experts <= MAX_EXPERTS, f"num_experts {experts} is over {MAX_EXPERTS}"),
        (heads % kv_heads == 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"),
        (config.head_dim >= 1, f"hidden_size {config.hidden_size} is smaller than num_attention_heads {heads}"),
        (config.partial_rotary_factor <= 1, f"partial_rotary_factor {config.partial_rotary_factor} is over 1"),
        (
            config.rotary_dim >= 2 and config.rotary_dim % 2 == 0,
            f"head_dim {config.head_dim} x partial_rotary_factor {config.partial_rotary_factor} is no even number >= 2",
        ),
        (experts % groups == 0, f"num_experts {experts} is not a multiple of n_group {groups}"),
        (experts // groups >= 2, f"n_group {groups} leaves fewer than two of num_experts {experts} in a group"),
        (config.topk_group <= groups, f"topk_group {config.topk_group} is over n_group {groups}"),
        (
            config.num_experts_per_tok <= experts_kept,
            f"num_experts_per_tok {config.num_experts_per_tok} is over the {experts_kept} experts of the kept groups",
        ),
    )
    for holds, fault in conditions:
        if not holds:
            raise CheckpointError(f"config.json: {fault}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""What an architecture is: the words its published files leave out, and what its forward depends on.

Both services read this, so nothing here knows torch. docs/models.md says how a model is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ALWAYS_REFUSED = dict.fromkeys(
    ("quantization_config", "compression_config"),
    "quantised weights are not read; use the bfloat16 or float32 checkpoint",
)


class CheckpointError(Exception):
    """A checkpoint that cannot be served as it is. The message is one line: what, where, what is expected."""


@dataclass(frozen=True)
class TensorNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`; those of a layer follow `model.layers.N.`."""

    embedding: str
    attention: str
    qkv: tuple[str, ...]  # one fused tensor (rows of all q heads, then k, then v), or three
    output: str
    q_norm: str
    k_norm: str


QWEN_NAMES = TensorNames(
    embedding="model.embed_tokens",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    output="o_proj",
    q_norm="q_norm",
    k_norm="k_norm",
)


@dataclass(frozen=True)
class Experts:
    """The routed feed-forward of a mixture of experts.

    score: what makes scores of the gate's logits. has_bias: a bias that is added to choose and not to weigh.
    num_groups, groups_kept: experts are chosen in the best groups only. normalise: the weights of the chosen sum to 1
    before they are multiplied by `scale`.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    score: Literal["sigmoid", "softmax"]
    has_bias: bool = False
    num_groups: int = 1
    groups_kept: int = 1
    normalise: bool = True
    scale: float = 1.0
    num_shared: int = 0


@dataclass(frozen=True)
class Backbone:
    """All that the forward depends on: a decoder with rotary positions, grouped queries and SwiGLU.

    rotary_dim: the first dimensions of a head, which turn. first_moe_layer: layers before it have a dense
    feed-forward of `intermediate_size`; without `experts` all have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    tied_head: bool
    qkv_bias: bool
    qk_norm: bool
    names: TensorNames
    experts: Experts | None = None
    first_moe_layer: int = 0


@dataclass(frozen=True)
class Architecture:
    """One architecture, by `architectures[0]` of config.json.

    Special ids are looked up by token text first, because small checkpoints move them; the ids here come last.
    block_size_key: the key of config.json that says another block size than `block_size`.
    logit_shift: 1 = the logits of a position speak of the next one, so a block begins with its first token known.
    algorithms: those that fit, by name, the default first.
    refused: keys of config.json that must be absent, null or false, and why.
    read_backbone: from config.json to what the forward depends on, or a CheckpointError; None for what computes from
    its configuration alone and has no weights.
    """

    name: str
    block_size: int
    mask_token_texts: tuple[str, ...]
    mask_token_id: int
    stop_token_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    algorithms: tuple[str, ...]
    read_backbone: Callable[[Mapping[str, Any]], Backbone] | None
    block_size_key: str = "block_size"
    logit_shift: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, raw: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a config.json with a key that is refused."""
        for key, why in (ALWAYS_REFUSED | dict(self.refused)).items():
            value = raw.get(key)
            if value is not None and value is not False:
                raise CheckpointError(f"config.json: {key} = {shorten(value)} is not served: {why}")

    def backbone(self, raw: Mapping[str, Any]) -> Backbone:
        """What the forward of this config.json depends on. Raises CheckpointError naming the key."""
        self.check(raw)
        assert self.read_backbone is not None
        return self.read_backbone(raw)


# Algorithms that fit every model that is trained to fill masks.
MASK_ALGORITHMS = (
    "LowConfidence",
    "LowConfidenceDynamic",
    "LowConfidenceStatic",
    "Sequential",
    "EntropyBounded",
    "HierarchyBlock",
)


def shorten(value: Any) -> str:
    """Its repr in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def algorithms_from(default: str, *others: str) -> tuple[str, ...]:
    """`default`, then all others of MASK_ALGORITHMS, then `others`."""
    return (default, *(name for name in MASK_ALGORITHMS if name != default), *others)

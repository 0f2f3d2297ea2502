"""The architectures that are served, by name. A new one is one file here and one entry below (docs/models.md)."""

from __future__ import annotations

from common.architectures.base import Architecture, Backbone, CheckpointError, Experts, TensorNames
from common.architectures.fast_dllm_v2 import FAST_DLLM_V2
from common.architectures.llada2_moe import LLADA2_MOE
from common.architectures.sdar import SDAR, SDAR_MOE
from common.architectures.simulated import SIMULATED

__all__ = ["ARCHITECTURES", "REFUSED", "Architecture", "Backbone", "CheckpointError", "Experts", "TensorNames"]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (LLADA2_MOE, SDAR, SDAR_MOE, FAST_DLLM_V2, SIMULATED)
}

_FULL_ATTENTION = "it attends to the whole canvas in every step, so no block's KV is ever final"
# Diffusion language models that one might expect here, and why they are not served.
REFUSED: dict[str, str] = {
    "LLaDAModelLM": _FULL_ATTENTION,
    "DreamModel": _FULL_ATTENTION,
    "DiffusionGemmaForBlockDiffusion": "its context is causal and its canvas has random tokens instead of masks",
}

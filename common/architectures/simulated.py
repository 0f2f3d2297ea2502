"""A device that only behaves like one; see worker_svc/simulated.py."""

from __future__ import annotations

from common.architectures.base import Architecture, algorithms_from

SIMULATED = Architecture(
    name="SimulatedBlockModel",
    block_size=32,
    mask_token_texts=("<|mask|>",),
    mask_token_id=1,
    stop_token_texts=("<|endoftext|>",),
    stop_token_ids=(0,),
    algorithms=algorithms_from("LowConfidence", "JointThreshold"),
    read_backbone=None,
)

"""JointThreshold: masks become tokens, and in the same step tokens set earlier in the block may be replaced."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.algorithms.base import DllmAlgorithm, Param, StepBatch
from worker_svc.algorithms.low_confidence import positions_to_fill
from worker_svc.algorithms.sampling import candidates

STATE_VERSION = 1
_STATE = struct.Struct("<BI")  # version, post_edit_steps


class JointThreshold(DllmAlgorithm):
    """Decoding as published for LLaDA2.1; use it with checkpoints trained for editing.

    A block goes on without masks until a step changes nothing, or until `max_post_edit_steps` such steps were spent.
    The forward after the last change is there for its KV.

    State: `post_edit_steps` int64 [R], steps that found no mask.
    """

    name = "JointThreshold"
    edits = True
    params = (
        Param("threshold", default=0.5, min_value=0, max_value=1),
        Param("edit_threshold", default=0, min_value=0, max_value=1),
        Param("max_post_edit_steps", default=16, min_value=0, max_value=1024, is_integer=True),
        Param("penalty_lambda", default=0, min_value=0, max_value=100),
    )

    def init_step_state(self, num_rows: int, device: torch.device | str) -> dict[str, Tensor]:
        return {"post_edit_steps": torch.zeros(num_rows, dtype=torch.int64, device=device)}

    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        is_filled = ~batch.masked.any(dim=1)
        post_edit_steps = state["post_edit_steps"].add_(is_filled)
        may_edit = post_edit_steps <= batch.params["max_post_edit_steps"]
        tokens, confidence = candidates(batch, logits, penalty=batch.params["penalty_lambda"])
        fill = positions_to_fill(batch.masked, confidence, batch.params["threshold"])
        edit = (
            batch.editable
            & ~batch.masked
            & (tokens != batch.ids)
            & (confidence > batch.params["edit_threshold"][:, None])
            & may_edit[:, None]
        )
        batch.ids.copy_(torch.where(fill | edit, tokens, batch.ids))
        batch.masked &= ~fill
        return is_filled & ~edit.any(dim=1)

    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        return block_size + int(params["max_post_edit_steps"]) + 1

    def encode_state(self, state: dict[str, Tensor]) -> bytes:
        return _STATE.pack(STATE_VERSION, int(state["post_edit_steps"][0]))

    def decode_state(self, data: bytes, params: Mapping[str, float]) -> dict[str, Tensor]:
        state = self.init_step_state(1, "cpu")
        if not data:
            return state
        if data[0] != STATE_VERSION:
            raise ValueError(f"version {data[0]} of the {self.name} state is unknown, known is {STATE_VERSION}")
        if len(data) != _STATE.size:
            raise ValueError(f"the {self.name} state has {len(data)} bytes, not {_STATE.size}")
        post_edit_steps = _STATE.unpack(data)[1]
        if post_edit_steps > params["max_post_edit_steps"]:
            raise ValueError(
                f"post_edit_steps {post_edit_steps} is over max_post_edit_steps {int(params['max_post_edit_steps'])}"
            )
        state["post_edit_steps"][0] = post_edit_steps
        return state

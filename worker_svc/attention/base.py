"""What a model needs from attention, and what a forward tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput, Segment
    from worker_svc.models.base import BlockModel


class AttentionUnavailable(Exception):
    """One line: why a backend cannot work here, and what to do."""


class AttentionBackend(ABC):
    """Block-causal attention of the units of one forward over their slots' pages.

    Unit (slot, block i) sees the positions [0, (i + 1) * block_size) of its slot and nothing else.
    `prepare` once per forward, then `run` once per layer.
    """

    _planned_for: tuple[Sequence[Segment], KVStore] | None = None

    @classmethod
    def for_model(cls, model: BlockModel, batch_invariant: bool) -> Self:
        """The backend for this model, where it lies. Raises AttentionUnavailable."""
        return cls()

    def for_graph(self, num_units: int) -> AttentionBackend | None:
        """One for a captured forward of so many units: it may be planned for fewer, and what `run` launches stays as it
        is from plan to plan. None: what this backend launches depends on the lengths of the rows."""
        return None

    def prepare(self, inputs: ForwardInput, kv: KVStore) -> None:
        """`plan`, unless the last one was for these very segments: a slot gets no page while they stand."""
        if self._planned_for is None or self._planned_for[0] is not inputs.segments or self._planned_for[1] is not kv:
            self._planned_for = None
            self.plan(inputs, kv)
            self._planned_for = inputs.segments, kv

    def forget(self) -> None:
        """Let go of the pool that was planned for last, so that its memory can be given back; `prepare` plans anew."""
        if self._planned_for is not None:
            self._planned_for = None
            self._drop_pool()

    @abstractmethod
    def _drop_pool(self) -> None:
        """Drop what `plan` kept of the pool."""

    @abstractmethod
    def plan(self, inputs: ForwardInput, kv: KVStore) -> None:
        """Work out, for all layers at once, where keys and values go and what each unit reads."""

    @abstractmethod
    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write `k` and `v` of all units into the pool, then attend.

        q: [U, B, num_heads, head_dim]; k, v: [U, B, num_kv_heads, head_dim], positions already rotated in.
        Query heads h * num_heads / num_kv_heads onwards share kv head h; scores are scaled by head_dim ** -0.5.
        Returns [U, B, num_heads, head_dim] in q's dtype.
        """

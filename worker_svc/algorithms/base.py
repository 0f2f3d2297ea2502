"""What an algorithm is: which token ids a step sets, and which rows it leaves done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Param:
    """A number that a request may set for an algorithm: `min_value <= value <= max_value`."""

    name: str
    default: float
    min_value: float
    max_value: float
    is_integer: bool = False


@dataclass
class SamplingColumns:
    """How each of R rows draws its tokens. Temperature 0 takes the most probable token and ignores the filters."""

    temperature: Tensor  # float32 [R]
    top_p: Tensor  # float32 [R], 1 = off
    min_p: Tensor  # float32 [R], 0 = off
    top_k: Tensor  # int64 [R], 0 = off
    seed: Tensor  # int64 [R], the bits of a uint64
    sample_index: Tensor  # int64 [R]
    any_sampling: bool  # on the host; False = every row has temperature 0


@dataclass
class StepBatch:
    """The blocks of R rows of one algorithm, B positions each. A masked position is always an editable one."""

    ids: Tensor  # int64 [R, B], written by the step; masked positions may hold any id
    masked: Tensor  # bool [R, B], written by the step
    editable: Tensor  # bool [R, B]; False = a position of the prompt, never changed
    block_index: Tensor  # int64 [R], on the absolute grid
    step_index: Tensor  # int64 [R], from 0 in each block
    sampling: SamplingColumns
    params: dict[str, Tensor]  # float32 [R] under each Param's name
    mask_token_id: int


class DllmAlgorithm(ABC):
    """Decides by the logits of a forward which positions of a block get which token.

    An instance holds nothing of any request. What must outlive a step is in the state, tensors with one entry a row;
    it belongs to one block of one request and begins anew with every block.
    """

    name: ClassVar[str]
    # Whether a token, once set, may change later in the same block. Not for models with shifted logits.
    edits: ClassVar[bool]
    params: ClassVar[tuple[Param, ...]]

    def init_step_state(self, num_rows: int, device: torch.device | str) -> dict[str, Tensor]:
        """The state of `num_rows` fresh blocks, each tensor [num_rows, ...]. Without state: {}."""
        return {}

    @abstractmethod
    def step(self, batch: StepBatch, logits: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Set tokens in `batch.ids`, clear their bits in `batch.masked`, update `state`, all in place.

        `logits` [R, B, V], in the model's dtype, are of a forward over the block as it stands; the step may overwrite
        them. `sampling.row_groups` gives them in fp32 without a copy of all. Those of a position speak of that
        position, but at position 0 of a model with shifted logits: there a block begins with its first token set, and
        the logits speak of the next block's.
        Returns done, bool [R]: the block was complete when that forward started and the step changes nothing in it,
        so the KV which the forward wrote is the KV to keep.

        At least one mask bit clears in every row that has one. Tensor operations only: no `.item()`, no branch on a
        tensor, no shape that depends on data; a parameter is a tensor with one value a row. A row's result depends
        on nothing of the other rows.
        """

    def next_block(
        self, ids: Tensor, state: dict[str, Tensor], mask_token_id: int, first_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """How the block after a done one begins: ids int64 [R, B] and mask bits [R, B]. Here all masks, but for the
        first position of a model with shifted logits: it has `first_ids`, int64 [R].

        `ids` and `state` are those of the done blocks; they are not changed.
        """
        next_ids, masked = torch.full_like(ids, mask_token_id), torch.ones_like(ids, dtype=torch.bool)
        if first_ids is not None:
            next_ids[:, 0], masked[:, 0] = first_ids, False
        return next_ids, masked

    @abstractmethod
    def max_steps(self, block_size: int, params: Mapping[str, float]) -> int:
        """The hard bound on the forwards of one block, the last one (whose KV is kept) included."""

    def encode_state(self, state: dict[str, Tensor]) -> bytes:
        """The state of one row (each tensor [1, ...]) as it travels, versioned. Without state: empty."""
        return b""

    def decode_state(self, data: bytes, params: Mapping[str, float]) -> dict[str, Tensor]:
        """The state of one row, each tensor [1, ...] on the CPU; empty data = a fresh block.

        `params` holds every parameter of the row. Raises ValueError with one line for anything that `encode_state`
        cannot have made of an incomplete block.
        """
        if data:
            raise ValueError(f"{self.name} has no state, got {len(data)} bytes")
        return {}

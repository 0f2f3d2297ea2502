"""Rows: what the worker knows of one running request, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from common.limits import MAX_ROW_STOP_TOKEN_IDS
from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import SamplingColumns
from worker_svc.host_copies import ForwardBypass, upload

if TYPE_CHECKING:
    from worker_svc.rounds import RoundRow, Session


NUM_INTEGERS = 8  # of a row, beside its stop token ids


class RowKey(NamedTuple):
    """A request of one scheduler, whatever the attempt."""

    request_id: str
    sample_index: int


class RowName(NamedTuple):
    """A row as a round names it."""

    key: RowKey
    attempt: int


class Phase(Enum):
    PREFILL = "prefill"  # the prefix KV is not complete
    DENOISE = "denoise"  # its block has work left
    DONE = "done"  # its block is done and waits for `continue`


@dataclass
class Start:
    """A decoded and checked StartRow: tensors on the host, sizes right (see starts.py)."""

    name: RowName
    prompt_length: int
    prefix: Tensor  # int64 [block_index, B]
    block_index: int
    block_ids: Tensor  # int64 [B]
    block_mask: Tensor  # bool [B]
    is_complete: bool  # no position is masked
    step_count: int
    algorithm: str
    params: dict[str, float]
    state: dict[str, Tensor]  # one row; empty = fresh
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int  # uint64
    stop_token_ids: list[int]
    limit_position: int  # first position the request may not generate
    first_unmask_steps: Tensor | None = None  # int32 [B]; None = not asked for
    logprobs: Tensor | None = None  # float32 [B], likewise
    is_lead_in: bool = False  # see Row

    @property
    def num_blocks(self) -> int:
        """Blocks that it takes pages for: prefix, its own, and after a lead-in the next one."""
        return self.block_index + 1 + self.is_lead_in


@dataclass(eq=False)
class Row:
    """The host side of one resident request. `entry` is its line in the round that runs it, None while parked."""

    name: RowName
    session: Session
    slot: int
    algorithm: str
    samples: bool  # temperature above 0
    limit_position: int
    block_index: int
    prefix: Tensor  # int64 [first block_index, B] on the host, until prefilled
    wants_first_unmask_steps: bool = False
    wants_logprobs: bool = False
    prefilled_blocks: int = 0
    is_withheld: bool = False  # done and ended in the forward that committed the block before, which was told first
    # Its block is done already and not to be told: with shifted logits it gives the first token of the next one.
    is_lead_in: bool = False
    first_stop: int = 0  # once its request ends: offset of the block's first stop token id; B = none
    phase: Phase = Phase.PREFILL
    entry: RoundRow | None = None

    @classmethod
    def resident(cls, start: Start, session: Session, slot: int, cached_blocks: int = 0) -> Row:
        """The row of a start that got its slot, with the KV of its prefix's first `cached_blocks`."""
        return cls(
            name=start.name,
            session=session,
            slot=slot,
            algorithm=start.algorithm,
            samples=start.temperature > 0,
            limit_position=start.limit_position,
            block_index=start.block_index,
            prefix=start.prefix,
            wants_first_unmask_steps=start.first_unmask_steps is not None,
            wants_logprobs=start.logprobs is not None,
            prefilled_blocks=cached_blocks,
            is_lead_in=start.is_lead_in,
            phase=Phase.PREFILL if cached_blocks < start.block_index else Phase.DENOISE,
        )


@dataclass
class SlotColumns:
    """The device side: one entry a slot in every tensor, so that a batch is one gather by slot."""

    num_slots: int
    block_size: int
    device: torch.device
    early_end: bool = True  # a block may end its request with masks behind the first stop token
    logit_shift: int = 0
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    initial_states: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots, size, device = self.num_slots, self.block_size, self.device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.ids = integers(slots, size)
        self.next_first_ids = integers(slots)  # of shifted models: what the next block begins with
        self.committed_ids = integers(slots, size)  # of the block before, while a fused commit is not told
        self.masked = torch.zeros(slots, size, dtype=torch.bool, device=device)
        self.first_unmask_steps = integers(slots, size)  # of rows that ask, see records.py
        self.logprobs = torch.zeros(slots, size, dtype=torch.float32, device=device)  # likewise
        self.committed_first_unmask_steps = integers(slots, size)  # with committed_ids
        self.committed_logprobs = torch.zeros_like(self.logprobs)  # likewise
        # What a start sets with two writes; the columns are views.
        self._integers = integers(slots, NUM_INTEGERS + MAX_ROW_STOP_TOKEN_IDS)
        (
            self.block_index,
            self.step_index,
            self.max_steps,
            self.prompt_length,
            self.limit_position,
            self.top_k,
            self.seed,
            self.sample_index,
        ) = self._integers[:, :NUM_INTEGERS].unbind(dim=1)
        self.stop_token_ids = self._integers[:, NUM_INTEGERS:]  # padded with -1
        params = [(name, param.name) for name, algorithm in ALGORITHMS.items() for param in algorithm.params]
        self._floats = torch.zeros(slots, 3 + len(params), dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p, *columns = self._floats.unbind(dim=1)
        self.params: dict[str, dict[str, Tensor]] = {name: {} for name in ALGORITHMS}
        for (name, param), column in zip(params, columns, strict=True):
            self.params[name][param] = column
        self.offsets = torch.arange(size, device=device)
        self.bypass = ForwardBypass(device)
        for name, algorithm in ALGORITHMS.items():
            self.states[name] = algorithm.init_step_state(slots, device)
            self.initial_states[name] = algorithm.init_step_state(1, device)

    def write(self, slots: Sequence[int], starts: Sequence[Start]) -> None:
        """Put starting rows into their slots, at least one."""
        device, places = self.device, upload(slots, self.device)
        self.ids[places] = torch.stack([start.block_ids for start in starts]).to(device)
        self.masked[places] = torch.stack([start.block_mask for start in starts]).to(device)
        self._integers[places] = upload([self._integers_of(start) for start in starts], device)
        self._floats[places] = upload([self._floats_of(start) for start in starts], device)
        for slot, start in zip(slots, starts, strict=True):
            if start.first_unmask_steps is not None:
                self.first_unmask_steps[slot] = start.first_unmask_steps.to(device)
            if start.logprobs is not None:
                self.logprobs[slot] = start.logprobs.to(device)
            for key, column in self.states[start.algorithm].items():
                column[slot] = start.state.get(key, self.initial_states[start.algorithm][key])[0].to(device)

    def _integers_of(self, start: Start) -> list[int]:
        return [
            start.block_index,
            start.step_count,
            ALGORITHMS[start.algorithm].max_steps(self.block_size, start.params),
            start.prompt_length,
            start.limit_position,
            start.top_k,
            start.seed - (1 << 64 if start.seed >> 63 else 0),  # the same 64 bits as int64
            start.name.key.sample_index,
            *start.stop_token_ids,
            *[-1] * (MAX_ROW_STOP_TOKEN_IDS - len(start.stop_token_ids)),
        ]

    def _floats_of(self, start: Start) -> list[float]:
        others = (
            start.params[param] if name == start.algorithm else 0.0
            for name, columns in self.params.items()
            for param in columns
        )
        return [start.temperature, start.top_p, start.min_p, *others]

    def next_blocks(self, name: str, slots: Tensor, mask_token_id: int) -> None:
        """Begin the next block of the rows in `slots` (int64 [R]), all of algorithm `name`: step 0, fresh state."""
        state = {key: column[slots] for key, column in self.states[name].items()}
        first_ids = self.next_first_ids[slots] if self.logit_shift else None
        self.ids[slots], self.masked[slots] = ALGORITHMS[name].next_block(
            self.ids[slots], state, mask_token_id, first_ids
        )
        self.block_index[slots] += 1
        self.step_index[slots] = 0
        for key, column in self.states[name].items():
            column[slots] = self.initial_states[name][key].expand(len(slots), *column.shape[1:])

    def note_next_first(self, slots: Tensor, kept: Tensor, logits: Tensor, mask_token_id: int) -> None:
        """Of a shifted model: the most probable first tokens of the next blocks, by `logits` [R, B, V] at position 0;
        for the rows in `slots` [R] whose step counts (`kept` bool [R])."""
        first = logits[:, 0].clone()
        first[:, mask_token_id] = float("-inf")
        best = first.max(dim=1).indices  # the first of equals
        self.next_first_ids[slots] = torch.where(kept, best, self.next_first_ids[slots])

    def begin_committing(self, name: str, slots: Tensor, mask_token_id: int) -> None:
        """The blocks in `slots` (int64 [R]), all of algorithm `name`, are complete and the next ones begin: their ids
        go to `committed_ids`, for the forward that writes their KV beside the next blocks' first step."""
        self.committed_ids[slots] = self.ids[slots]
        self.next_blocks(name, slots, mask_token_id)

    def editable(self, slots: Tensor) -> Tensor:
        """bool [R, B]: the generated positions of each row's block."""
        positions = self.block_index[slots, None] * self.block_size + self.offsets
        return positions >= self.prompt_length[slots, None]

    def ends_request(
        self, slots: Tensor, ids: Tensor, masked: Tensor, editable: Tensor, edits: bool
    ) -> tuple[Tensor, Tensor]:
        """Whether a block as it stands ([R, B] each) decides that its request ends, bool [R], and the offset of its
        first stop token id in a generated position, int64 [R], B without one.

        It ends with no mask left, and a stop token id or the limit. Where set tokens stay, masks behind the first stop
        token do not matter: it stays the first one once all before it is set.
        """
        stops = self.stop_token_ids[slots]
        is_stop = (ids[:, :, None] == stops[:, None, :]).any(dim=2) & editable & ~masked
        first_stop = torch.where(is_stop, self.offsets, self.block_size).amin(dim=1)
        is_open = masked
        if self.early_end and not edits:
            is_open = is_open & (self.offsets < first_stop[:, None])
        has_limit = (self.block_index[slots] + 1) * self.block_size >= self.limit_position[slots]
        return ~is_open.any(dim=1) & ((first_stop < self.block_size) | has_limit), first_stop

    def sampling(self, slots: Tensor, any_sampling: bool) -> SamplingColumns:
        return SamplingColumns(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            top_k=self.top_k[slots],
            seed=self.seed[slots],
            sample_index=self.sample_index[slots],
            any_sampling=any_sampling,
        )

"""Rows: what the worker knows of one running request, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from common.limits import MAX_ROW_STOP_TOKEN_IDS
from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import SamplingColumns

if TYPE_CHECKING:
    from worker_svc.rounds import RoundRow, Session


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


@dataclass(eq=False)
class Row:
    """The host side of one resident request. `entry` is its line in the round that runs it, None while parked."""

    name: RowName
    session: Session
    slot: int
    algorithm: str
    samples: bool  # temperature above 0
    prompt_length: int
    limit_position: int
    stop_token_ids: frozenset[int]
    block_index: int
    prefix: Tensor  # int64 [first block_index, B] on the host, until prefilled
    wants_first_unmask_steps: bool = False
    wants_logprobs: bool = False
    prefilled_blocks: int = 0
    is_withheld: bool = False  # done and ended in the forward that committed the block before, which was told first
    phase: Phase = Phase.PREFILL
    entry: RoundRow | None = None

    @classmethod
    def resident(cls, start: Start, session: Session, slot: int) -> Row:
        """The row of a start that got its slot."""
        return cls(
            name=start.name,
            session=session,
            slot=slot,
            algorithm=start.algorithm,
            samples=start.temperature > 0,
            prompt_length=start.prompt_length,
            limit_position=start.limit_position,
            stop_token_ids=frozenset(start.stop_token_ids),
            block_index=start.block_index,
            prefix=start.prefix,
            wants_first_unmask_steps=start.first_unmask_steps is not None,
            wants_logprobs=start.logprobs is not None,
            phase=Phase.PREFILL if start.block_index else Phase.DENOISE,
        )


@dataclass
class SlotColumns:
    """The device side: one entry a slot in every tensor, so that a batch is one gather by slot."""

    num_slots: int
    block_size: int
    device: torch.device
    early_end: bool = True  # a block may end its request with masks behind the first stop token
    params: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    initial_states: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots, size, device = self.num_slots, self.block_size, self.device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(slots, dtype=torch.float32, device=device)

        self.ids = integers(slots, size)
        self.committed_ids = integers(slots, size)  # of the block before, while a fused commit is not told
        self.masked = torch.zeros(slots, size, dtype=torch.bool, device=device)
        self.first_unmask_steps = integers(slots, size)  # of rows that ask, see records.py
        self.logprobs = torch.zeros(slots, size, dtype=torch.float32, device=device)  # likewise
        self.committed_first_unmask_steps = integers(slots, size)  # with committed_ids
        self.committed_logprobs = torch.zeros_like(self.logprobs)  # likewise
        self.block_index = integers(slots)
        self.step_index = integers(slots)
        self.max_steps = integers(slots)
        self.prompt_length = integers(slots)
        self.limit_position = integers(slots)
        self.stop_token_ids = integers(slots, MAX_ROW_STOP_TOKEN_IDS)  # padded with -1
        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.top_k, self.seed, self.sample_index = integers(slots), integers(slots), integers(slots)
        self.offsets = torch.arange(size, device=device)
        self.starts = 0  # rows written so far
        for name, algorithm in ALGORITHMS.items():
            self.params[name] = {param.name: floats() for param in algorithm.params}
            self.states[name] = algorithm.init_step_state(slots, device)
            self.initial_states[name] = algorithm.init_step_state(1, device)

    def write(self, slot: int, start: Start) -> None:
        """Put a starting row into its slot."""
        self.starts += 1
        self.ids[slot] = start.block_ids.to(self.device)
        self.masked[slot] = start.block_mask.to(self.device)
        if start.first_unmask_steps is not None:
            self.first_unmask_steps[slot] = start.first_unmask_steps.to(self.device)
        if start.logprobs is not None:
            self.logprobs[slot] = start.logprobs.to(self.device)
        self.block_index[slot] = start.block_index
        self.step_index[slot] = start.step_count
        self.max_steps[slot] = ALGORITHMS[start.algorithm].max_steps(self.block_size, start.params)
        self.prompt_length[slot] = start.prompt_length
        self.limit_position[slot] = start.limit_position
        stops = start.stop_token_ids
        self.stop_token_ids[slot] = torch.tensor(
            stops + [-1] * (MAX_ROW_STOP_TOKEN_IDS - len(stops)), device=self.device
        )
        self.temperature[slot] = start.temperature
        self.top_p[slot] = start.top_p
        self.min_p[slot] = start.min_p
        self.top_k[slot] = start.top_k
        self.seed[slot] = start.seed - (1 << 64 if start.seed >> 63 else 0)  # the same 64 bits as int64
        self.sample_index[slot] = start.name.key.sample_index
        for param, column in self.params[start.algorithm].items():
            column[slot] = start.params[param]
        for key, column in self.states[start.algorithm].items():
            column[slot] = start.state.get(key, self.initial_states[start.algorithm][key])[0].to(self.device)

    def next_blocks(self, name: str, slots: Tensor, mask_token_id: int) -> None:
        """Begin the next block of the rows in `slots` (int64 [R]), all of algorithm `name`: step 0, fresh state."""
        state = {key: column[slots] for key, column in self.states[name].items()}
        self.ids[slots], self.masked[slots] = ALGORITHMS[name].next_block(self.ids[slots], state, mask_token_id)
        self.block_index[slots] += 1
        self.step_index[slots] = 0
        for key, column in self.states[name].items():
            column[slots] = self.initial_states[name][key].expand(len(slots), *column.shape[1:])

    def begin_committing(self, name: str, slots: Tensor, mask_token_id: int) -> None:
        """The blocks in `slots` (int64 [R]), all of algorithm `name`, are complete and the next ones begin: their ids
        go to `committed_ids`, for the forward that writes their KV beside the next blocks' first step."""
        self.committed_ids[slots] = self.ids[slots]
        self.next_blocks(name, slots, mask_token_id)

    def editable(self, slots: Tensor) -> Tensor:
        """bool [R, B]: the generated positions of each row's block."""
        positions = self.block_index[slots, None] * self.block_size + self.offsets
        return positions >= self.prompt_length[slots, None]

    def ends_request(self, slots: Tensor, ids: Tensor, masked: Tensor, editable: Tensor, edits: bool) -> Tensor:
        """bool [R]: whether a block as it stands ([R, B] each) decides that its request ends.

        It has no mask, and a stop token id in a generated position or the limit. Where set tokens stay, masks behind
        the first stop token do not matter: it stays the first one once all before it is set.
        """
        stops = self.stop_token_ids[slots]
        is_stop = (ids[:, :, None] == stops[:, None, :]).any(dim=2) & editable & ~masked
        is_open = masked
        if self.early_end and not edits:
            is_open = is_open & (is_stop.cumsum(dim=1) == 0)
        has_limit = (self.block_index[slots] + 1) * self.block_size >= self.limit_position[slots]
        return ~is_open.any(dim=1) & (is_stop.any(dim=1) | has_limit)

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

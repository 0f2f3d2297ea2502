"""The tensors of one forward and of one step: rows of any algorithm, prompt chunks beside them.

    units of a forward   | row 0 | row 1 | chunk of row 2, then row 2's own block | chunk of row 3 |
    logits wanted of     |   x   |   x   |                                    x   |                |

A unit is one block of one slot. A chunk is several consecutive blocks of a prefix. A row whose prefix is complete
with this forward denoises in it too: its own block follows the chunk, and block-causal attention makes that exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm, SamplingColumns, StepBatch
from worker_svc.model_runner import ForwardInput, Segment
from worker_svc.rows import Row, SlotColumns


@dataclass(frozen=True)
class Chunk:
    """Blocks of a row's prefix that the next forward computes."""

    row: Row
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class Group:
    """The rows of one algorithm; what cannot change while the batch stands is gathered once."""

    algorithm: DllmAlgorithm
    places: Tensor  # int64 [R'], rows of the batch
    slots: Tensor  # int64 [R']
    editable: Tensor  # bool [R', B]
    sampling: SamplingColumns
    params: dict[str, Tensor]  # float32 [R']


@dataclass(frozen=True)
class Batch:
    """The rows of the next forwards, until one joins or leaves."""

    rows: list[Row]
    slots: Tensor  # int64 [R]
    active: Tensor  # bool [R]; False = a done row that keeps its place in a SYNC round
    groups: list[Group]
    inputs: ForwardInput
    starts: int  # `SlotColumns.starts` when it was built


@dataclass(frozen=True)
class RowFlags:
    """What the host must know of a row after a step."""

    done: bool
    ends: bool  # with this block, by stop token or limit
    bad_numerics: bool
    over_bound: bool


def build_batch(rows: list[Row], active: list[bool], columns: SlotColumns, last: Batch | None = None) -> Batch:
    """The batch of `rows`; O(rows), done only when a row joins, leaves or begins a block.

    What `last`, the batch before, gathered of the same rows is taken over.
    """
    device = columns.device
    if last is not None and last.starts == columns.starts and last.rows == rows:
        slots, logits_units = last.slots, last.inputs.logits_units
        groups = [replace(group, editable=columns.editable(group.slots)) for group in last.groups]
    else:
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
        logits_units = torch.arange(len(rows), device=device)
        groups = _groups(rows, slots, columns)
    inputs = ForwardInput(
        ids=columns.ids[slots],
        slots=slots,
        block_index=columns.block_index[slots],
        segments=tuple([Segment(unit, 1, row.block_index) for unit, row in enumerate(rows)]),
        logits_units=logits_units,
    )
    is_active = torch.tensor(active, dtype=torch.bool, device=device)
    return Batch(rows, slots, is_active, groups, inputs, columns.starts)


def _groups(rows: list[Row], slots: Tensor, columns: SlotColumns) -> list[Group]:
    """The rows by algorithm."""
    groups = []
    for name in dict.fromkeys(row.algorithm for row in rows):
        members = [place for place, row in enumerate(rows) if row.algorithm == name]
        places = torch.tensor(members, device=columns.device)
        own = slots[places]
        groups.append(
            Group(
                algorithm=ALGORITHMS[name],
                places=places,
                slots=own,
                editable=columns.editable(own),
                sampling=columns.sampling(own, any(rows[place].samples for place in members)),
                params={key: column[own] for key, column in columns.params[name].items()},
            )
        )
    return groups


def forward_input(batch: Batch, chunks: Sequence[Chunk], columns: SlotColumns) -> ForwardInput:
    """The next forward over the batch as its blocks now stand, with the chunks beside it."""
    batch.inputs.ids = columns.ids[batch.slots]
    if not chunks:
        return batch.inputs
    device, size = columns.device, columns.block_size
    chunk_of = {id(chunk.row): chunk for chunk in chunks}
    slots: list[int] = []
    blocks: list[int] = []
    segments: list[Segment] = []
    own_units: list[int] = []
    prefixes: list[tuple[int, Tensor]] = []

    def add(row: Row, chunk: Chunk | None, own_block: bool) -> None:
        first_unit, first_block = len(slots), row.block_index
        if chunk is not None:
            first_block = chunk.first_block
            prefixes.append((first_unit, row.prefix[first_block : first_block + chunk.num_blocks]))
        num_prefill_units = chunk.num_blocks if chunk else 0
        num_units = num_prefill_units + own_block
        segments.append(Segment(first_unit, num_units, first_block, num_prefill_units))
        slots.extend([row.slot] * num_units)
        blocks.extend(range(first_block, first_block + num_units))
        if own_block:
            own_units.append(first_unit + num_units - 1)

    for row in batch.rows:
        add(row, chunk_of.pop(id(row), None), own_block=True)
    for chunk in chunk_of.values():
        add(chunk.row, chunk, own_block=False)
    ids = torch.empty(len(slots), size, dtype=torch.int64, device=device)
    logits_units = torch.tensor(own_units, dtype=torch.int64, device=device)
    ids[logits_units] = batch.inputs.ids
    for first_unit, prefix in prefixes:
        ids[first_unit : first_unit + len(prefix)] = prefix.to(device)
    return ForwardInput(
        ids=ids,
        slots=torch.tensor(slots, device=device),
        block_index=torch.tensor(blocks, device=device),
        segments=tuple(segments),
        logits_units=logits_units,
    )


def step(batch: Batch, logits: Tensor, columns: SlotColumns, mask_token_id: int) -> list[tuple[int, RowFlags]]:
    """`step` once per algorithm on logits [R, B, V]; the rows (by place) with a flag set, in one copy to the host.

    A block that ends its request needs no KV: an algorithm that never edits is done with it as soon as its last mask
    is filled. Rows that are not active or whose logits are not finite keep their block as it is.
    """
    finite = logits.isfinite().flatten(1).all(dim=1)
    keep = batch.active & finite
    done, ends = torch.zeros_like(keep), torch.zeros_like(keep)
    for group in batch.groups:
        name, slots, kept = group.algorithm.name, group.slots, keep[group.places]
        block = StepBatch(
            ids=columns.ids[slots],
            masked=columns.masked[slots],
            editable=group.editable,
            block_index=columns.block_index[slots],
            step_index=columns.step_index[slots],
            sampling=group.sampling,
            params=group.params,
            mask_token_id=mask_token_id,
        )
        state = {key: column[slots] for key, column in columns.states[name].items()}
        own_logits = logits if len(batch.groups) == 1 else logits[group.places]
        group_done = group.algorithm.step(block, own_logits, state)
        group_ends = ~block.masked.any(dim=1) & columns.ends_request(slots, block.ids, group.editable)
        done[group.places] = group_done if group.algorithm.edits else group_done | group_ends
        ends[group.places] = group_ends
        columns.ids[slots] = torch.where(kept[:, None], block.ids, columns.ids[slots])
        columns.masked[slots] = torch.where(kept[:, None], block.masked, columns.masked[slots])
        for key, column in columns.states[name].items():
            kept_like = kept.view(-1, *[1] * (column.dim() - 1))
            column[slots] = torch.where(kept_like, state[key], column[slots])
    columns.step_index[batch.slots] += keep.to(torch.int64)
    over_bound = keep & ~done & (columns.step_index[batch.slots] >= columns.max_steps[batch.slots])
    table = torch.stack([done & keep, ends & keep, batch.active & ~finite, over_bound], dim=1).tolist()
    return [
        (place, RowFlags(is_done, is_end, is_bad, is_over))
        for place, (is_done, is_end, is_bad, is_over) in enumerate(table)
        if is_done or is_bad or is_over
    ]

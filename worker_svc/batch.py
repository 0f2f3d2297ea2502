"""The tensors of one forward and of one step: rows of any algorithm, prompt chunks beside them.

    units of a forward   | row 0 | row 1 | row 2 | chunk of row 2's prefix | chunk of row 3's prefix |
    logits wanted of     |   x   |   x   |   x   |                         |                         |

A unit is one block of one slot. A chunk is several consecutive blocks of a prefix. A row whose prefix is complete
with this forward denoises in it too: the keys and values of all units are there before any is read. A fused commit is a
unit as well: the complete block whose KV becomes final in the forward that has the next block's first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm, SamplingColumns, StepBatch
from worker_svc.model_runner import ForwardInput, Segment
from worker_svc.records import Recorder
from worker_svc.rows import Phase, Row, SlotColumns


class Chunk(NamedTuple):
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
    recorder: Recorder


@dataclass(frozen=True)
class Batch:
    """The rows of the next forwards, until one joins or leaves."""

    rows: list[Row]
    slots: Tensor  # int64 [R]
    active: Tensor  # bool [R]; False = a done row that keeps its place in a SYNC round
    groups: list[Group]
    block_index: Tensor  # int64 [R]
    segments: tuple[Segment, ...]
    logits_units: Tensor  # int64 [R]: a row is the unit of its place
    starts: int  # `SlotColumns.starts` when it was built


class RowFlags(NamedTuple):
    """What the host must know of a row after a step."""

    done: bool
    ends: bool  # with this block, by stop token or limit
    bad_numerics: bool
    over_bound: bool
    filled: bool  # complete, and not done: the next forward is its commit


def build_batch(rows: list[Row], active: list[bool], columns: SlotColumns, last: Batch | None = None) -> Batch:
    """The batch of `rows`; O(rows), done only when a row joins, leaves or begins a block.

    What `last`, the batch before, gathered of the same rows is taken over.
    """
    device = columns.device
    if last is not None and last.starts == columns.starts and last.rows == rows:
        slots, logits_units = last.slots, last.logits_units
        groups = [replace(group, editable=columns.editable(group.slots)) for group in last.groups]
    else:
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
        logits_units = torch.arange(len(rows), device=device)
        groups = _groups(rows, slots, columns)
    return Batch(
        rows=rows,
        slots=slots,
        active=torch.tensor(active, dtype=torch.bool, device=device),
        groups=groups,
        block_index=columns.block_index[slots],
        segments=tuple([Segment(unit, 1, row.block_index) for unit, row in enumerate(rows)]),
        logits_units=logits_units,
        starts=columns.starts,
    )


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
                recorder=Recorder.of([rows[place] for place in members], columns.device),
            )
        )
    return groups


def next_chunks(rows: Iterable[Row], max_blocks: int) -> list[Chunk]:
    """Whole blocks of the rows' incomplete prefixes, in order, at most `max_blocks` in all. A row whose prefix is
    complete with its chunk denoises from this very forward on."""
    chunks = []
    for row in rows:
        if max_blocks and row.phase is Phase.PREFILL:
            chunk = Chunk(row, row.prefilled_blocks, min(max_blocks, len(row.prefix) - row.prefilled_blocks))
            chunks.append(chunk)
            max_blocks -= chunk.num_blocks
            row.prefilled_blocks += chunk.num_blocks
            if row.prefilled_blocks == len(row.prefix):
                row.phase = Phase.DENOISE
    return chunks


def forward_input(
    batch: Batch, chunks: Sequence[Chunk], columns: SlotColumns, commits: Sequence[Row] = ()
) -> ForwardInput:
    """The next forward over the batch as its blocks now stand, with chunks beside it and, for the rows in `commits`,
    the blocks before."""
    own_ids = columns.ids[batch.slots]
    if not chunks and not commits:
        return ForwardInput(own_ids, batch.slots, batch.block_index, batch.segments, batch.logits_units)
    slots: list[int] = []
    blocks: list[int] = []
    segments: list[Segment] = []
    prefixes: list[Tensor] = []
    for row, first_block, num_blocks in chunks:
        segments.append(Segment(len(batch.rows) + len(slots), num_blocks, first_block, is_prefill=True))
        slots += [row.slot] * num_blocks
        blocks += range(first_block, first_block + num_blocks)
        prefixes.append(row.prefix[first_block : first_block + num_blocks])
    device = columns.device
    ids = [own_ids, *(prefix.to(device) for prefix in prefixes)]
    if commits:
        ids.append(columns.committed_ids[torch.tensor([row.slot for row in commits], device=device)])
    for row in commits:
        segments.append(Segment(len(batch.rows) + len(slots), 1, row.block_index - 1))
        slots.append(row.slot)
        blocks.append(row.block_index - 1)
    return ForwardInput(
        ids=torch.cat(ids),
        slots=torch.cat([batch.slots, torch.tensor(slots, device=device)]),
        block_index=torch.cat([batch.block_index, torch.tensor(blocks, device=device)]),
        # What lies before a row's own block comes before it for whoever computes one after the other.
        segments=(*segments, *batch.segments),
        logits_units=batch.logits_units,
    )


def step(batch: Batch, logits: Tensor, columns: SlotColumns, mask_token_id: int) -> list[tuple[int, RowFlags]]:
    """`step` once per algorithm on logits [R, B, V]; the rows (by place) with a flag set, in one copy to the host.

    A block that ends its request needs no KV: an algorithm that never edits is done with it as soon as the request's
    output is decided. Rows that are not active or whose logits are not finite keep their block as it is.
    """
    finite = _finite_rows(logits)
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
        raw = group.recorder.raw_logits(own_logits)
        group_done = group.algorithm.step(block, own_logits, state)
        group_ends = columns.ends_request(slots, block.ids, block.masked, group.editable, group.algorithm.edits)
        done[group.places] = group_done if group.algorithm.edits else group_done | group_ends
        ends[group.places] = group_ends
        group.recorder.record(columns, slots, block, raw, kept)
        columns.ids[slots] = torch.where(kept[:, None], block.ids, columns.ids[slots])
        columns.masked[slots] = torch.where(kept[:, None], block.masked, columns.masked[slots])
        for key, column in columns.states[name].items():
            kept_like = kept.view(-1, *[1] * (column.dim() - 1))
            column[slots] = torch.where(kept_like, state[key], column[slots])
    columns.step_index[batch.slots] += keep.to(torch.int64)
    over_bound = keep & ~done & (columns.step_index[batch.slots] >= columns.max_steps[batch.slots])
    filled = keep & ~done & ~columns.masked[batch.slots].any(dim=1)
    table = torch.stack([done & keep, ends & keep, batch.active & ~finite, over_bound, filled], dim=1).tolist()
    rows = enumerate(map(RowFlags._make, table))
    return [(place, row) for place, row in rows if row.done or row.bad_numerics or row.over_bound or row.filled]


def _finite_rows(logits: Tensor) -> Tensor:
    """bool [R]: whether all logits of a row are finite, without a copy of them; `isfinite` of all would make one."""
    flat = logits.flatten(1)
    return flat.amax(dim=1).isfinite() & flat.amin(dim=1).isfinite()

"""The tensors of one forward: rows of any algorithm, prompt chunks beside them.

    units of a forward   | row 0 | row 1 | row 2 | chunk of row 2's prefix | chunk of row 3's prefix |
    logits wanted of     |   x   |   x   |   x   |                         |                         |

A unit is one block of one slot. A chunk is several consecutive blocks of a prefix. A row whose prefix is complete
with this forward denoises in it too: the keys and values of all units are there before any is read. A fused commit is a
unit as well: the complete block whose KV becomes final in the forward that has the next block's first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.host_copies import upload
from worker_svc.model_runner import ForwardInput, Segment
from worker_svc.rows import Phase, Row, SlotColumns


class Chunk(NamedTuple):
    """Blocks of a row's prefix that the next forward computes."""

    row: Row
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class Batch:
    """The rows of the next forwards, until one joins, leaves or begins a block."""

    rows: list[Row]
    slots: Tensor  # int64 [R]
    block_index: Tensor  # int64 [R]
    segments: tuple[Segment, ...]
    logits_units: Tensor  # int64 [R]: a row is the unit of its place


def build_batch(rows: list[Row], columns: SlotColumns, last: Batch | None = None) -> Batch:
    """The batch of `rows`; O(rows). What `last`, the batch before, has of the same rows is taken over."""
    if last is not None and last.rows == rows:
        slots, logits_units = last.slots, last.logits_units
    else:
        slots = upload([row.slot for row in rows], columns.device, torch.int64)
        logits_units = torch.arange(len(rows), device=columns.device)
    segments = tuple([Segment(unit, 1, row.block_index) for unit, row in enumerate(rows)])
    return Batch(rows, slots, columns.block_index[slots], segments, logits_units)


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
    ids = [own_ids, *(prefix.to(device, non_blocking=True) for prefix in prefixes)]
    if commits:
        ids.append(columns.committed_ids[upload([row.slot for row in commits], device)])
    for row in commits:
        segments.append(Segment(len(batch.rows) + len(slots), 1, row.block_index - 1))
        slots.append(row.slot)
        blocks.append(row.block_index - 1)
    return ForwardInput(
        ids=torch.cat(ids),
        slots=torch.cat([batch.slots, upload(slots, device)]),
        block_index=torch.cat([batch.block_index, upload(blocks, device)]),
        # What lies before a row's own block comes before it for whoever computes one after the other.
        segments=(*segments, *batch.segments),
        logits_units=batch.logits_units,
    )

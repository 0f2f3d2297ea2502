"""The step of one forward: the algorithms of its rows on the logits, and what the host must know of it.

What it needs of the rows beside their blocks is gathered while the device computes the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm, SamplingColumns, StepBatch
from worker_svc.host_copies import download, upload
from worker_svc.records import Recorder
from worker_svc.rows import Row, SlotColumns


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
class StepRows:
    """The rows of a batch, as a step needs them."""

    slots: Tensor  # int64 [R]
    active: Tensor  # bool [R]; False = a done row that keeps its place in a SYNC round
    groups: list[Group]


class RowFlags(NamedTuple):
    """What the host must know of a row after a step."""

    done: bool
    ends: bool  # with this block, by stop token or limit
    bad_numerics: bool
    over_bound: bool
    filled: bool  # complete, and not done: the next forward is its commit
    first_stop: int  # offset of the block's first stop token id, B = none


def step_rows(
    rows: list[Row], slots: Tensor, active: list[bool], columns: SlotColumns, last: StepRows | None = None
) -> StepRows:
    """The rows in `slots`, int64 [R]. What `last`, those of the batch before, has of the same rows is taken over."""
    if last is not None and last.slots is slots:
        groups = [replace(group, editable=columns.editable(group.slots)) for group in last.groups]
    else:
        groups = _groups(rows, slots, columns)
    return StepRows(slots, upload(active, columns.device, torch.bool), groups)


def _groups(rows: list[Row], slots: Tensor, columns: SlotColumns) -> list[Group]:
    """The rows by algorithm."""
    groups = []
    for name in dict.fromkeys(row.algorithm for row in rows):
        members = [place for place, row in enumerate(rows) if row.algorithm == name]
        places = upload(members, columns.device)
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


def step(batch: StepRows, logits: Tensor, columns: SlotColumns, mask_token_id: int) -> Tensor:
    """`step` once per algorithm on logits [R, B, V]; the `RowFlags` of the rows, int64 [R, 6], in one copy to the host
    that is complete when the device has come so far.

    A block that ends its request needs no KV: an algorithm that never edits is done with it as soon as the request's
    output is decided. Rows that are not active or whose logits are not finite keep their block as it is.
    """
    finite = _finite_rows(logits)
    keep = batch.active & finite
    done, ends = torch.zeros_like(keep), torch.zeros_like(keep)
    first_stop = torch.zeros_like(batch.slots)
    if columns.logit_shift:
        columns.note_next_first(batch.slots, keep, logits, mask_token_id)
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
        group_ends, first_stop[group.places] = columns.ends_request(
            slots, block.ids, block.masked, group.editable, group.algorithm.edits
        )
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
    flags = (done & keep, ends & keep, batch.active & ~finite, over_bound, filled)
    return download(torch.stack([*flags, first_stop], dim=1))


def flagged_rows(flags: Tensor) -> list[tuple[int, RowFlags]]:
    """The rows (by place) with a flag set, of what `step` gave; after `ModelRunner.finish`."""
    rows = enumerate(map(RowFlags._make, flags.tolist()))
    return [(place, row) for place, row in rows if row.done or row.bad_numerics or row.over_bound or row.filled]


def _finite_rows(logits: Tensor) -> Tensor:
    """bool [R]: whether all logits of a row are finite, without a copy of them; `isfinite` of all would make one."""
    flat = logits.flatten(1)
    return flat.amax(dim=1).isfinite() & flat.amin(dim=1).isfinite()

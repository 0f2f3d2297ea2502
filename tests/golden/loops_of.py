"""Worker loops over any model, and rows run to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import Driver, names
from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models.base import BlockModel


def loop_of(
    model: BlockModel,
    *,
    block_size: int,
    mask_id: int,
    logit_shift: int = 0,
    slots: int = 16,
    batch_invariant: bool = False,
    **switches: Any,
) -> DenoiseLoop:
    """A worker's loop over `model` with room for 512 tokens a request."""
    torch.set_num_threads(1)
    runner = TorchModelRunner(model, ATTENTION_BACKENDS["torch"](), batch_invariant, logit_shift)
    usual: dict[str, Any] = {
        "fingerprint": "scripted",
        "page_size": block_size,
        "num_pages": slots * 512 // block_size,
        "chunked_prefill_size": 2 * block_size,
    }
    config = LoopConfig(
        block_size=block_size,
        mask_token_id=mask_id,
        context_length=512,
        num_slots=slots,
        logit_shift=logit_shift,
        **(usual | switches),
    )
    return DenoiseLoop(runner, config, lambda: 0.0)


def row_of(name: str, prompt: list[int], loop: DenoiseLoop, tokens_left: int, **fields: Any) -> pb.StartRow:
    """A fresh request, as a scheduler sends it."""
    size = loop.config.block_size
    first = len(prompt) // size * size
    tail = prompt[first:]
    row = pb.StartRow(
        request_id=name,
        attempt=1,
        prompt_length=len(prompt),
        prefix_ids=pack_ids(prompt[:first]),
        block_index=first // size,
        block_ids=pack_ids(tail + [loop.config.mask_token_id] * (size - len(tail))),
        block_mask=pack_bits([False] * len(tail) + [True] * (size - len(tail))),
        sampling=pb.SamplingParams(top_p=1.0),
        tokens_left=tokens_left,
    )
    row.MergeFrom(pb.StartRow(**fields))
    return row


def answers(loop: DenoiseLoop, rows: Sequence[pb.StartRow], mode: pb.Mode, max_forwards: int = 0) -> list[list[int]]:
    """All rows at once to their ends: of each the generated ids, up to the stop id or the limit."""
    size, driver = loop.config.block_size, Driver(loop)
    ids: dict[str, dict[int, int]] = {row.request_id: {} for row in rows}  # by position
    ends: dict[str, int] = {}
    order = list(ids)
    reply = driver.run(starts=rows, mode=mode, max_forwards=max_forwards)
    while order:
        done, indexes = unpack_ids(reply.rows.done_ids), list(reply.rows.done_block_indexes)
        for place, name in enumerate(order):
            assert reply.rows.statuses[place] in (
                pb.ROW_STATUS_RUNNING,
                pb.ROW_STATUS_PREFILLING,
                pb.ROW_STATUS_ENDED,
            ), reply.rows.errors
            if reply.rows.accept_lengths[place]:
                first = indexes.pop(0) * size
                ids[name] |= {first + offset: token for offset, token in enumerate(done[:size])}
                done = done[size:]
            if reply.rows.statuses[place] == pb.ROW_STATUS_ENDED:
                ends[name] = reply.rows.end_positions[place]
        order = [name for name in order if name not in ends]
        if order:
            reply = driver.run(continues=names(*order), mode=mode, max_forwards=max_forwards)
    lengths = {row.request_id: row.prompt_length for row in rows}
    return [[ids[name][position] for position in range(lengths[name], ends[name] + 1)] for name in ids]

"""One real round before the worker says SERVING, so that the first user pays for no lazy initialisation."""

from __future__ import annotations

import itertools

from common.errors import Refused
from common.packing import pack_bits, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import algorithms_for
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig
from worker_svc.rounds import RoundRequest
from worker_svc.run_alone import run_fdfo, run_sync
from worker_svc.starts import decode_start

SCHEDULER_ID = "warm-up"
WARM_UP_LIMIT_S = 5.0  # then it ends at the next boundary: the one forward of a large model on a CPU may take longer


def warm_up(loop: DenoiseLoop, full: bool = False) -> None:
    """A prompt of a block and a token for every algorithm, one of them sampled too, to the first done block or for
    `WARM_UP_LIMIT_S`.

    full: so many of them, and so long ones, that the batch has all its rows and a whole chunk of prompts; to the end.
    """
    config = loop.config
    if config.max_blocks < 2:
        return
    names = list(algorithms_for(config.logit_shift))
    kinds = [(names[0], 1.0), *((name, 0.0) for name in names)]
    num_rows = config.num_slots if full else min(len(kinds), config.num_slots)
    num_blocks = full_prefix_blocks(config) if full else 1
    size = config.block_size
    num_set = min(1, size - 1)  # a block of one position has none to spare
    starts = [
        pb.StartRow(
            request_id=f"warm-up-{place}",
            attempt=1,
            prompt_length=num_blocks * size + num_set,
            prefix_ids=pack_ids([0] * num_blocks * size),
            block_index=num_blocks,
            block_ids=pack_ids([0] * num_set + [config.mask_token_id] * (size - num_set)),
            block_mask=pack_bits([False] * num_set + [True] * (size - num_set)),
            algorithm=name,
            sampling=pb.SamplingParams(temperature=temperature, top_p=1.0),
            tokens_left=size - num_set,
        )
        for place, (name, temperature) in zip(range(num_rows), itertools.cycle(kinds), strict=False)
    ]
    request = RoundRequest(
        scheduler_id=SCHEDULER_ID,
        generation=1,
        worker_epoch=loop.epoch,
        fingerprint=loop.config.fingerprint,
        round_id=1,
        acked_round_id=0,
        mode=pb.MODE_FDFO,
        max_forwards=0,
        max_round_ms=int(WARM_UP_LIMIT_S * 1000),
        releases=[],
        starts=[decode_start(start, loop.start_rules) for start in starts],
        continues=[],
    )
    # In lockstep no row leaves before all have come.
    (run_sync if full else run_fdfo)(loop, request)
    loop.leases.forget(loop.sessions[SCHEDULER_ID], Refused("STALE_GENERATION", "the warm-up is over"))
    loop.pool.forget_all()
    loop.totals.Clear()
    loop.pool.num_calls = loop.prefill_row_forwards = 0


def full_prefix_blocks(config: LoopConfig) -> int:
    """Blocks of each prompt such that all rows together have a whole chunk of them."""
    chunk_blocks = config.chunked_prefill_size // config.block_size
    return min(-(-chunk_blocks // config.num_slots), config.max_blocks - 1)


def pages_for_full(config: LoopConfig) -> int:
    """Pages that a full warm-up takes."""
    return config.num_slots * -(-(full_prefix_blocks(config) + 1) * config.block_size // config.page_size)

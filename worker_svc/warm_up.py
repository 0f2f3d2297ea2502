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


def warm_up(loop: DenoiseLoop, full: bool = False) -> None:
    """A prompt of a block and a token for every algorithm, greedy and sampled, to the first done block.

    full: so many of them, and so long ones, that the batch has all its rows and a whole chunk of prompts.
    """
    config = loop.config
    if config.max_blocks < 2:
        return
    kinds = [(name, temperature) for name in algorithms_for(config.logit_shift) for temperature in (0.0, 1.0)]
    num_rows = config.num_slots if full else min(len(kinds), config.num_slots)
    num_blocks = full_prefix_blocks(config) if full else 1
    size = config.block_size
    starts = [
        pb.StartRow(
            request_id=f"warm-up-{place}",
            attempt=1,
            prompt_length=num_blocks * size + 1,
            prefix_ids=pack_ids([0] * num_blocks * size),
            block_index=num_blocks,
            block_ids=pack_ids([0] + [config.mask_token_id] * (size - 1)),
            block_mask=pack_bits([False] + [True] * (size - 1)),
            algorithm=name,
            sampling=pb.SamplingParams(temperature=temperature, top_p=1.0),
            tokens_left=size - 1,
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
        max_round_ms=60_000,
        releases=[],
        starts=[decode_start(start, loop.start_rules) for start in starts],
        continues=[],
    )
    # In lockstep no row leaves before all have come.
    (run_sync if full else run_fdfo)(loop, request)
    loop.leases.forget(loop.sessions[SCHEDULER_ID], Refused("STALE_GENERATION", "the warm-up is over"))
    loop.pool.forget_all()
    loop.totals.Clear()
    loop.pool.num_calls = 0


def full_prefix_blocks(config: LoopConfig) -> int:
    """Blocks of each prompt such that all rows together have a whole chunk of them."""
    chunk_blocks = config.chunked_prefill_size // config.block_size
    return min(-(-chunk_blocks // config.num_slots), config.max_blocks - 1)


def pages_for_full(config: LoopConfig) -> int:
    """Pages that a full warm-up takes."""
    return config.num_slots * -(-(full_prefix_blocks(config) + 1) * config.block_size // config.page_size)

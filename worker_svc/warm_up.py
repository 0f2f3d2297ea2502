"""One real round before the worker says SERVING, so that the first user pays for no lazy initialisation."""

from __future__ import annotations

from common.errors import Refused
from common.packing import pack_bits, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import algorithms_for
from worker_svc.denoise import DenoiseLoop
from worker_svc.rounds import RoundRequest
from worker_svc.run_alone import run_fdfo
from worker_svc.starts import decode_start

SCHEDULER_ID = "warm-up"


def warm_up(loop: DenoiseLoop) -> None:
    """A prompt of a block and a token for every algorithm, greedy and sampled, to the first done block."""
    size = loop.config.block_size
    if loop.config.max_blocks < 2:
        return
    starts = [
        pb.StartRow(
            request_id=f"{name}-{temperature}",
            attempt=1,
            prompt_length=size + 1,
            prefix_ids=pack_ids([0] * size),
            block_index=1,
            block_ids=pack_ids([0] + [loop.config.mask_token_id] * (size - 1)),
            block_mask=pack_bits([False] + [True] * (size - 1)),
            algorithm=name,
            sampling=pb.SamplingParams(temperature=temperature, top_p=1.0),
            tokens_left=size - 1,
        )
        for name in algorithms_for(loop.config.logit_shift)
        for temperature in (0.0, 1.0)
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
        starts=[decode_start(start, loop.start_rules) for start in starts[: loop.config.num_slots]],
        continues=[],
    )
    run_fdfo(loop, request)
    loop.leases.forget(loop.sessions[SCHEDULER_ID], Refused("STALE_GENERATION", "the warm-up is over"))
    loop.pool.forget_all()
    loop.totals.Clear()
    loop.pool.num_calls = loop.prefill_row_forwards = 0

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
WARM_UP_LIMIT_S = 5.0  # then it ends at the next boundary: the one forward of a large model on a CPU may take longer


def warm_up(loop: DenoiseLoop) -> None:
    """A prompt of a block and a token for every algorithm, one of them sampled too, to the first done block or for
    `WARM_UP_LIMIT_S`."""
    size = loop.config.block_size
    if loop.config.max_blocks < 2:
        return
    num_set = min(1, size - 1)  # a block of one position has none to spare
    names = list(algorithms_for(loop.config.logit_shift))
    starts = [
        pb.StartRow(
            request_id=f"{name}-{temperature}",
            attempt=1,
            prompt_length=size + num_set,
            prefix_ids=pack_ids([0] * size),
            block_index=1,
            block_ids=pack_ids([0] * num_set + [loop.config.mask_token_id] * (size - num_set)),
            block_mask=pack_bits([False] * num_set + [True] * (size - num_set)),
            algorithm=name,
            sampling=pb.SamplingParams(temperature=temperature, top_p=1.0),
            tokens_left=size - num_set,
        )
        for name, temperature in [(names[0], 1.0), *((name, 0.0) for name in names)]
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
        starts=[decode_start(start, loop.start_rules) for start in starts[: loop.config.num_slots]],
        continues=[],
    )
    run_fdfo(loop, request)
    loop.leases.forget(loop.sessions[SCHEDULER_ID], Refused("STALE_GENERATION", "the warm-up is over"))
    loop.pool.forget_all()
    loop.totals.Clear()
    loop.pool.num_calls = loop.prefill_row_forwards = 0

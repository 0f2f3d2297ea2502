"""`run_fdfo` and `run_sync`: the one loop with one round."""

from __future__ import annotations

from dataclasses import replace

from common.errors import ServiceError
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.denoise import DenoiseLoop
from worker_svc.rounds import RoundRequest


def run_fdfo(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """The loop with one FDFO round: returns as soon as a row is done."""
    return _run_alone(loop, replace(request, mode=pb.MODE_FDFO))


def run_sync(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """The loop with one SYNC round: returns when every row is done."""
    return _run_alone(loop, replace(request, mode=pb.MODE_SYNC))


def _run_alone(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """Tick until the round replies. Raises the ServiceError that refused it."""
    results: list[pb.RunRoundResponse | ServiceError] = []
    loop.submit(request, results.append)
    while not results:
        if not loop.tick() and not results:
            raise RuntimeError(f"round {request.round_id} waits for a predecessor that is not here")
    if isinstance(results[0], ServiceError):
        raise results[0]
    return results[0]

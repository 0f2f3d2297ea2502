"""Rounds sent straight to a worker, as a scheduler would: what one RunRound costs beyond the device's time."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from random import Random

import grpc
import grpc.aio

from common.packing import pack_bits, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc

PROMPT_BLOCKS = 2
NUM_WARM_ROUNDS = 20


@dataclass(frozen=True)
class RoundTrip:
    """One RunRound, in milliseconds.

    `queued_ms`, `begin_ms` and `reply_ms` are the worker's own parts (see RoundWork); `encode_ms` and `decode_ms` are
    those of the messages on the client's side, measured apart; `rest_ms` is everything else: gRPC, sockets and
    the event loops of both sides.
    """

    total_ms: float
    device_ms: float
    queued_ms: float
    begin_ms: float
    reply_ms: float
    encode_ms: float
    decode_ms: float

    @property
    def overhead_ms(self) -> float:
        return self.total_ms - self.device_ms

    @property
    def rest_ms(self) -> float:
        parts = self.queued_ms + self.begin_ms + self.reply_ms + self.encode_ms + self.decode_ms
        return self.overhead_ms - parts


async def measure_rounds(target: str, num_rows: int, num_rounds: int, max_forwards: int = 1) -> list[RoundTrip]:
    """`num_rounds` rounds of `num_rows` rows that go on block after block, one round in flight."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info: pb.GetWorkerInfoResponse = await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        scheduler_id = f"bench-{time.monotonic_ns()}"
        names = [f"row-{number}" for number in range(num_rows)]
        random = Random(1)
        trips = []
        for round_id in range(1, num_rounds + NUM_WARM_ROUNDS + 1):
            request = pb.RunRoundRequest(
                scheduler_id=scheduler_id,
                generation=1,
                worker_epoch=info.worker_epoch,
                fingerprint=info.fingerprint,
                round_id=round_id,
                acked_round_id=round_id - 1,
                mode=pb.MODE_FDFO,
                max_forwards=max_forwards,
            )
            if round_id == 1:
                request.starts.extend(_start(name, info, random) for name in names)
            else:
                columns = pb.RowNames(request_ids=names, sample_indexes=[0] * num_rows, attempts=[1] * num_rows)
                request.continues.CopyFrom(columns)
            trips.append(await _round_trip(stub, request))
        # A higher generation frees the rows.
        await stub.Heartbeat(pb.HeartbeatRequest(scheduler_id=scheduler_id, generation=2))
        return trips[NUM_WARM_ROUNDS:]


async def _round_trip(stub: worker_pb2_grpc.WorkerServiceStub, request: pb.RunRoundRequest) -> RoundTrip:
    sent_at = time.perf_counter()
    reply: pb.RunRoundResponse = await stub.RunRound(request)
    replied_at = time.perf_counter()
    request.SerializeToString()
    encoded_at = time.perf_counter()
    data = reply.SerializeToString()
    decoding_at = time.perf_counter()
    pb.RunRoundResponse.FromString(data)
    decoded_at = time.perf_counter()
    sound = (pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_PREFILLING)
    bad = {pb.RowStatus.Name(status) for status in reply.rows.statuses if status not in sound}
    if bad:
        raise RuntimeError(f"rows became {', '.join(bad)}: {dict(reply.rows.errors)}")
    return RoundTrip(
        total_ms=(replied_at - sent_at) * 1000,
        device_ms=reply.work.device_ms,
        queued_ms=reply.work.queued_ms,
        begin_ms=reply.work.begin_ms,
        reply_ms=reply.work.reply_ms,
        encode_ms=(encoded_at - replied_at) * 1000,
        decode_ms=(decoded_at - decoding_at) * 1000,
    )


def _start(name: str, info: pb.GetWorkerInfoResponse, random: Random) -> pb.StartRow:
    """A prompt of whole blocks that generates up to the context limit."""
    size = info.block_size
    prompt = [random.randrange(info.vocab_size) for _ in range(PROMPT_BLOCKS * size)]
    return pb.StartRow(
        request_id=name,
        attempt=1,
        prompt_length=len(prompt),
        prefix_ids=pack_ids(prompt),
        block_index=PROMPT_BLOCKS,
        block_ids=pack_ids([info.mask_token_id] * size),
        block_mask=pack_bits([True] * size),
        algorithm="LowConfidence",
        sampling=pb.SamplingParams(top_p=1.0),
        tokens_left=info.context_length - len(prompt),
    )


def medians(trips: list[RoundTrip]) -> dict[str, float]:
    """p50 of each part, in milliseconds, in the order of the way."""
    names = (
        "total_ms",
        "device_ms",
        "overhead_ms",
        "encode_ms",
        "queued_ms",
        "begin_ms",
        "reply_ms",
        "decode_ms",
        "rest_ms",
    )
    return {name: statistics.median(getattr(trip, name) for trip in trips) for name in names}


if __name__ == "__main__":
    import sys

    for name, value in medians(asyncio.run(measure_rounds(sys.argv[1], int(sys.argv[2]), 200))).items():
        print(f"{name:14}{value:8.3f}")

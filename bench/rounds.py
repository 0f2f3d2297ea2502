"""Rounds sent straight to a worker, as a scheduler would: what one RunRound costs beyond the device's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import grpc
import grpc.aio

from common.packing import pack_bits, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo.worker.v1 import worker_pb2_grpc
from scheduler_svc.replies import RowReply, Snapshot, read_rows, read_snapshot

NUM_WARM_ROUNDS = 20


@dataclass(frozen=True)
class RoundTrip:
    """One RunRound, in milliseconds.

    `queued_ms`, `begin_ms` and `reply_ms` are the worker's own parts (see RoundWork). `encode_ms` and `decode_ms` are
    those of the messages at the client, measured apart. `build_ms` made the message and read the reply before it; it
    is not part of the round trip, but of `wall_ms`.
    """

    build_ms: float
    total_ms: float
    device_ms: float
    queued_ms: float
    begin_ms: float
    reply_ms: float
    encode_ms: float
    decode_ms: float
    num_new_blocks: int  # rows that started or began their next block
    num_done: int
    allocator_calls: int
    prefill_tokens: int

    @property
    def overhead_ms(self) -> float:
        return self.total_ms - self.device_ms

    @property
    def rest_ms(self) -> float:
        """gRPC, sockets, the threads of both sides, and how late the device's end was noticed."""
        parts = self.queued_ms + self.begin_ms + self.reply_ms + self.encode_ms + self.decode_ms
        return self.overhead_ms - parts

    @property
    def wall_ms(self) -> float:
        return self.total_ms + self.build_ms


@dataclass
class BenchRow:
    """A request after the other in one place: what a scheduler would hold of it."""

    number: int
    info: pb.GetWorkerInfoResponse
    random: Random
    prompt_blocks: int
    num_blocks: int  # of each request's output
    attempt: int = 0
    is_running: bool = False
    begins_block: bool = True
    prefix: bytearray = field(default_factory=bytearray)
    block: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        self._set_request()

    @property
    def name(self) -> str:
        return f"row-{self.number}"

    def start(self) -> pb.StartRow:
        """Begin, or begin again from the snapshot."""
        self.attempt += 1
        self.is_running = True
        size = self.info.block_size
        return pb.StartRow(
            request_id=self.name,
            attempt=self.attempt,
            prompt_length=self.prompt_blocks * size,
            prefix_ids=bytes(self.prefix),
            block_index=self.block.block_index,
            block_ids=self.block.ids,
            block_mask=self.block.mask,
            step_count=self.block.step_count,
            algorithm="LowConfidence",
            sampling=pb.SamplingParams(top_p=1.0),
            tokens_left=self.info.context_length - self.block.block_index * size,
        )

    def apply(self, reply: RowReply, rows: pb.RowReplies) -> None:
        if reply.status not in (pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_PREFILLING):
            raise RuntimeError(f"{self.name} became {pb.RowStatus.Name(reply.status)}: {reply.error}")
        self.begins_block = reply.done is not None
        if reply.done is not None:
            index = reply.done.block_index
            self.prefix += pack_ids(reply.done.ids)
            self._set_block(index + 1)
            if index + 1 == self.prompt_blocks + self.num_blocks:
                self._set_request()
        elif reply.snapshot is not None:
            self.block = read_snapshot(rows, reply.snapshot, self.info.block_size)

    def _set_request(self) -> None:
        ids = range(self.info.vocab_size // 4, self.info.vocab_size - self.info.vocab_size // 4)
        self.prefix = bytearray(pack_ids(self.random.choices(ids, k=self.prompt_blocks * self.info.block_size)))
        self.is_running = False
        self._set_block(self.prompt_blocks)

    def _set_block(self, index: int) -> None:
        size = self.info.block_size
        self.block = Snapshot(index, pack_ids([self.info.mask_token_id] * size), pack_bits([True] * size), 0, b"")


async def measure_rounds(
    target: str,
    num_rows: int,
    num_rounds: int,
    *,
    num_blocks: int,
    prompt_blocks: int = 1,
    restarts: bool = False,
    seed: int = 1,
) -> list[RoundTrip]:
    """`num_rounds` FDFO rounds of one forward, one in flight, over requests of `num_blocks` blocks, one after another.

    The prompts are random, and the same for the same seed.
    restarts: every row is started again in every round, from its snapshot, which frees its slot and pages first.
    """
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info: pb.GetWorkerInfoResponse = await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        scheduler_id = f"bench-{time.monotonic_ns()}"
        random = Random(seed)
        rows = [BenchRow(number, info, random, prompt_blocks, num_blocks) for number in range(num_rows)]
        trips: list[RoundTrip] = []
        for round_id in range(1, num_rounds + NUM_WARM_ROUNDS + 1):
            built_at = time.perf_counter()
            num_new_blocks = sum(row.begins_block for row in rows)
            going_on = [row for row in rows if row.is_running and not restarts]
            starting = [row for row in rows if not row.is_running or restarts]
            request = pb.RunRoundRequest(
                scheduler_id=scheduler_id,
                generation=1,
                worker_epoch=info.worker_epoch,
                fingerprint=info.fingerprint,
                round_id=round_id,
                acked_round_id=round_id - 1,
                mode=pb.MODE_FDFO,
                max_forwards=1,
                starts=[row.start() for row in starting],
                continues=pb.RowNames(
                    request_ids=[row.name for row in going_on],
                    sample_indexes=[0] * len(going_on),
                    attempts=[row.attempt for row in going_on],
                ),
            )
            sent_at = time.perf_counter()
            reply: pb.RunRoundResponse = await stub.RunRound(request)
            replied_at = time.perf_counter()
            replies = list(read_rows(reply.rows, info.block_size))
            for row, row_reply in zip(starting + going_on, replies, strict=True):
                row.apply(row_reply, reply.rows)
            applied_at = time.perf_counter()
            encode_ms, decode_ms = _message_ms(request, reply)
            trips.append(
                RoundTrip(
                    build_ms=(sent_at - built_at + applied_at - replied_at) * 1000,
                    total_ms=(replied_at - sent_at) * 1000,
                    device_ms=reply.work.device_ms,
                    queued_ms=reply.work.queued_ms,
                    begin_ms=reply.work.begin_ms,
                    reply_ms=reply.work.reply_ms,
                    encode_ms=encode_ms,
                    decode_ms=decode_ms,
                    num_new_blocks=num_new_blocks,
                    num_done=sum(row_reply.done is not None for row_reply in replies),
                    allocator_calls=reply.work.allocator_calls,
                    prefill_tokens=reply.work.prefill_tokens,
                )
            )
        # A higher generation frees the rows.
        await stub.Heartbeat(pb.HeartbeatRequest(scheduler_id=scheduler_id, generation=2))
        return trips[NUM_WARM_ROUNDS:]


def _message_ms(request: pb.RunRoundRequest, reply: pb.RunRoundResponse) -> tuple[float, float]:
    """What packing this request and unpacking this reply take."""
    started_at = time.perf_counter()
    request.SerializeToString()
    encoded_at = time.perf_counter()
    data = reply.SerializeToString()
    decoding_at = time.perf_counter()
    pb.RunRoundResponse.FromString(data)
    return (encoded_at - started_at) * 1000, (time.perf_counter() - decoding_at) * 1000


def medians(trips: Sequence[RoundTrip]) -> dict[str, float]:
    """p50 of the overhead and of its parts in the order of the way, in milliseconds."""
    names = ("overhead_ms", "encode_ms", "queued_ms", "begin_ms", "reply_ms", "decode_ms", "rest_ms")
    return {name: statistics.median(getattr(trip, name) for trip in trips) for name in names}

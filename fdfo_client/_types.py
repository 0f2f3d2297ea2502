"""What a call gives back: the events of a stream, a whole completion, and the state of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._errors import UnexpectedServer

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

_FINISH_REASONS: dict[pb.FinishReason, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True)
class Usage:
    """What a sample cost. Tokens are counted as published; forwards are denoise forwards, prefill and waiting not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    forwards: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Started:
    """The first event: the request is queued. `queue_position` counts the requests before it; 0 is next."""

    request_id: str
    seed: int
    queue_position: int
    prompt_tokens: int


@dataclass(frozen=True)
class Committed:
    """Final text and ids of newly done blocks. They differ in length, never in content, over the whole stream.

    `forwards` counts the forwards this sample has had so far. `logprobs` and `first_unmask_steps` have an entry for
    each of `token_ids`; None when not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    logprobs: tuple[float, ...] | None = None
    first_unmask_steps: tuple[int, ...] | None = None
    sample_index: int = 0


@dataclass(frozen=True)
class Piece:
    """A run of positions of an incomplete block: their `text`, or as many masks (then the text is empty)."""

    text: str
    num_masks: int


@dataclass(frozen=True)
class Provisional:
    """An incomplete block as it stands: what may follow the text committed so far. It may still change.

    It holds until the sample's next event, and is part of no answer and no usage. `token_ids` and `masked` are aligned;
    `pieces` show the same positions, after text that is committed and held back. `forwards` as in `Committed`.
    """

    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    masked: tuple[bool, ...]
    block_index: int
    forwards: int
    sample_index: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of a sample. With reason "stop", `stop_token_id` or `stop_string` says what matched. `resumes`:
    how often the request went on at a scheduler after another one was lost."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_string: str | None = None
    sample_index: int = 0
    resumes: int = 0


Event: TypeAlias = Started | Committed | Provisional | Finished


@dataclass(frozen=True)
class Completion:
    """A whole answer. `seed` repeats it: send it with the same prompt and parameters.

    `logprobs` and `first_unmask_steps` have an entry for each of `token_ids`; None when not asked for.
    Of a request for several samples it is the first; `others` are those after it. `resumes`: see `Finished`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    seed: int
    stop_token_id: int | None = None
    stop_string: str | None = None
    logprobs: tuple[float, ...] | None = None
    first_unmask_steps: tuple[int, ...] | None = None
    sample_index: int = 0
    resumes: int = 0
    others: tuple[Completion, ...] = ()

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All samples in order, this one first."""
        return (self, *self.others)


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as its scheduler sees it. The scheduler has `rows` of `max_rows`; pages, of `page_size` tokens, are
    those of the worker's KV pool. `version`, `device`, `dtype` are as it said when the scheduler last connected."""

    target: str
    worker_epoch: str
    ready: bool
    rows: int
    max_rows: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_total: int
    page_size: int
    last_error: str
    version: str
    device: str
    dtype: str


@dataclass(frozen=True)
class ServerCounters:
    """Totals since the scheduler started.

    A denoise row-forward is one row in one forward; a waiting one is a done row that kept its place in a sync round.
    Times are sums: of the device in forwards and steps, of rounds from sending to reply, and of the scheduler itself.
    """

    requests_finished: int
    requests_aborted: int
    rounds: int
    forwards: int
    denoise_row_forwards: int
    waiting_row_forwards: int
    prefill_tokens: int
    published_tokens: int
    blocks_done: int
    restarts: int
    preemptions: int
    allocator_calls: int
    requests_rejected: int
    requests_expired: int
    times_parked: int
    device_ms: float
    round_trip_ms: float
    host_ms: float


@dataclass(frozen=True)
class ServerInfo:
    """What a scheduler serves, and how busy it is. Ids below `num_tokens` have a token.

    `uptime_s`: seconds since it started. `unix_time_s`: its clock, in seconds since 1970.
    """

    scheduler_id: str
    version: str
    served_model_name: str
    fingerprint: str
    block_size: int
    num_tokens: int
    context_length: int
    algorithm: str
    fdfo: bool
    rounds_in_flight: int
    queued: int
    running: int
    max_queued_requests: int
    uptime_s: float
    unix_time_s: float
    workers: tuple[WorkerInfo, ...]
    counters: ServerCounters


def event_from_proto(response: pb.GenerateResponse, request: pb.GenerateRequest) -> Event | None:
    """The typed event of an answer to `request`; None for a kind this version does not know (it was not asked for, so
    it may be skipped)."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(started.request_id, started.seed, started.queue_position, started.prompt_tokens)
        case "committed":
            return _committed_from_proto(response.committed, request)
        case "provisional":
            return _provisional_from_proto(response.provisional)
        case "finished":
            return _finished_from_proto(response.finished)
        case _:
            return None


def _committed_from_proto(committed: pb.Committed, request: pb.GenerateRequest) -> Committed:
    logprobs = tuple(committed.logprobs) if request.logprobs else None
    first_unmask_steps = tuple(committed.first_unmask_steps) if request.first_unmask_steps else None
    for name, values in (("logprobs", logprobs), ("first_unmask_steps", first_unmask_steps)):
        if values is not None and len(values) != len(committed.token_ids):
            raise UnexpectedServer(f"the scheduler gave {len(values)} {name} for {len(committed.token_ids)} tokens")
    token_ids = tuple(committed.token_ids)
    return Committed(
        committed.text, token_ids, committed.forwards, logprobs, first_unmask_steps, sample_index=committed.sample_index
    )


def _provisional_from_proto(provisional: pb.Provisional) -> Provisional:
    return Provisional(
        tuple(Piece(piece.text, piece.num_masks) for piece in provisional.pieces),
        tuple(provisional.token_ids),
        tuple(provisional.masked),
        provisional.block_index,
        provisional.forwards,
        provisional.sample_index,
    )


def _finished_from_proto(finished: pb.Finished) -> Finished:
    if finished.reason not in _FINISH_REASONS:
        raise UnexpectedServer(f"the scheduler gave a finish reason ({finished.reason}) that this client does not know")
    matched = finished.WhichOneof("match")
    return Finished(
        _FINISH_REASONS[finished.reason],
        usage_from_proto(finished.usage),
        stop_token_id=finished.stop_token_id if matched == "stop_token_id" else None,
        stop_string=finished.stop_string if matched == "stop_string" else None,
        sample_index=finished.sample_index,
    )


def usage_from_proto(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.forwards, usage.rounds)


def server_info_from_proto(info: pb.GetServerInfoResponse) -> ServerInfo:
    counters = info.counters
    return ServerInfo(
        scheduler_id=info.scheduler_id,
        version=info.version,
        served_model_name=info.served_model_name,
        fingerprint=info.fingerprint,
        block_size=info.block_size,
        num_tokens=info.num_tokens,
        context_length=info.context_length,
        algorithm=info.algorithm,
        fdfo=info.fdfo,
        rounds_in_flight=info.rounds_in_flight,
        queued=info.queued,
        running=info.running,
        max_queued_requests=info.max_queued_requests,
        uptime_s=info.uptime_s,
        unix_time_s=info.unix_time_s,
        workers=tuple(
            WorkerInfo(
                target=worker.target,
                worker_epoch=worker.worker_epoch,
                ready=worker.ready,
                rows=worker.rows,
                max_rows=worker.max_rows,
                pages_free=worker.pages_free,
                pages_cached=worker.pages_cached,
                pages_held=worker.pages_held,
                pages_total=worker.pages_total,
                page_size=worker.page_size,
                last_error=worker.last_error,
                version=worker.version,
                device=worker.device,
                dtype=worker.dtype,
            )
            for worker in info.workers
        ),
        counters=ServerCounters(
            requests_finished=counters.requests_finished,
            requests_aborted=counters.requests_aborted,
            rounds=counters.rounds,
            forwards=counters.forwards,
            denoise_row_forwards=counters.denoise_row_forwards,
            waiting_row_forwards=counters.waiting_row_forwards,
            prefill_tokens=counters.prefill_tokens,
            published_tokens=counters.published_tokens,
            blocks_done=counters.blocks_done,
            restarts=counters.restarts,
            preemptions=counters.preemptions,
            allocator_calls=counters.allocator_calls,
            requests_rejected=counters.requests_rejected,
            requests_expired=counters.requests_expired,
            times_parked=counters.times_parked,
            device_ms=counters.device_ms,
            round_trip_ms=counters.round_trip_ms,
            host_ms=counters.host_ms,
        ),
    )

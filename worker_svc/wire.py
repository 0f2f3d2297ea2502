"""RunRound messages in, checked: everything that speaks of the whole round. Start rows are checked in starts.py.

This runs beside the device thread, so that no boundary waits for it.
"""

from __future__ import annotations

from common.errors import InvalidField
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.rounds import RoundRequest
from worker_svc.rows import RowKey, RowName
from worker_svc.starts import StartRules, decode_starts

MAX_ROWS_PER_ROUND = 4096
MAX_ID_CHARACTERS = 256
MAX_TRACED_ROWS = 16
DEFAULT_ROUND_MS = 1000


def decode_names(names: pb.RowNames, field: str) -> list[RowName]:
    """Rows named by columns; InvalidField if the columns differ in length or a name stands twice."""
    columns = (names.request_ids, names.sample_indexes, names.attempts)
    if not len(columns[0]) == len(columns[1]) == len(columns[2]):
        raise InvalidField(field, "request_ids, sample_indexes and attempts must have one entry a row each")
    if len(names.request_ids) > MAX_ROWS_PER_ROUND:
        raise InvalidField(field, f"at most {MAX_ROWS_PER_ROUND} rows a round")
    if any(len(request_id) > MAX_ID_CHARACTERS for request_id in names.request_ids):
        raise InvalidField(field, f"a request id has more than {MAX_ID_CHARACTERS} characters")
    keys = list(map(RowKey, names.request_ids, names.sample_indexes))
    if len(set(keys)) != len(keys):
        raise InvalidField(field, "a row is named twice")
    return list(map(RowName, keys, names.attempts))


def check_scheduler_id(scheduler_id: str) -> None:
    if not 0 < len(scheduler_id) <= MAX_ID_CHARACTERS:
        raise InvalidField("scheduler_id", f"1 to {MAX_ID_CHARACTERS} characters")


def decode_round(request: pb.RunRoundRequest, rules: StartRules) -> RoundRequest:
    """The round of a RunRoundRequest; InvalidField names what is wrong."""
    check_scheduler_id(request.scheduler_id)
    if request.mode not in (pb.MODE_FDFO, pb.MODE_SYNC):
        raise InvalidField("mode", "MODE_FDFO or MODE_SYNC")
    if request.round_id < 1:
        raise InvalidField("round_id", "counts from 1")
    if request.acked_round_id >= request.round_id:
        raise InvalidField("acked_round_id", "must be below round_id")
    if len(request.starts) > MAX_ROWS_PER_ROUND:
        raise InvalidField("starts", f"at most {MAX_ROWS_PER_ROUND} rows a round")
    starts = list(request.starts)
    for index, start in enumerate(starts):
        if not 0 < len(start.request_id) <= MAX_ID_CHARACTERS:
            raise InvalidField(f"starts[{index}].request_id", f"1 to {MAX_ID_CHARACTERS} characters")
    continues = decode_names(request.continues, "continues")
    keys = [RowKey(start.request_id, start.sample_index) for start in starts] + [name.key for name in continues]
    if len(set(keys)) != len(keys):
        raise InvalidField("starts", "a row is named twice in starts and continues")
    return RoundRequest(
        scheduler_id=request.scheduler_id,
        generation=request.generation,
        worker_epoch=request.worker_epoch,
        fingerprint=request.fingerprint,
        round_id=request.round_id,
        acked_round_id=request.acked_round_id,
        mode=request.mode,
        max_forwards=request.max_forwards,
        max_round_ms=request.max_round_ms or DEFAULT_ROUND_MS,
        releases=decode_names(request.releases, "releases"),
        starts=decode_starts(starts, rules),
        continues=continues,
        want_forward_times=request.want_forward_times,
        traceparents=list(request.traceparents[:MAX_TRACED_ROWS]),
    )

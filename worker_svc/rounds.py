"""Rounds of one scheduler: their order, repeats and acknowledgements. Host bookkeeping, no torch, no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import Refused, ServiceError
from fdfo.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from worker_svc.rows import Row, RowKey, RowName, Start
    from worker_svc.starts import BadStart

MAX_ROUNDS_KEPT = 32  # waiting, and replied but not acknowledged; a scheduler keeps k + 1 of each, k at most 16

Deliver = Callable[[pb.RunRoundResponse | ServiceError], None]


@dataclass
class RoundRequest:
    """A RunRoundRequest, checked and decoded (wire.py)."""

    scheduler_id: str
    generation: int
    worker_epoch: str
    fingerprint: str
    round_id: int
    acked_round_id: int
    mode: pb.Mode
    max_forwards: int  # 0 = no limit
    max_round_ms: int
    releases: list[RowName]
    starts: list[Start | BadStart]
    continues: list[RowName]
    want_forward_times: bool = False
    arrived_at: float = 0.0  # seconds of the worker's clock; 0 = when the loop takes it
    traceparents: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class RoundRow:
    """One line of a round. Its row is None once it has no place here: missing, freed, ended before, or in error."""

    row: Row | None
    status: pb.RowStatus = pb.ROW_STATUS_RUNNING
    error: str = ""
    cached_tokens: int = 0  # of a start's prefix, what the prefix cache gave
    joined_after: int = 0  # forwards of the round before the row's first denoise forward
    forwards: int | None = None  # its denoise forwards in this round, once its block is done
    ends: bool = False  # the done block ends the request
    committed_block: int | None = None  # done by a fused commit; the row's own block is the next one
    end_reason: pb.EndReason = pb.END_REASON_UNSPECIFIED
    end_position: int = 0


@dataclass(eq=False)
class Round:
    """A round from its arrival to its reply."""

    request: RoundRequest
    deliver: list[Deliver]
    rows: list[RoundRow] = field(default_factory=list)
    work: pb.RoundWork = field(default_factory=pb.RoundWork)
    begun_at: float = 0.0
    first_forward_at: float | None = None
    eventful: bool = False  # a row is done, ended or in error: FDFO replies
    cancelled: bool = False

    def count_forward(self, launched_at: float, ended_at: float, device_ms: float) -> None:
        """A forward of the round has ended; times are seconds of the worker's clock."""
        if self.first_forward_at is None:
            self.first_forward_at = launched_at
            self.work.begin_ms = max(launched_at - self.begun_at, 0.0) * 1000
        self.work.forwards += 1
        self.work.device_ms += device_ms
        if self.request.want_forward_times:
            self.work.forward_begins_us.append(round(ended_at * 1e6 - device_ms * 1e3))
            self.work.forward_ends_us.append(round(ended_at * 1e6))


@dataclass(frozen=True)
class Ended:
    """What is kept of a row that ended, until the scheduler is known to have seen it."""

    attempt: int
    reason: pb.EndReason
    position: int
    round_id: int


class Session:
    """All that the worker holds for one scheduler id, in one generation."""

    def __init__(self, scheduler_id: str, generation: int) -> None:
        self.scheduler_id = scheduler_id
        self.generation = generation
        self.last_seen = 0.0
        self.rows: dict[RowKey, Row] = {}
        self.ended: dict[RowKey, Ended] = {}
        self.active: Round | None = None
        self._waiting: dict[int, Round] = {}
        self._replies: dict[int, pb.RunRoundResponse] = {}
        self._next_round_id = 1

    @property
    def is_in_use(self) -> bool:
        """Whether a call of the scheduler is being served: its lease does not run out meanwhile."""
        return self.active is not None or bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Rounds behind the active one."""
        return len(self._waiting)

    @property
    def following(self) -> Round | None:
        """The round after the active one, if it is here."""
        return self._waiting.get(self._next_round_id)

    @property
    def changes_wait(self) -> bool:
        """Whether a round that starts or releases rows is here, and so are all between it and the active one."""
        round_id = self._next_round_id
        while (following := self._waiting.get(round_id)) is not None:
            if following.request.starts or following.request.releases:
                return True
            round_id += 1
        return False

    def offer(self, request: RoundRequest, deliver: Deliver, refuse_new: ServiceError | None) -> None:
        """Take a round, or answer a repeated one. `refuse_new` answers rounds not seen before (drain)."""
        self._replies = {key: reply for key, reply in self._replies.items() if key > request.acked_round_id}
        round_id = request.round_id
        if round_id in self._replies:
            deliver(self._replies[round_id])
        elif self.active is not None and self.active.request.round_id == round_id:
            self.active.deliver.append(deliver)
            self.active.cancelled = False
        elif round_id in self._waiting:
            self._waiting[round_id].deliver.append(deliver)
        elif refuse_new is not None:
            deliver(refuse_new)
        elif not self._next_round_id <= round_id < self._next_round_id + MAX_ROUNDS_KEPT:
            deliver(Refused("ROUND_GAP", f"round_id: {round_id}, the next one here is {self._next_round_id}"))
        else:
            self._waiting[round_id] = Round(request, [deliver])

    def withdraw(self, round_id: int, deliver: Deliver) -> None:
        """The call behind `deliver` was cancelled. Without another call a waiting round goes, a running one ends."""
        for this in (self._waiting.get(round_id), self.active):
            if this is not None and deliver in this.deliver:
                this.deliver.remove(deliver)
                if not this.deliver:
                    this.cancelled = True
                    self._waiting.pop(round_id, None)

    def begin_next(self) -> Round | None:
        """The next round in order becomes the active one; None if it is not here."""
        self.active = self._waiting.pop(self._next_round_id, None)
        if self.active is not None:
            self._next_round_id += 1
            acked = self.active.request.acked_round_id
            self.ended = {key: end for key, end in self.ended.items() if end.round_id > acked}
        return self.active

    def remember_end(self, name: RowName, entry: RoundRow) -> None:
        """A row ended in the active round: a later `continue` of it is answered until the scheduler knows."""
        assert self.active is not None
        round_id = self.active.request.round_id
        self.ended[name.key] = Ended(name.attempt, entry.end_reason, entry.end_position, round_id)

    def finish(self, round_: Round, reply: pb.RunRoundResponse) -> None:
        """A round that is over replies; the reply is kept for repeats until it is acknowledged."""
        self._replies[reply.round_id] = reply
        for old in sorted(self._replies)[:-MAX_ROUNDS_KEPT]:
            del self._replies[old]
        for deliver in round_.deliver:
            deliver(reply)

    def refuse_waiting(self, error: ServiceError) -> None:
        for round_ in self._waiting.values():
            for deliver in round_.deliver:
                deliver(error)
        self._waiting.clear()

    def refuse_all(self, error: ServiceError) -> None:
        if self.active is not None:
            for deliver in self.active.deliver:
                deliver(error)
            self.active = None
        self.refuse_waiting(error)

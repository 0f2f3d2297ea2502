"""Which schedulers may speak, in which generation, and for how long they are remembered."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import Refused, ServiceError, Unavailable
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.rounds import Session

SILENT_S = 5.0  # longer than a scheduler repeats a call whose answer was lost
MAX_SCHEDULERS = 1024  # with a lease at one time
MAX_PAST_SCHEDULERS = 1024  # whose last generation is remembered after their lease


class Leases:
    """The sessions of live schedulers by id. `free_rows` gives up what a forgotten one held."""

    def __init__(
        self,
        lease_s: float,
        clock: Callable[[], float],
        totals: pb.WorkerCounters,
        free_rows: Callable[[Session], None],
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self._lease_s = lease_s
        self._clock = clock
        self._totals = totals
        self._free_rows = free_rows
        self._past_generations: dict[str, int] = {}

    def touch(self, scheduler_id: str, generation: int) -> Session:
        """Renew a scheduler's lease; a higher generation drops its older state. Raises Refused for a lower one, and
        Unavailable for one scheduler too many."""
        session = self.sessions.get(scheduler_id)
        over = session.generation - 1 if session is not None else self._past_generations.get(scheduler_id, -1)
        if generation <= over:
            self._totals.refused_generations += 1
            raise _stale(generation)
        if session is not None and generation > session.generation:
            self.forget(session, _stale(session.generation))
            session = None
        if session is None:
            if len(self.sessions) >= MAX_SCHEDULERS:
                raise Unavailable(f"{MAX_SCHEDULERS} schedulers have a lease here; no more are served")
            session = self.sessions[scheduler_id] = Session(scheduler_id, generation)
        session.last_seen = self._clock()
        return session

    def renew(self, scheduler_id: str) -> None:
        """Renew the lease of a scheduler that is known here, whatever its generation."""
        if scheduler_id in self.sessions:
            self.sessions[scheduler_id].last_seen = self._clock()

    def forget(self, session: Session, error: ServiceError) -> None:
        """Forget a scheduler: its rounds are refused, its rows freed."""
        session.refuse_all(error)
        self._free_rows(session)
        del self.sessions[session.scheduler_id]

    def silent(self) -> list[Session]:
        """Schedulers that may be gone: no call of theirs is served, and none came for SILENT_S."""
        since = self._clock() - SILENT_S
        return [session for session in self.sessions.values() if session.last_seen < since and not session.is_in_use]

    def expire(self) -> None:
        """Forget who was silent for too long."""
        now = self._clock()
        for session in list(self.sessions.values()):
            if session.is_in_use:
                session.last_seen = now
            elif now - session.last_seen > self._lease_s:
                self._totals.expired_leases += 1
                self.forget(session, _stale(session.generation))
                self._past_generations[session.scheduler_id] = session.generation
                while len(self._past_generations) > MAX_PAST_SCHEDULERS:
                    del self._past_generations[next(iter(self._past_generations))]


def _stale(generation: int) -> Refused:
    return Refused("STALE_GENERATION", f"generation: a later one is known here, or {generation} is over")

"""Clocks of several processes on one time axis.

On one machine all processes read the same monotonic clock. Of two machines it is only known that a cause comes before
its effect: a round is sent before its first forward begins, and its reply comes after its last forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client.trace.record import Recording

TOLERANCE_S = 0.001  # what the ends of a measured time may be off


class Span(NamedTuple):
    """From `begin_s` to `end_s`."""

    begin_s: float
    end_s: float


class Offset(NamedTuple):
    """To be added to the times of another clock, to within `error_s` either way."""

    seconds: float
    error_s: float


def offset_between(at_least: Sequence[float], at_most: Sequence[float]) -> Offset:
    """The offset that lies between all bounds, in seconds: none at all where the clocks may be one, else the middle.

    An event at a on our clock that came before one at b on the other says "at least a - b"; one that came after, "at
    most". Without bounds on both sides the clocks are taken for one.
    """
    if not at_least or not at_most:
        return Offset(0.0, 0.0)
    low, high = max(at_least), min(at_most)
    if low - TOLERANCE_S <= 0.0 <= high + TOLERANCE_S:
        return Offset(0.0, 0.0)
    return Offset((low + high) / 2, abs(high - low) / 2)


class Clocks:
    """Times of client, scheduler and workers, as seconds from the first sending. `note`: how far to trust that."""

    def __init__(
        self,
        recording: Recording,
        rounds: Sequence[pb.WatchRoundsResponse],
        workers: Sequence[str],
    ) -> None:
        self.zero_s = min((request.sent_s for request in recording.requests), default=0.0)
        sent = {request.request_id: request for request in recording.requests}
        named = [(round_, sent[row.request_id]) for round_ in rounds for row in round_.rows if row.request_id in sent]
        first_done: dict[str, pb.WatchRoundsResponse] = {}
        for round_ in rounds:
            for row in round_.rows:
                if row.accept_length:
                    first_done.setdefault(row.request_id, round_)
        scheduler = offset_between(
            [request.sent_s - round_.sent_at_us / 1e6 for round_, request in named],
            [
                request.ended_s - first_done[name].replied_at_us / 1e6
                for name, request in sent.items()
                if name in first_done and request.ended_s is not None
            ],
        )
        self._scheduler_s = scheduler.seconds - self.zero_s
        errors_s = [scheduler.error_s]
        self._worker_s: dict[str, float] = {}
        for worker in workers:
            timed = [round_ for round_ in rounds if round_.worker == worker and round_.forward_begins_us]
            offset = offset_between(
                [(round_.sent_at_us - round_.forward_begins_us[0]) / 1e6 for round_ in timed],
                [(round_.replied_at_us - round_.forward_ends_us[-1]) / 1e6 for round_ in timed],
            )
            self._worker_s[worker] = self._scheduler_s + offset.seconds
            errors_s.append(offset.error_s)
        self.note = ""
        if max(errors_s) > 0:
            self.note = (
                "Client, scheduler and workers have different clocks. They are put on one axis so that causes come "
                f"before their effects; times of different processes may be off by {1000 * sum(errors_s):.1f} ms."
            )

    def scheduler(self, at_us: int) -> float:
        return at_us / 1e6 + self._scheduler_s

    def client(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self.zero_s

    def forwards(self, round_: pb.WatchRoundsResponse) -> list[Span]:
        by_s = self._worker_s[round_.worker]
        pairs = zip(round_.forward_begins_us, round_.forward_ends_us, strict=True)
        return [Span(begin / 1e6 + by_s, end / 1e6 + by_s) for begin, end in pairs]

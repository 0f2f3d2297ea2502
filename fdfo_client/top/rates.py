"""From samples to what is shown: rates of each scheduler, its workers, and all together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fdfo_client._types import ServerInfo, WorkerInfo
from fdfo_client.top.sampling import Sample


@dataclass(frozen=True)
class Rates:
    """What a scheduler's counters grew by, a second; None where there was nothing to divide by, or no one number."""

    tokens_per_s: float
    blocks_per_s: float
    requests_per_s: float
    forwards_per_s: float | None
    rows_per_forward: float | None


@dataclass(frozen=True)
class SchedulerState:
    """A scheduler now. `gone_s`: since it last answered, or was first asked in vain; 0 = it answers.

    `rates` are since the sample before; None without one of the same life of the scheduler.
    """

    sample: Sample
    gone_s: float
    rates: Rates | None


@dataclass(frozen=True)
class Totals:
    """All schedulers that answer, together. Preemptions and restarts are since the start of each."""

    queued: int
    running: int
    preemptions: int
    restarts: int
    rates: Rates | None


@dataclass(frozen=True)
class State:
    """All that one refresh shows. A worker that several schedulers use is there once."""

    schedulers: tuple[SchedulerState, ...]
    workers: tuple[WorkerInfo, ...]
    totals: Totals

    def to_json(self, unix_time_s: float) -> dict[str, Any]:
        """As one line for machines has it."""
        schedulers = [
            {
                "target": state.sample.target,
                "error": state.sample.error or None,
                "gone_s": state.gone_s,
                "rates": None if state.rates is None else dataclasses.asdict(state.rates),
                "info": None if state.sample.info is None else dataclasses.asdict(state.sample.info),
            }
            for state in self.schedulers
        ]
        workers = [dataclasses.asdict(worker) for worker in self.workers]
        totals = dataclasses.asdict(self.totals)
        return {"unix_time_s": unix_time_s, "schedulers": schedulers, "workers": workers, "totals": totals}


class History:
    """Remembers of each scheduler what the next state is compared with."""

    def __init__(self) -> None:
        self._last: dict[str, Sample] = {}  # answers
        self._asked_since_s: dict[str, float] = {}  # of those that have not answered since

    def state(self, samples: Sequence[Sample]) -> State:
        """The state after these samples, one of each scheduler."""
        schedulers = tuple(self._scheduler_state(sample) for sample in samples)
        infos = [sample.info for sample in samples if sample.info is not None]
        return State(schedulers, _workers(infos), _totals(schedulers, infos))

    def _scheduler_state(self, sample: Sample) -> SchedulerState:
        if sample.info is None:
            since_s = self._asked_since_s.setdefault(sample.target, sample.at_s)
            return SchedulerState(sample, sample.at_s - since_s, None)
        before = self._last.get(sample.target)
        self._last[sample.target], self._asked_since_s[sample.target] = sample, sample.at_s
        return SchedulerState(sample, 0.0, _rates(before, sample, sample.info))


def _rates(before: Sample | None, now: Sample, info: ServerInfo) -> Rates | None:
    if before is None or before.info is None or before.info.scheduler_id != info.scheduler_id:
        return None
    seconds = now.at_s - before.at_s
    if seconds <= 0:
        return None
    old, new = before.info.counters, info.counters
    forwards = new.forwards - old.forwards
    rows = new.denoise_row_forwards + new.waiting_row_forwards - old.denoise_row_forwards - old.waiting_row_forwards
    return Rates(
        tokens_per_s=(new.published_tokens - old.published_tokens) / seconds,
        blocks_per_s=(new.blocks_done - old.blocks_done) / seconds,
        requests_per_s=(new.requests_finished - old.requests_finished) / seconds,
        forwards_per_s=forwards / seconds,
        rows_per_forward=rows / forwards if forwards else None,
    )


def _workers(infos: Sequence[ServerInfo]) -> tuple[WorkerInfo, ...]:
    """Each worker once, told by its epoch (one that never answered by its target), with the rows of all schedulers. Its
    pages are as the scheduler with the most rows there knows them: that one heard last."""
    known: dict[str, list[WorkerInfo]] = {}
    for info in infos:
        for worker in info.workers:
            known.setdefault(worker.worker_epoch or worker.target, []).append(worker)
    return tuple(
        dataclasses.replace(
            max(seen, key=lambda worker: (worker.ready, worker.rows)), rows=sum(worker.rows for worker in seen)
        )
        for seen in known.values()
    )


def _totals(schedulers: Sequence[SchedulerState], infos: Sequence[ServerInfo]) -> Totals:
    return Totals(
        queued=sum(info.queued for info in infos),
        running=sum(info.running for info in infos),
        preemptions=sum(info.counters.preemptions for info in infos),
        restarts=sum(info.counters.restarts for info in infos),
        rates=_total_rates([state.rates for state in schedulers if state.rates is not None], infos),
    )


def _total_rates(parts: Sequence[Rates], infos: Sequence[ServerInfo]) -> Rates | None:
    """Sums. A forward that rows of two schedulers share counts for both, so where they share a worker there is no sum
    of forwards."""
    if not parts:
        return None
    epochs = [worker.worker_epoch for info in infos for worker in info.workers if worker.ready]
    forwards = rows = None
    if len(set(epochs)) == len(epochs):
        forwards = sum(part.forwards_per_s or 0.0 for part in parts)
        rows = sum((part.forwards_per_s or 0.0) * (part.rows_per_forward or 0.0) for part in parts)
    return Rates(
        tokens_per_s=sum(part.tokens_per_s for part in parts),
        blocks_per_s=sum(part.blocks_per_s for part in parts),
        requests_per_s=sum(part.requests_per_s for part in parts),
        forwards_per_s=forwards,
        rows_per_forward=rows / forwards if rows is not None and forwards else None,
    )

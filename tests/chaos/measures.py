"""What a run measures: the processes from outside, and figures of the records."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.load import Record, Sender

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WARM_UP_PART = 0.25  # of a run's samples, before memory is compared


@dataclass(frozen=True)
class Sample:
    """A process at one moment."""

    at: float
    pid: int
    name: str
    memory_bytes: int
    num_descriptors: int
    num_threads: int


def sample(at: float, pid: int, name: str) -> Iterator[Sample]:
    """From /proc; nothing for a process that is gone."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, IndexError):
        memory = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
        yield Sample(at, pid, name, memory, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Of all processes that lived through the whole run, the one that grew most, after warm-up.

    Memory: the median of the last fifth of the samples against that of the fifth after warm-up, in percent.
    Descriptors and threads: the same in numbers.
    """
    by_process: dict[int, list[Sample]] = defaultdict(list)
    for each in samples:
        by_process[each.pid].append(each)
    first_at = min((each.at for each in samples), default=0.0)
    last_at = max((each.at for each in samples), default=0.0)
    figures: dict[str, list[float]] = defaultdict(list)
    for series in by_process.values():
        if len(series) < 10 or series[0].at > first_at + 1 or series[-1].at < last_at - 1:
            continue
        warm = series[int(WARM_UP_PART * len(series)) :]
        fifth = max(len(warm) // 5, 1)

        def first_and_last(name: str, warm: list[Sample] = warm, fifth: int = fifth) -> tuple[float, float]:
            values = [getattr(each, name) for each in warm]
            return statistics.median(values[:fifth]), statistics.median(values[-fifth:])

        first, last = first_and_last("memory_bytes")
        figures["memory growth %"].append(100 * (last / first - 1))
        for name in ("descriptors", "threads"):
            first, last = first_and_last(f"num_{name}")
            figures[f"{name} growth"].append(last - first)
    return {name: max(values) for name, values in figures.items()}


def tokens_per_s(records: Sequence[Record], first: float, last: float) -> float:
    """Tokens that came between two times, per second."""
    tokens = sum(count for record in records for at, count in record.commits if first <= at < last)
    return tokens / max(last - first, 1e-9)


def figures_of(sender: Sender, faults_at: Sequence[float], samples: Sequence[Sample]) -> dict[str, float]:
    """All figures of a run by their names.

    tokens/s: of the middle 80 % of the time. steadiness: the second half's tokens/s against the first's.
    longest wait s: from sending a request to its end. recovery s: from a fault until every request that was under way
    had its next event; the median and the longest of all faults. least share: of the schedulers with a load of their
    own, the smallest part of the tokens times their number.
    """
    records, start, wall = sender.records, sender.started_at, sender.wall_s
    middle = start + 0.1 * wall, start + 0.9 * wall
    half = start + 0.5 * wall
    figures = {
        "requests": float(len(records)),
        "failed": float(sender.num_failed),
        "wall s": wall,
        "tokens/s": tokens_per_s(records, *middle),
        "longest wait s": max((record.ended_at - record.sent_at for record in records), default=0.0),
    }
    if first_half := tokens_per_s(records, middle[0], half):
        figures["steadiness"] = tokens_per_s(records, half, middle[1]) / first_half
    if faults_at:
        recoveries = [recovery_s(records, at) for at in faults_at]
        figures["recovery s, median"] = statistics.median(recoveries)
        figures["recovery s, longest"] = max(recoveries)
    if sender.load.at_each_scheduler:
        shares: dict[str, float] = defaultdict(float)
        for record in records:
            shares[record.target] += sum(count for at, count in record.commits if middle[0] <= at < middle[1])
        figures["least share"] = min(shares.values()) * len(shares) / max(sum(shares.values()), 1e-9)
    return figures | growth(samples)


def recovery_s(records: Sequence[Record], fault_at: float) -> float:
    """Until each request that was under way at the fault had its next event, or failed."""
    longest = 0.0
    for record in records:
        if not record.sent_at < fault_at < record.ended_at:
            continue
        following = next((at for at in record.events_at if at > fault_at), record.ended_at)
        longest = max(longest, following - fault_at)
    return longest

"""What others may read of the loop while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.kv.pages import PageUsage


@dataclass(frozen=True)
class LoopState:
    """As of the last boundary. `schedulers`: with a lease. `rounds_waiting`: behind the ones that run.
    `prefill_row_forwards`: rows times forwards in which a chunk of their prefix was computed, in all."""

    pages: PageUsage
    slots_used: int
    counters: pb.WorkerCounters
    draining: bool
    schedulers: int
    rounds_waiting: int
    prefill_row_forwards: int


def page_usage_message(usage: PageUsage) -> pb.PageUsage:
    return pb.PageUsage(free=usage.free, cached=usage.cached, held=usage.held, total=usage.total)

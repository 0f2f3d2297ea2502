"""Figures from the records of a load and the servers' counters. Each field's annotation is its definition.

Blocks are counted by position: the output of a request follows its prompt on a grid of `block_size` positions, and a
Committed event brings the blocks whose first output token is among its tokens. (Tokens may be held back for a while, as
part of a character or of what may become a stop string, so an event can bring fewer tokens than a block, and none.)
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fdfo_client._types import ServerCounters
from fdfo_client.bench.load import Record


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of `count` samples; a percentile between two samples is interpolated linearly."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class ServerFigures:
    """What the servers' counters grew by during the load, and ratios of that. Other clients' requests count too.

    A forward that several schedulers share on one worker counts once for each of them.
    """

    rounds: Annotated[int, "rounds that replied"]
    forwards: Annotated[int, "forwards of the model in them"]
    blocks_done: Annotated[int, "blocks that were done"]
    denoise_row_forwards: Annotated[int, "rows that denoised, summed over forwards"]
    waiting_row_forwards: Annotated[
        int, "wasted: done rows that kept their place in a sync round, summed over forwards; 0 under FDFO"
    ]
    prefill_tokens: Annotated[int, "prompt tokens computed, in whole blocks"]
    published_tokens: Annotated[int, "tokens published"]
    restarts: Annotated[int, "requests started again after a worker was lost"]
    preemptions: Annotated[int, "requests that lost their place for want of KV space"]
    allocator_calls: Annotated[int, "calls to the allocator of KV pages"]
    forwards_per_block: Annotated[float | None, "denoise_row_forwards / blocks_done"]
    tokens_per_forward: Annotated[float | None, "published_tokens / forwards"]
    denoise_rows_per_forward: Annotated[float | None, "denoise_row_forwards / forwards"]
    waiting_rows_per_forward: Annotated[float | None, "waiting_row_forwards / forwards"]
    prefill_tokens_per_forward: Annotated[float | None, "prefill_tokens / forwards"]
    forwards_per_round: Annotated[float | None, "forwards / rounds"]
    device_ms_per_forward: Annotated[float | None, "time of the device in a forward and its step"]
    device_busy_share: Annotated[
        float | None, "time of the devices in forwards and steps / (wall_s x workers that were ready); 1 is always busy"
    ]
    host_ms_per_round: Annotated[
        float | None,
        "(round trip - device time) / rounds: transport, packing and what both services do beside the device, and with "
        "several rounds in flight also the wait for the round before",
    ]
    scheduler_host_ms_per_round: Annotated[
        float | None, "of that, the scheduler's own time in planning and applying rounds"
    ]


@dataclass(frozen=True)
class Summary:
    """The figures of a run. None: there was nothing to compute it from."""

    requests_ok: Annotated[int, "requests that finished by a stop or by their length"]
    requests_failed: Annotated[int, "requests that ended with an error, were refused or aborted"]
    requests_unfinished: Annotated[int, "requests under way when the run was cut short"]
    wall_s: Annotated[float, "from the load's start until the last request ended"]
    requests_per_s: Annotated[float | None, "requests_ok / wall_s"]
    prompt_tokens: Annotated[int, "prompt tokens of the requests that started"]
    output_tokens: Annotated[int, "output tokens received, those of failed and unfinished requests too"]
    output_tokens_per_s: Annotated[float | None, "output_tokens / wall_s"]
    ttft_ms: Annotated[
        Spread | None, "time to first tokens: from sending a request to its first output tokens; of requests_ok"
    ]
    time_per_block_ms: Annotated[
        Spread | None,
        "from one block of a request to its next: the time between two Committed events that bring blocks, divided by "
        "the blocks the later one brings; one sample for each of these; of requests_ok, their first event apart",
    ]
    end_to_end_ms: Annotated[Spread | None, "from sending a request to the end of its stream; of requests_ok"]
    send_lag_ms: Annotated[
        Spread | None, "open loop: how long after its time a request was sent; large when this client is too slow"
    ]
    server: Annotated[ServerFigures | None, "from the servers' counters"]
    errors: Annotated[dict[str, int], "how many requests failed with each error, most frequent first"]


@dataclass(frozen=True)
class BlockStep:
    """What one Committed event brought to its request.

    interval_s: time since the event before that brought blocks; None for the first. forwards: since then, of this
    request.
    """

    num_blocks: int
    interval_s: float | None
    forwards: int


def definitions(of: type[Summary] | type[ServerFigures]) -> dict[str, str]:
    """The definition of each field."""
    hints = typing.get_type_hints(of, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(of)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending samples, at least one; between two of them it is interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and percentiles; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99)


def ttft_ms(records: Iterable[Record]) -> Iterator[float]:
    """See `Summary.ttft_ms`; for each record with output tokens."""
    for record in records:
        first = next((commit for commit in record.commits if commit.num_tokens), None)
        if first is not None:
            yield (first.at_s - record.sent_at_s) * 1000


def end_to_end_ms(records: Iterable[Record]) -> Iterator[float]:
    """See `Summary.end_to_end_ms`; for each record that ended."""
    return ((record.ended_at_s - record.sent_at_s) * 1000 for record in records if record.ended_at_s is not None)


def time_per_block_ms(records: Iterable[Record], block_size: int) -> Iterator[float]:
    """See `Summary.time_per_block_ms`."""
    for record in records:
        for step in block_steps(record, block_size):
            if step.interval_s is not None:
                yield from [step.interval_s * 1000 / step.num_blocks] * step.num_blocks


def forwards_per_block(records: Iterable[Record], block_size: int) -> Iterator[float]:
    """Forwards of a request between two Committed events, divided by the blocks of the later one; once for each."""
    for record in records:
        for step in block_steps(record, block_size):
            yield from [step.forwards / step.num_blocks] * step.num_blocks


def block_steps(record: Record, block_size: int) -> Iterator[BlockStep]:
    """The events of a record that brought blocks, in order; see the top of this file for how these are counted."""
    first_block = record.prompt_tokens // block_size
    num_tokens = num_blocks = forwards = 0
    at_s: float | None = None
    for commit in record.commits:
        num_tokens += commit.num_tokens
        begun = (record.prompt_tokens + num_tokens - 1) // block_size - first_block + 1 if num_tokens else 0
        if begun > num_blocks:
            interval_s = None if at_s is None else commit.at_s - at_s
            yield BlockStep(begun - num_blocks, interval_s, commit.forwards - forwards)
            num_blocks, at_s, forwards = begun, commit.at_s, commit.forwards


def summarize(
    records: Sequence[Record],
    before: ServerCounters,
    after: ServerCounters | None,
    wall_s: float,
    num_workers: int,
    block_size: int,
) -> Summary:
    """All figures of a run that took `wall_s` seconds, the counters being those before and after it.

    Without those after it, or where one fell, as happens when a scheduler starts again, `server` is None.
    """
    ok = [record for record in records if record.is_ok]
    failed = [record for record in records if record.error is not None]
    output_tokens = sum(record.output_tokens for record in records)
    return Summary(
        requests_ok=len(ok),
        requests_failed=len(failed),
        requests_unfinished=len(records) - len(ok) - len(failed),
        wall_s=wall_s,
        requests_per_s=_ratio(len(ok), wall_s),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=output_tokens,
        output_tokens_per_s=_ratio(output_tokens, wall_s),
        ttft_ms=spread(ttft_ms(ok)),
        time_per_block_ms=spread(time_per_block_ms(ok, block_size)),
        end_to_end_ms=spread(end_to_end_ms(ok)),
        send_lag_ms=spread(
            (record.sent_at_s - record.due_at_s) * 1000 for record in records if record.due_at_s is not None
        ),
        server=server_figures(before, after, wall_s, num_workers),
        errors=dict(Counter(record.error for record in failed if record.error is not None).most_common()),
    )


def server_figures(
    before: ServerCounters, after: ServerCounters | None, wall_s: float, num_workers: int
) -> ServerFigures | None:
    """What the counters grew by in `wall_s` seconds; None without those after it, or where one fell."""
    if after is None:
        return None
    grown = ServerCounters(
        *(new - old for old, new in zip(dataclasses.astuple(before), dataclasses.astuple(after), strict=True))
    )
    if min(dataclasses.astuple(grown)) < 0:
        return None
    return ServerFigures(
        rounds=grown.rounds,
        forwards=grown.forwards,
        blocks_done=grown.blocks_done,
        denoise_row_forwards=grown.denoise_row_forwards,
        waiting_row_forwards=grown.waiting_row_forwards,
        prefill_tokens=grown.prefill_tokens,
        published_tokens=grown.published_tokens,
        restarts=grown.restarts,
        preemptions=grown.preemptions,
        allocator_calls=grown.allocator_calls,
        forwards_per_block=_ratio(grown.denoise_row_forwards, grown.blocks_done),
        tokens_per_forward=_ratio(grown.published_tokens, grown.forwards),
        denoise_rows_per_forward=_ratio(grown.denoise_row_forwards, grown.forwards),
        waiting_rows_per_forward=_ratio(grown.waiting_row_forwards, grown.forwards),
        prefill_tokens_per_forward=_ratio(grown.prefill_tokens, grown.forwards),
        forwards_per_round=_ratio(grown.forwards, grown.rounds),
        device_ms_per_forward=_ratio(grown.device_ms, grown.forwards),
        device_busy_share=_ratio(grown.device_ms, wall_s * 1000 * num_workers),
        host_ms_per_round=_ratio(grown.round_trip_ms - grown.device_ms, grown.rounds),
        scheduler_host_ms_per_round=_ratio(grown.host_ms, grown.rounds),
    )


def _ratio(value: float, by: float) -> float | None:
    return value / by if by > 0 else None

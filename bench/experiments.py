"""The measurements of `make bench`, each against running services and interleaved with what it is compared to.

A case is one line of the table: medians over the runs, the runs themselves, and a target where there is one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bench.ideal import fdfo_ms, sync_ms
from bench.loads import Run, random_prompts, run_closed
from bench.plain_loop import PlainResult, run_one_at_a_time, run_plain, run_without_kv
from bench.rounds import measure_rounds, medians
from bench.services import FUSED_COMMIT, PLAIN_COMMIT, SIMULATED, TINY, WITH_CACHE, Services
from bench.upstream import UpstreamLoop
from common.model_folder import read_model_folder
from fdfo_client.bench.metrics import ttft_ms
from fdfo_client.bench.virtual import replay_virtually
from fdfo_client.bench.workload import poisson_items
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text import TextCodec
from worker_svc.__main__ import load_loop
from worker_svc.denoise import DenoiseLoop
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import read_profile

BLOCK = 32
PROMPT_TOKENS = BLOCK
TINY_OUTPUT_TOKENS = 2 * BLOCK

Prompts = list[list[int]]
Figures = Mapping[str, float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    runs: int  # of each case
    requests: Mapping[int, int]  # by rows of the worker
    reloop_requests: int  # per row
    tiny_requests: int  # per row
    rounds: int


OUTPUT_TOKENS = 3 * BLOCK
QUICK = Scale(runs=5, requests={4: 12, 16: 48, 64: 128}, reloop_requests=1, tiny_requests=1, rounds=50)
FULL = Scale(runs=5, requests={4: 60, 16: 192, 64: 448}, reloop_requests=4, tiny_requests=4, rounds=300)


@dataclass(frozen=True)
class Target:
    """`figure` is to be at least, or at most, `bound`."""

    figure: str
    bound: float
    at_least: bool = True

    def is_met(self, figures: Figures) -> bool:
        value = figures[self.figure]
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Case:
    """One line of the table: the median of each figure, and its value in every run."""

    name: str
    medians: Figures
    runs: Mapping[str, Sequence[float]]
    targets: Sequence[Target] = field(default=())

    def missed(self) -> list[Target]:
        return [target for target in self.targets if not target.is_met(self.medians)]


def interleaved(scale: Scale, progress: Progress, cases: Mapping[str, Callable[[], Figures]]) -> dict[str, Case]:
    """Every case once, in order, then all again: what disturbs the machine disturbs all of them."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for number, (name, measure) in itertools.product(range(scale.runs), cases.items()):
        progress(f"{name}, run {number + 1} of {scale.runs}")
        for figure, value in measure().items():
            values[name].setdefault(figure, []).append(value)
    return {name: derived(name, runs) for name, runs in values.items()}


def ratios(over: Case, under: Case, figure: str) -> list[float]:
    """Run by run, so that both were measured side by side."""
    return [a / b for a, b in zip(over.runs[figure], under.runs[figure], strict=True)]


def derived(name: str, runs: Mapping[str, Sequence[float]], *targets: Target) -> Case:
    return Case(name, {figure: statistics.median(each) for figure, each in runs.items()}, runs, targets)


def _figures(run: Run) -> Figures:
    server = run.server
    return {
        "tokens/s": run.tokens_per_s,
        "device busy": server.device_busy_share or 0.0,
        "forwards/block": server.forwards_per_block or 0.0,
        "rounds/block": server.rounds / server.blocks_done,
        "host ms/round": server.host_ms_per_round or 0.0,
        "rows/forward": server.denoise_rows_per_forward or 0.0,
        "wasted rows/forward": server.waiting_rows_per_forward or 0.0,
    }


def modes(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """FDFO and SYNC on the simulated device, all places always taken, beside the ideal of the same draws."""
    profile = read_profile(read_model_folder(SIMULATED))
    for num_rows in (4, 16, 64):
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        draws: list[list[list[int]]] = []

        def measure(mode: str, target: str, prompts: Prompts, num_rows: int, draws: list[list[list[int]]]) -> Figures:
            run = run_closed(target, prompts, OUTPUT_TOKENS, 2 * num_rows, together=mode == "SYNC")
            draws.append(run.draws)
            return _figures(run)

        worker = services.workers(SIMULATED, num_rows)
        flags = {"FDFO": "--dllm-fdfo", "SYNC": "--no-dllm-fdfo"}
        with services.schedulers(SIMULATED, [(worker, [flag]) for flag in flags.values()]) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{mode}, {num_rows} rows": partial(measure, mode, target, prompts, num_rows, draws)
                    for mode, target in zip(flags, targets, strict=True)
                },
            )
        if any(each != draws[0] for each in draws):
            raise RuntimeError(f"{num_rows} rows: blocks took other forwards in one run than in another")
        ideal = sync_ms(draws[0], num_rows, PROMPT_TOKENS, profile) / fdfo_ms(
            draws[0], num_rows, PROMPT_TOKENS, profile
        )
        fdfo, sync = cases.values()
        yield from (fdfo, sync)
        measured = ratios(fdfo, sync, "tokens/s")
        yield derived(
            f"FDFO / SYNC, {num_rows} rows",
            {"ratio": measured, "ideal": [ideal], "of ideal": [ratio / ideal for ratio in measured]},
            Target("of ideal", 0.85),
        )


def re_loop(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Going on in the worker while no row is done, against a reply after every forward; one round in flight."""
    delays_ms, limits = (0.0, 0.5, 2.0), ("0", "1")
    for num_rows in (1, 4, 16):
        (worker,) = services.workers(SIMULATED, num_rows)
        prompts = random_prompts(num_rows * scale.reloop_requests, PROMPT_TOKENS)
        each = [
            ([services.delayed(worker, delay_ms)], ["--rounds-in-flight", "1", "--max-forwards", limit])
            for delay_ms, limit in itertools.product(delays_ms, limits)
        ]
        with services.schedulers(SIMULATED, each) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{num_rows} rows, {delay_ms:g} ms, max_forwards {limit}": partial(
                        _closed_figures, target, prompts, OUTPUT_TOKENS, num_rows
                    )
                    for (delay_ms, limit), target in zip(itertools.product(delays_ms, limits), targets, strict=True)
                },
            )
        pairs = list(cases.values())
        for delay_ms, with_loop, without in zip(delays_ms, pairs[::2], pairs[1::2], strict=True):
            bounds = [Target("rounds/block", 1.1, at_least=False)] if num_rows == 1 else []
            if (num_rows, delay_ms) == (1, 0.5):
                bounds.append(Target("ratio", 1.1))
            yield derived(
                f"{num_rows} row{'s' * (num_rows > 1)}, {delay_ms:g} ms one way",
                {
                    "rounds/block": with_loop.runs["rounds/block"],
                    "without": without.runs["rounds/block"],
                    "tokens/s": with_loop.runs["tokens/s"],
                    "tokens/s without": without.runs["tokens/s"],
                    "ratio": ratios(with_loop, without, "tokens/s"),
                },
                *bounds,
            )


def busy(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """How much of the time the device computes, with one round in flight and with two, behind a longer network."""
    for num_rows, least in ((16, 0.97), (64, 0.95)):
        (worker,) = services.workers(SIMULATED, num_rows, 1, FUSED_COMMIT)
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        each = list(itertools.product((0.0, 0.5, 2.0), ("1", "2")))
        flags = [([services.delayed(worker, delay_ms)], ["--rounds-in-flight", k]) for delay_ms, k in each]
        with services.schedulers(SIMULATED, flags) as targets:
            cases = interleaved(
                scale,
                progress,
                {
                    f"{num_rows} rows, k = {k}, {delay_ms:g} ms": partial(
                        _closed_figures, target, prompts, OUTPUT_TOKENS, 2 * num_rows
                    )
                    for (delay_ms, k), target in zip(each, targets, strict=True)
                },
            )
        for (_, k), case in zip(each, cases.values(), strict=True):
            runs = {name: case.runs[name] for name in ("device busy", "tokens/s", "rows/forward")}
            yield derived(case.name, runs, *([Target("device busy", least)] if k == "2" else []))


def fused_commit(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """A block's last forward that is also its next block's first, against one of its own."""
    for num_rows in (4, 16, 64):
        prompts = random_prompts(scale.requests[num_rows], PROMPT_TOKENS)
        each: list[tuple[list[str], list[str]]] = [
            (services.workers(SIMULATED, num_rows, 1, flags), []) for flags in (FUSED_COMMIT, PLAIN_COMMIT)
        ]
        with services.schedulers(SIMULATED, each) as targets:
            fused, apart = interleaved(
                scale,
                progress,
                {
                    f"{name}, {num_rows} rows": partial(_closed_figures, target, prompts, OUTPUT_TOKENS, 2 * num_rows)
                    for name, target in zip(("fused", "apart"), targets, strict=True)
                },
            ).values()
        saved = [a - b for a, b in zip(apart.runs["forwards/block"], fused.runs["forwards/block"], strict=True)]
        of_commits = [blocks / (blocks - 1) * value for blocks, value in ((OUTPUT_TOKENS // BLOCK, s) for s in saved)]
        yield derived(
            f"fused / apart, {num_rows} rows",
            {
                "forwards/block": fused.runs["forwards/block"],
                "apart": apart.runs["forwards/block"],
                "saved/committed block": of_commits,
                "tokens/s": fused.runs["tokens/s"],
                "ratio": ratios(fused, apart, "tokens/s"),
            },
            Target("saved/committed block", 0.9),
        )


def in_place(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Rows that keep slot and pages from round to round, against rows that are released and started again, with and
    without a prefix cache that has their KV."""
    num_rows = 16
    (worker,) = services.workers(SIMULATED, num_rows)
    (cached_worker,) = services.workers(SIMULATED, num_rows, 1, WITH_CACHE)

    def measure(worker: str, restarts: bool) -> Figures:
        trips = asyncio.run(measure_rounds(worker, num_rows, scale.rounds, num_blocks=4, restarts=restarts))
        continuing = [trip for trip in trips if trip.num_new_blocks == 0]
        return {
            "allocator calls/round": statistics.mean(trip.allocator_calls for trip in continuing),
            "host ms/round": statistics.median(trip.overhead_ms + trip.build_ms for trip in trips),
            "device ms/round": statistics.median(trip.device_ms for trip in trips),
            "tokens/s": BLOCK * sum(trip.num_done for trip in trips) / sum(trip.wall_ms for trip in trips) * 1000,
        }

    kept, restarted, restarted_with_cache = interleaved(
        scale,
        progress,
        {
            "in place, 16 rows": partial(measure, worker, False),
            "started again, 16 rows": partial(measure, worker, True),
            "started again with prefix cache": partial(measure, cached_worker, True),
        },
    ).values()
    yield derived(kept.name, kept.runs, Target("allocator calls/round", 0.0, at_least=False))
    yield from (restarted, restarted_with_cache)
    yield derived("in place / started again", {"ratio": ratios(kept, restarted, "tokens/s")})
    yield derived("in place / started again with cache", {"ratio": ratios(kept, restarted_with_cache, "tokens/s")})


def plain(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Both services with the small model on the CPU, against loops in one process without them."""
    _, loop = load_loop(WorkerSettings(model_path=TINY))
    codec = TextCodec(TINY)
    lines = (TINY / "problems.jsonl").read_text().splitlines()
    encoded = [codec.encode_chat([("user", json.loads(line)["prompt"])]) for line in lines]

    def limit(run: Callable[[Prompts], PlainResult], prompts: Prompts) -> Figures:
        result = run(prompts)
        return {
            "tokens/s": sum(map(len, result.token_ids)) / result.wall_s,
            "rows/forward": result.row_forwards / result.forwards,
            "device busy": result.device_ms / result.wall_s / 1000,
        }

    def run_limit(num_rows: int, prompts: Prompts) -> PlainResult:
        return run_plain(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS, num_rows=num_rows)

    for num_rows in (16, 64):
        prompts = list(itertools.islice(itertools.cycle(encoded), num_rows * scale.tiny_requests))
        worker = services.workers(TINY, num_rows)
        with services.schedulers(TINY, [(worker, [])]) as (target,):
            served, plain_loop = interleaved(
                scale,
                progress,
                {
                    f"services, {num_rows} rows": partial(
                        _closed_figures, target, prompts, TINY_OUTPUT_TOKENS, 2 * num_rows
                    ),
                    f"plain loop, {num_rows} rows": partial(limit, partial(run_limit, num_rows), prompts),
                },
            ).values()
        yield from (served, plain_loop)
        yield derived(f"services / plain loop, {num_rows} rows", {"ratio": ratios(served, plain_loop, "tokens/s")})
    few = encoded[:8]
    yield from interleaved(
        scale,
        progress,
        {
            name: partial(limit, partial(_alone, run, loop), few)
            for name, run in (("one at a time, with KV", run_one_at_a_time), ("one at a time, no KV", run_without_kv))
        },
    ).values()


def round_trip(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """What a RunRound of one forward over 64 rows takes beyond the device, and where that goes; p50 of each run."""
    (worker,) = services.workers(SIMULATED, 64)

    def measure() -> Figures:
        trips = asyncio.run(measure_rounds(worker, 64, scale.rounds, num_blocks=16))
        return {name.replace("_", " "): value for name, value in medians(trips).items()}

    (case,) = interleaved(scale, progress, {"RunRound, 64 rows": measure}).values()
    yield derived(case.name, case.runs, Target("overhead ms", 2.5, at_least=False))


def workers(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """One scheduler with 1, 2 and 4 simulated workers of 16 rows."""
    counts = (1, 2, 4)
    targets = services.workers(SIMULATED, 16, max(counts))
    with services.schedulers(SIMULATED, [(targets[:count], []) for count in counts]) as schedulers:
        cases = interleaved(
            scale,
            progress,
            {
                f"{count} x 16 rows": partial(
                    _closed_figures,
                    target,
                    random_prompts(count * scale.requests[16], PROMPT_TOKENS),
                    OUTPUT_TOKENS,
                    32 * count,
                )
                for count, target in zip(counts, schedulers, strict=True)
            },
        )
    one = next(iter(cases.values()))
    for count, case in zip(counts, cases.values(), strict=True):
        of_linear = [ratio / count for ratio in ratios(case, one, "tokens/s")]
        yield derived(case.name, {**case.runs, "of linear": of_linear})


# As measured there: 28 to 30 ms for a small forward, 86 ms for 72 rows.
H20 = {"floor_ms": 28.0, "denoise_row_ms": 0.8, "prefill_token_ms": 0.025}


def upstream(services: Services, scale: Scale, progress: Progress) -> Iterator[Case]:
    """Prompts beside denoising rows, against rounds that either prefill, a block of each prompt, or denoise. 128
    prompts of 1024 tokens at 8 requests/s, 128 tokens each, 64 rows; virtual time, so that all runs are the same."""
    shipped = read_model_folder(SIMULATED)
    options = [
        {"prompt_ids": prompt, "max_new_tokens": 4 * BLOCK, "ignore_eos": True} for prompt in random_prompts(128, 1024)
    ]
    items = list(poisson_items(options, 8.0, random.Random(8)))
    for device, costs in (("H200", {}), ("H20", H20)):
        simulation = {**shipped.config["simulation"], **costs}
        folder = replace(shipped, config={**shipped.config, "simulation": simulation})
        forwards: list[float] = []
        ttft: list[float] = []
        for name, make_loop, in_flight in (("ours", DenoiseLoop, 2), ("upstream's shape", UpstreamLoop, 1)):
            progress(f"{device}, {name}, in virtual time")
            measured = replay_virtually(
                items,
                folder,
                SchedulerSettings(model_path=SIMULATED, rounds_in_flight=in_flight, max_forwards=in_flight % 2),
                WorkerSettings(model_path=SIMULATED, fused_commit=False),
                make_loop=make_loop,
            )
            assert measured.after is not None
            forwards.append(measured.after.forwards - measured.before.forwards)
            ttft.append(statistics.median(ttft_ms(measured.records)))
            yield derived(f"{name}, {device}", {"forwards": forwards[-1:], "TTFT p50 ms": ttft[-1:]})
        yield derived(
            f"upstream's shape / ours, {device}",
            {"forwards ratio": [forwards[1] / forwards[0]], "TTFT ratio": [ttft[1] / ttft[0]]},
            # The H200 keeps up with both, so its forwards only tell how full they are.
            *([Target("forwards ratio", 3.0)] if costs else []),
            Target("TTFT ratio", 2.5),
        )


def _alone(run: Callable[..., PlainResult], loop: DenoiseLoop, prompts: Prompts) -> PlainResult:
    return run(loop.runner, loop.config, prompts, TINY_OUTPUT_TOKENS)


def _closed_figures(target: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Figures:
    return _figures(run_closed(target, prompts, output_tokens, concurrency))


NOT_QUICK = ("busy", "fused-commit")
EXPERIMENTS: dict[str, Callable[[Services, Scale, Progress], Iterator[Case]]] = {
    "modes": modes,
    "re-loop": re_loop,
    "busy": busy,
    "fused-commit": fused_commit,
    "in-place": in_place,
    "upstream": upstream,
    "plain": plain,
    "round-trip": round_trip,
    "workers": workers,
}

"""What single experiments make of what they measure: with services and rounds that are made up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.__main__ import write_page
from bench.experiments import EXPERIMENTS, busy_share, caching, growing, scaling, tiny
from bench.experiments.cases import FULL, QUICK, Case, Prompts, Scale
from bench.loads import Shared, Steady
from bench.markdown import page
from bench.plain_loop import PlainResult
from bench.rounds import RoundTrip
from bench.services import Services

SCALE = dataclasses.replace(QUICK, runs=1, requests={4: 12, 16: 48, 64: 256})


class MadeUpServices:
    """Targets that nobody serves: a worker's says its rows, flags and number, a scheduler's those of its workers."""

    def workers(self, model: Path, num_rows: int, count: int = 1, flags: Sequence[str] = ()) -> list[str]:
        return [f"{num_rows} rows {' '.join(flags)} #{number}" for number in range(count)]

    @contextlib.contextmanager
    def schedulers(self, model: Path, each: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[str]]:
        yield [" + ".join(workers) + " ".join(flags) for workers, flags in each]

    def delayed(self, target: str, delay_ms: float) -> str:
        return f"{target} after {delay_ms} ms"

    def simulated(self, **costs: float) -> Path:
        return Path("simulated")

    def cpu_ms(self, target: str) -> float:
        return next(self.cpu)

    cpu = itertools.count(0.0, 70.0)


def measure(name: str, scale: Scale = SCALE) -> dict[str, Case]:
    cases = EXPERIMENTS[name](cast(Services, MadeUpServices()), scale, lambda what: None)
    return {case.name: case for case in cases}


def trip(host_ms: float, prefill_tokens: int = 0) -> RoundTrip:
    parts: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(RoundTrip)), 0)
    return RoundTrip(**parts | {"total_ms": host_ms + 7, "device_ms": 7, "prefill_tokens": prefill_tokens})


def patch_rounds(monkeypatch: pytest.MonkeyPatch, module: Any, make: Callable[..., RoundTrip]) -> list[int]:
    """All rounds are `make(rows, **options)`; the seeds that were asked for."""
    seeds: list[int] = []

    async def measure_rounds(target: str, num_rows: int, num_rounds: int, **options: int) -> list[RoundTrip]:
        seeds.append(options.get("seed", 0))
        return [make(num_rows, **options)] * num_rounds

    monkeypatch.setattr(module, "measure_rounds", measure_rounds)
    return seeds


def missed(cases: dict[str, Case]) -> set[str]:
    return {name for name, case in cases.items() if case.missed()}


def test_growth_is_flat_in_the_context_and_linear_in_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it meets all targets, there is a case for each number of rows and each context, and the page has the picture,
    the same from the same figures."""
    patch_rounds(monkeypatch, growing, lambda num_rows, **options: trip(0.5 * num_rows))
    cases = measure("growth", FULL)
    assert not missed(cases)
    assert len(cases) == 9 + 3 + 6
    assert cases["64 rows, 4096 tokens"].medians == {"host ms/round": 32.0, "device ms/round": 7.0}
    assert cases["16384 / 512 tokens, 8 rows"].medians == {"ratio": 1.0}
    assert cases["256 / 64 rows, 512 tokens"].medians == {"ratio": 4.0}
    assert cases["256 / 8 rows, 512 tokens"].medians == {"ratio": 32.0}


@pytest.mark.parametrize(
    ("host_ms", "expected"),
    [
        (lambda num_rows, context: num_rows + context / 1000, {f"16384 / 512 tokens, {rows} rows" for rows in (8, 64)}),
        (
            lambda num_rows, context: num_rows**1.1,
            {f"256 / {rows} rows, {context} tokens" for rows in (8, 64) for context in (512, 4096, 16384)},
        ),
    ],
)
def test_growth_that_is_not_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, host_ms: Callable[[int, int], float], expected: set[str]
) -> None:
    """More than 15 % by the longest context, or more than the rows."""
    patch_rounds(
        monkeypatch, growing, lambda num_rows, prompt_blocks, **options: trip(host_ms(num_rows, prompt_blocks * 32))
    )
    assert missed(measure("growth")) == expected


def test_growth_is_not_measured_while_prompts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with prompt tokens would say something else."""
    patch_rounds(monkeypatch, growing, lambda num_rows, **options: trip(1.0, prefill_tokens=32))
    with pytest.raises(RuntimeError, match="8 rows, 512 tokens: prompts were computed"):
        measure("growth")


def test_the_picture_stands_beside_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page links to it, and the same figures give the same text, a complete <svg> with a line for each context."""
    patch_rounds(monkeypatch, growing, lambda num_rows, **options: trip(0.5 * num_rows))
    results = {"growth": list(measure("growth").values())}
    texts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        text = page(results, "a machine", 1)
        write_page(tmp_path / name / "figures.md", text, results)
        assert "](pictures/growth.svg)" in (tmp_path / name / "figures.md").read_text()
        texts.append((tmp_path / name / "pictures" / "growth.svg").read_text())
    assert texts[0] == texts[1]
    assert texts[0].startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in texts[0]
    assert all(f"{context} tokens of context" in texts[0] for context in (512, 4096, 16384))


@pytest.mark.parametrize(("cached", "expected"), [(1088, set()), (1089, {"512 shared tokens, on / off"})])
def test_the_prefix_cache_is_measured_with_prompts_of_its_own(
    monkeypatch: pytest.MonkeyPatch, cached: int, expected: set[str]
) -> None:
    """At most an eighth of the cold prompt tokens; no run repeats another run's prompts, both sides have the same."""
    prompts: dict[str, Prompts] = {"off": [], "on": []}

    def run_shared(target: str, first: list[int], rest: Prompts, output_tokens: int) -> Shared:
        is_on = "--enable-prefix-caching" in target
        prompts["on" if is_on else "off"] += [first, *rest]
        assert all(each[:512] == first[:512] and len(each) == 528 for each in rest)
        return Shared(cached if is_on else 8704, [5.0, 7.0, 6.0])

    monkeypatch.setattr(caching, "run_shared", run_shared)
    seeds = patch_rounds(monkeypatch, caching, lambda num_rows, **options: trip(2.0))
    cases = measure("prefix-cache", dataclasses.replace(SCALE, runs=2))
    assert prompts["off"] == prompts["on"]
    assert len({tuple(prompt) for prompt in prompts["on"]}) == 2 * 17
    assert seeds == [1, 1, 2, 2]
    assert cases["512 shared tokens, cache on"].medians == {"prefill tokens": cached, "TTFT p50 ms": 6.0}
    assert cases["nothing shared, cache off"].medians == {"host ms/round": 2.0, "CPU ms/round": 1.0}
    assert missed(cases) == expected


def test_one_core_drives_as_many_workers_as_its_rounds_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond of CPU a round is 2000 rounds/s; a worker alone that has 100 rounds/s leaves room for 20."""

    def run_steady(target: str, prompts: Prompts, output_tokens: int, places: int, probe: object) -> Steady:
        rounds = {64: 200, 128: 300}[places]
        return Steady(2.0, cast(Any, SimpleNamespace(rounds=rounds)), probed=0.5 * rounds)

    monkeypatch.setattr(scaling, "run_steady", run_steady)
    one, two = measure("scheduler").values()
    assert one.medians["CPU ms/round"] == two.medians["CPU ms/round"] == 0.5
    assert (one.medians["rounds/s of a worker"], two.medians["rounds/s of a worker"]) == (100.0, 75.0)
    assert one.medians["workers of a core"] == two.medians["workers of a core"] == 20.0


def test_the_busy_share_is_that_of_the_steady_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its targets where two rounds are in flight, and none where one is."""

    def run_steady(target: str, prompts: Prompts, output_tokens: int, places: int) -> Steady:
        share = 0.96 if "--rounds-in-flight 2" in target else 0.5
        server = SimpleNamespace(device_busy_share=share, denoise_rows_per_forward=15.0, blocks_done=100)
        return Steady(2.0, cast(Any, server), 0.0)

    monkeypatch.setattr(busy_share, "run_steady", run_steady)
    cases = measure("busy")
    assert cases["64 rows, k = 2, 2 ms"].medians == {"device busy": 0.96, "tokens/s": 1600.0, "rows/forward": 15.0}
    assert missed(cases) == {f"16 rows, k = 2, {delay} ms" for delay in ("0", "0.5", "2")}


def test_a_request_at_a_time_is_compared_on_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load cycles over the same conversations, which are of a few hundred tokens; each ratio has its target."""
    seen: list[set[tuple[int, ...]]] = []

    def plain(tokens_per_s: float) -> Callable[..., PlainResult]:
        def run(runner: object, config: object, prompts: Prompts, output_tokens: int, **rows: int) -> PlainResult:
            seen.append(set(map(tuple, prompts)))
            ids = [[0] * output_tokens for _ in prompts]
            return PlainResult(ids, 1, 1, 0, len(prompts) * output_tokens / tokens_per_s, 1.0)

        return run

    def closed_figures(target: str, prompts: Prompts, *rest: int) -> dict[str, float]:
        seen.append(set(map(tuple, prompts)))
        return {"tokens/s": 950.0}

    monkeypatch.setattr(tiny, "load_loop", lambda *_: SimpleNamespace(runner=None, config=None))
    monkeypatch.setattr(tiny, "closed_figures", closed_figures)
    for name, speed in (("run_plain", 1000.0), ("run_one_at_a_time", 500.0), ("run_without_kv", 200.0)):
        monkeypatch.setattr(tiny, name, plain(speed))
    cases = measure("plain", dataclasses.replace(FULL, runs=1))
    assert all(prompts == seen[0] for prompts in seen) and len(seen[0]) == 8
    assert all(250 < len(prompt) < 500 for prompt in seen[0])
    assert cases["services / plain loop, 64 rows"].medians == {"ratio": 0.95}
    assert cases["16 concurrent / one at a time"].medians == {"with KV": 1.9, "no KV": 4.75}
    assert missed(cases) == {"16 concurrent / one at a time"}

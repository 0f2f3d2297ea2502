"""The simulated device: its costs, its time line, and that the real step takes the drawn forwards."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.architectures import CheckpointError
from common.model_folder import ModelFolder, read_model_folder
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import Driver, names, start
from worker_svc.algorithms.sampling import mix64
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ForwardInput, Segment
from worker_svc.simulated import SimulatedRunner, TimeLine, read_profile, usual_overshoot_s

FOLDER = Path(__file__).parents[2] / "models" / "simulated-h200-llada2-mini"
BLOCK, NUM_BLOCKS = 32, 5


class Clock:
    """Seconds that pass while someone sleeps, `late_s` longer than asked."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.late_s = 100.0, late_s

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s + self.late_s


def folder(**simulation: object) -> ModelFolder:
    """The shipped folder with other numbers."""
    shipped = read_model_folder(FOLDER)
    changed = {**shipped.config["simulation"], **simulation}
    return dataclasses.replace(shipped, config={**shipped.config, "simulation": changed})


def make_runner() -> SimulatedRunner:
    clock = Clock()
    return SimulatedRunner(folder(), TimeLine(clock, clock.sleep, 0.0))


def make_loop(num_slots: int) -> DenoiseLoop:
    config = LoopConfig(
        fingerprint="scripted",
        block_size=BLOCK,
        mask_token_id=1,
        context_length=1024,
        page_size=BLOCK,
        num_slots=num_slots,
        num_pages=32 * num_slots,
        chunked_prefill_size=2048,
    )
    return DenoiseLoop(make_runner(), config, Clock())


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(3, 63), k=BLOCK)


def forwards_of_blocks(prompts: list[list[int]], mode: pb.Mode, algorithm: str) -> list[list[int]]:
    """Forwards of the first blocks of each request, all requests together."""
    driver = Driver(make_loop(len(prompts)))
    counts: list[list[int]] = [[] for _ in prompts]
    open_forwards = [0] * len(prompts)
    rows = [start(f"r{number}", tokens, algorithm=algorithm) for number, tokens in enumerate(prompts)]
    reply = driver.run(mode=mode, starts=rows)
    while True:
        assert set(reply.rows.statuses) <= {pb.ROW_STATUS_RUNNING}
        for number, accepted in enumerate(reply.rows.accept_lengths):
            open_forwards[number] += reply.rows.forwards[number]
            if accepted:
                counts[number].append(open_forwards[number])
                open_forwards[number] = 0
        if all(len(of_request) >= NUM_BLOCKS for of_request in counts):
            return [of_request[:NUM_BLOCKS] for of_request in counts]
        reply = driver.run(mode=mode, continues=names(*(row.request_id for row in rows)))


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_draws_are_the_requests_own(algorithm: str) -> None:
    """A block takes the same forwards alone and in company, in FDFO and in SYNC."""
    prompts = [prompt(number) for number in range(6)]
    together = forwards_of_blocks(prompts, pb.MODE_FDFO, algorithm)
    assert together == forwards_of_blocks(prompts, pb.MODE_SYNC, algorithm)
    assert together[:2] == [forwards_of_blocks([tokens], pb.MODE_FDFO, algorithm)[0] for tokens in prompts[:2]]
    assert len({tuple(of_request) for of_request in together}) == len(prompts)


def test_both_algorithms_take_the_same_draws() -> None:
    """What is drawn is the block's forwards, whatever the algorithm does with the logits."""
    prompts = [prompt(number) for number in range(4)]
    assert forwards_of_blocks(prompts, pb.MODE_FDFO, "LowConfidence") == forwards_of_blocks(
        prompts, pb.MODE_FDFO, "JointThreshold"
    )


def naive_draw(generator: random.Random) -> int:
    while True:
        drawn = round(generator.gammavariate(4.5, 14.0 / 4.5))
        if 2 <= drawn <= 33:
            return drawn


def test_the_draws_have_the_profiles_distribution() -> None:
    """Drawn from many seeds, the forwards are distributed as a gamma number, rounded and redrawn outside 2..33."""
    drawn = make_runner().forwards_of(mix64(torch.arange(40_000)))
    counts = Counter(drawn.tolist())
    generator = random.Random(0)
    naive = Counter(naive_draw(generator) for _ in range(40_000))
    assert set(counts) <= set(range(2, 34))
    for value in range(2, 34):
        assert abs(counts[value] - naive[value]) < 6 * (counts[value] + naive[value] + 10) ** 0.5, value


def test_the_forwards_that_the_loop_takes_have_it_too() -> None:
    """The mean over real blocks is the drawn mean, so the logits neither add nor save forwards."""
    taken = [
        forwards
        for of_request in forwards_of_blocks([prompt(number) for number in range(40)], pb.MODE_FDFO, "LowConfidence")
        for forwards in of_request
    ]
    generator = random.Random(0)
    expected = statistics.mean(naive_draw(generator) for _ in range(20_000))
    assert abs(statistics.mean(taken) - expected) < 4 * statistics.stdev(taken) / len(taken) ** 0.5
    assert min(taken) >= 2 and max(taken) <= 33


@pytest.mark.parametrize(
    ("segments", "expected_ms"),
    [
        ([Segment(0, 1, 0)], 7.06),
        ([Segment(0, 1, 0), Segment(1, 1, 0)], 7.12),
        ([Segment(0, 2, 0)], 7.12),  # two blocks fused into one input
        ([Segment(0, 2, 0, True), Segment(2, 1, 2)], 7.06 + 64 * 0.002),  # a chunk of two blocks and the row's own
        ([Segment(0, 4, 0, True)], 7.0 + 128 * 0.002),
    ],
)
def test_what_a_forward_costs(segments: list[Segment], expected_ms: float) -> None:
    """Each denoising block costs a row, a fused input two, a prompt token its own; all on top of the floor."""
    runner = make_runner()
    num_units = sum(segment.num_units for segment in segments)
    kv = KVStore.allocate(
        num_layers=1,
        num_pages=8,
        page_size=BLOCK,
        num_kv_heads=1,
        head_dim=1,
        num_slots=1,
        max_pages_per_slot=8,
        dtype=torch.float32,
        device="cpu",
    )
    kv.page_table[0] = torch.arange(1, 9)
    inputs = ForwardInput(
        ids=torch.ones(num_units, BLOCK, dtype=torch.int64),
        slots=torch.zeros(num_units, dtype=torch.int64),
        block_index=torch.arange(num_units),
        segments=tuple(segments),
        logits_units=torch.tensor([num_units - 1]),
    )
    runner.forward(inputs, kv)
    assert runner.finish() == pytest.approx(expected_ms)


@given(
    st.lists(st.tuples(st.floats(0, 0.02), st.floats(0.001, 0.02)), min_size=1, max_size=20),
    st.floats(0, 0.0005),
)
def test_a_late_sleep_is_no_idle_time(forwards: list[tuple[float, float]], late_s: float) -> None:
    """The time line ends where it would with sleeps that end on time: the host's own delays count, late sleeps not."""
    clock = Clock(late_s)
    line = TimeLine(clock, clock.sleep, overshoot_s=0.0005)
    end_s = clock.now
    for host_s, cost_s in forwards:
        clock.now += host_s
        line.launch(cost_s)
        line.wait()
        end_s += host_s + cost_s
    assert line.end_s == pytest.approx(end_s)


def test_a_host_that_is_late_makes_the_device_wait() -> None:
    """Lateness beyond what sleeps have, as when the thread cannot go on, is idle time of the device."""
    clock = Clock(late_s=0.003)
    line = TimeLine(clock, clock.sleep, overshoot_s=0.001)
    line.launch(0.010)
    line.wait()
    line.launch(0.010)
    assert line.end_s == pytest.approx(100.0 + 0.010 + 0.002 + 0.010)


def test_what_is_launched_early_starts_when_the_device_is_free() -> None:
    """Two launches at once run one after the other."""
    clock = Clock()
    line = TimeLine(clock, clock.sleep, 0.0)
    line.launch(0.010)
    line.launch(0.005)
    line.wait()
    assert clock.now == pytest.approx(100.015)


def test_the_usual_overshoot_is_measured() -> None:
    """It is the time by which sleeps end late."""
    clock = Clock(late_s=0.0002)
    assert usual_overshoot_s(clock, clock.sleep) == pytest.approx(0.0002)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"floor_ms": -1}, "floor_ms"),
        ({"floor_ms": "7"}, "floor_ms"),
        ({"denoise_row_ms": float("nan")}, "denoise_row_ms"),
        ({"forwards_min": 1}, "forwards_min"),
        ({"forwards_max": 34}, "forwards_max"),
        ({"forwards_mean": 0}, "forwards_mean"),
        ({"forwards_mean": 1e-9}, "forwards_mean"),
        ({"floor_ms": 1e300}, "floor_ms"),
        ({"forwards_max": 20.5}, "forwards_max"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_profile_with_a_fault_is_refused(change: dict[str, object], key: str) -> None:
    """The error names the key of config.json."""
    with pytest.raises(CheckpointError, match=rf"simulation\.[\w, ]*{key}"):
        read_profile(folder(**change))

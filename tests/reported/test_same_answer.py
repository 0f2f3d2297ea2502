"""Reported faults of answers that depend on the load, or on nothing that the client said."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.text import TextCodec
from tests.golden.test_loops import FOLDER, PATH, B, make_loop, start_row
from tests.golden.test_mixed_loops import run_to_end
from tests.scheduler.in_memory import Bench, ContextRunner, play
from tests.worker.scripted import Driver
from tests.worker.scripted import make_loop as make_scripted_loop

Request = dict[str, Any]  # fields of a GenerateRequest, the prompt among them
LOW = {"threshold": 0.1}  # the random model is never sure


def test_16_greedy_prompts_at_once_are_each_as_one_at_a_time() -> None:
    """Sixteen of the shipped problems, batch-invariant: all 16 equal, in both modes, with every default of a worker."""
    codec = TextCodec(PATH)
    lines = (PATH / "problems.jsonl").read_text().splitlines()[::20][:16]
    prompts = [codec.encode_chat([("user", json.loads(line)["prompt"])]) for line in lines]
    fields: dict[str, Any] = {"stop_token_ids": FOLDER.stop_token_ids, "tokens_left": 2 * B}
    rows = [start_row(f"r{n}", ids, "LowConfidence", **fields) for n, ids in enumerate(prompts)]
    alone_driver = Driver(make_loop(batch_invariant=True, fused_commit=True, caching=False))
    alone: dict[str, tuple[list[int], int, int]] = {}
    for row in rows:
        alone |= run_to_end(alone_driver, [row], pb.MODE_FDFO)
    assert len({tuple(ids) for ids, _, _ in alone.values()}) == len(rows) == 16
    for mode in (pb.MODE_FDFO, pb.MODE_SYNC):
        loop = make_loop(batch_invariant=True, fused_commit=True)
        assert run_to_end(Driver(loop), rows, mode) == alone


def answer(bench: Bench, requests: list[Request], together: bool) -> list[list[int]]:
    """Published ids of all requests, all at once or one after the other."""
    answers: list[list[int]] = []

    async def one(number: int, request: Request) -> list[int]:
        return (await bench.read(await bench.submit(f"r{number}", **request)))[0]

    async def scene() -> None:
        if together:
            answers.extend(await asyncio.gather(*(one(*each) for each in enumerate(requests))))
        else:
            answers.extend([await one(*each) for each in enumerate(requests)])

    play(bench, scene)
    return answers


@pytest.mark.parametrize("fdfo", [True, False])
def test_rows_that_come_and_go_keep_their_own_parameters(fdfo: bool) -> None:
    """16 requests with other sampling parameters, thresholds and algorithms each, through three slots: as one at a
    time, though the rows beside them and those before them in their slots had others."""
    draw = random.Random(5)
    requests: list[Request] = [
        {
            "prompt": [20 + number % 9] * draw.randint(1, 40),
            "max_new_tokens": draw.randint(20, 70),
            "ignore_eos": True,
            "algorithm": draw.choice(["LowConfidence", "LowConfidence", "JointThreshold"]),
            "algorithm_params": {"threshold": draw.choice([0.05, 0.1, 0.3])},
            "sampling": api.SamplingParams(
                temperature=draw.choice([0.0, 0.7, 1.0, 1.5]),
                top_p=draw.choice([0.5, 0.9, 1.0]),
                top_k=draw.choice([0, 2, 8]),
                min_p=draw.choice([0.0, 0.2]),
                seed=number,
            ),
        }
        for number in range(16)
    ]
    loop = make_scripted_loop(num_slots=3, runner=ContextRunner(), fused_commit=True)
    together = answer(Bench(loop, dllm_fdfo=fdfo), requests, together=True)
    assert together == answer(Bench(make_scripted_loop(runner=ContextRunner())), requests, together=False)


def test_every_sampling_field_counts() -> None:
    """Each of temperature, top_p, top_k, min_p and seed changes the answer of a sampled request; the same fields give
    the same answer; and at temperature 0 none of them does anything."""
    base: dict[str, float] = {"temperature": 1.0, "seed": 7}
    others: list[dict[str, float]] = [{"temperature": 0.5}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}, {"seed": 8}]

    def ask(*sampling: dict[str, float]) -> list[list[int]]:
        common: Request = {"prompt": [20, 21], "max_new_tokens": 30, "ignore_eos": True, "algorithm_params": LOW}
        requests = [{**common, "sampling": api.SamplingParams(**fields)} for fields in sampling]  # type: ignore[arg-type]
        return answer(Bench(make_scripted_loop(runner=ContextRunner())), requests, together=True)

    sampled = ask(base, *(base | fields for fields in others))
    assert len({tuple(ids) for ids in sampled}) == 1 + len(others)
    assert ask(base, base) == [sampled[0]] * 2
    greedy = ask({}, *(base | fields | {"temperature": 0.0} for fields in others))
    assert greedy == [greedy[0]] * (1 + len(others))
    assert greedy[0] not in sampled


def test_without_a_seed_two_requests_differ() -> None:
    """A sampled request that names no seed draws one, and says which: with it the answer comes again."""
    bench = Bench(make_scripted_loop(runner=ContextRunner()))
    fields: Request = {"ignore_eos": True, "algorithm_params": LOW}

    async def scene() -> None:
        answers, seeds = [], []
        for name in "ab":
            stream = await bench.submit(name, [20], 30, sampling=api.SamplingParams(temperature=1.0), **fields)
            seeds.append(stream.samples[0].seed)
            answers.append((await bench.read(stream))[0])
        assert answers[0] != answers[1]
        again = api.SamplingParams(temperature=1.0, seed=seeds[0])
        assert (await bench.read(await bench.submit("c", [20], 30, sampling=again, **fields)))[0] == answers[0]

    play(bench, scene)

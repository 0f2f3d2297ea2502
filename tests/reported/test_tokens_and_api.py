"""Reported faults of messages, block sizes and logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.profiler import profile

from common.model_folder import read_model_folder
from fdfo_client.bench.workload import Item
from tests.client.test_bench_virtual import SHIPPED
from tests.reported.virtual_loads import PROFILE
from tests.reported.virtual_loads import play as play_virtually
from tests.scheduler.in_memory import Bench, expected, play
from tests.worker.scripted import BLOCK, MASK, Driver, ScriptedRunner, effort, make_loop, names, start
from worker_svc.algorithms import sampling
from worker_svc.step import step, step_rows


def test_a_message_has_tokens_and_says_how_many() -> None:
    """With a round for every forward, most of which commit nothing, a client gets one message a block, none of them
    empty, and the ids in them are all tokens that usage counts; a block held back whole, as it may be the beginning of
    a stop string, sends none."""
    bench = Bench(make_loop(fused_commit=True), max_forwards=1)

    async def sizes_of(name: str, stop: list[str]) -> list[int]:
        stream = await bench.submit(name, effort(20), 100, stop=stop)
        sizes: list[int] = []
        async for event in stream.read():
            if event.HasField("committed"):
                sizes.append(len(event.committed.token_ids))
        bench.scheduler.leave(stream)
        assert event.finished.usage.completion_tokens == 100 and event.finished.usage.rounds > 20
        return sizes

    async def scene() -> None:
        assert await sizes_of("a", []) == [31, 32, 32, 5]
        codec = bench.scheduler._codec
        text = b"".join(codec.token_bytes(token) for token in expected(1, 31)).decode()
        assert await sizes_of("b", [text + "never"]) == [32, 32, 36]

    play(bench, scene)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("fdfo", [True, False])
def test_both_services_with_small_blocks(block_size: int, fdfo: bool) -> None:
    """Prompts and outputs of all lengths around blocks of 4 (SDAR's) and 16: each request gets its tokens, in blocks on
    that grid, in a pool that the largest one fills; a constant 32 in scheduler, worker or client would show."""
    folder = read_model_folder(SHIPPED, block_size=block_size)
    simulation = PROFILE | {"forwards_mean": 3.0, "forwards_max": block_size + 1}
    folder = dataclasses.replace(folder, config={**folder.config, "simulation": simulation})
    lengths = [(1, 1), (3, 4), (4, 5), (5, 3), (block_size - 1, 40), (block_size, 33), (40, 2), (65, 70)]
    items = [
        Item(
            0.01 * number,
            {"prompt_ids": [20 + number] * prompt, "max_new_tokens": new, "ignore_eos": True, "timeout": 9.0},
        )
        for number, (prompt, new) in enumerate(lengths)
    ]
    measurement, forwards = play_virtually(
        items, folder, dllm_fdfo=fdfo, chunked_prefill_size=block_size, max_total_tokens=144
    )
    assert max(forward.resident for forward in forwards) >= 3, "pages are counted too large"
    for record, (prompt, new) in zip(measurement.records, lengths, strict=True):
        sizes = [commit.num_tokens for commit in record.commits]
        ends = [prompt + sum(sizes[: number + 1]) for number in range(len(sizes))]
        assert sum(sizes) == new
        assert ends[:-1] == list(range((prompt // block_size + 1) * block_size, prompt + new, block_size))


def test_logits_are_made_for_denoising_rows_only() -> None:
    """112 blocks of prompt and a fused commit beside two rows: logits of two blocks, where all positions of all blocks
    would be 115."""
    runner = ScriptedRunner()
    loop = make_loop(num_slots=3, num_pages=200, chunk=112 * BLOCK, context=8192, runner=runner, fused_commit=True)
    driver = Driver(loop)
    driver.run(starts=[start("a", effort(3)), start("b", effort(30))], max_forwards=2)
    prompt = start("prompt", [5] * (113 * BLOCK), tokens_left=40)
    driver.run(starts=[prompt], continues=names("a", "b"), max_forwards=1)
    inputs = runner.inputs[-1]
    assert (len(inputs.ids), inputs.logits_units.tolist()) == (2 + 112 + 1, [0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_a_greedy_step_copies_no_logits(algorithm: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of 112 blocks makes no second tensor of the logits' size, which at a vocabulary of 157184 would be 2.1
    GiB: what it allocates at once is bounded by a number of logits, here an eighth of them, in fp32 and float64."""
    loop = make_loop(num_slots=112, num_pages=112)
    rows = [start(f"r{number}", effort(9), algorithm=algorithm) for number in range(112)]
    Driver(loop).run(starts=rows, max_forwards=1)
    residents = list(loop.sessions["s"].rows.values())
    batch = step_rows(residents, torch.tensor([row.slot for row in residents]), [True] * 112, loop.columns)
    logits = torch.randn(112, BLOCK, 1024).to(dtype)
    monkeypatch.setattr(sampling, "MAX_LOGITS_AT_ONCE", logits.numel() // 8)
    with torch.inference_mode(), profile(profile_memory=True) as profiled:
        step(batch, logits, loop.columns, MASK)
    allocated = [event.cpu_memory_usage for event in profiled.function_events]
    assert 0 < max(allocated) <= logits.numel()

"""Reported faults of messages, block sizes and logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import ServiceError
from common.model_folder import read_model_folder
from fdfo_client.bench.workload import Item
from tests.client.test_bench_virtual import SHIPPED
from tests.reported.virtual_loads import PROFILE, play as play_virtually
from tests.scheduler.in_memory import Bench, play
from tests.worker.scripted import BLOCK, VOCAB, Driver, ScriptedRunner, effort, make_loop, names, start
from worker_svc.batch import build_batch, step


def test_a_message_has_tokens_and_says_how_many() -> None:
    """With a round for every forward, most of which commit nothing, a client gets one message a block, none of them
    empty, and the ids in them are all tokens that usage counts."""
    bench = Bench(make_loop(fused_commit=True), max_forwards=1)

    async def scene() -> None:
        stream = await bench.submit("a", effort(20), 100)
        sizes: list[int] = []
        while True:
            event = await stream.events.get()
            assert not isinstance(event, ServiceError)
            if event.HasField("committed"):
                sizes.append(len(event.committed.token_ids))
            if event.HasField("finished"):
                break
        bench.scheduler.leave(stream)
        assert sizes == [31, 32, 32, 5] and event.finished.usage.completion_tokens == 100
        assert event.finished.usage.rounds > 5 * len(sizes)

    play(bench, scene)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("fdfo", [True, False])
def test_both_services_with_small_blocks(block_size: int, fdfo: bool) -> None:
    """Prompts and outputs of all lengths around blocks of 4 (SDAR's) and 16: each request gets its tokens, in blocks on
    that grid; a constant 32 in scheduler, worker or client would show."""
    folder = read_model_folder(SHIPPED, block_size=block_size)
    simulation = PROFILE | {"forwards_mean": 3.0, "forwards_max": block_size + 1}
    folder = dataclasses.replace(folder, config={**folder.config, "simulation": simulation})
    lengths = [(1, 1), (3, 4), (4, 5), (5, 3), (block_size - 1, 40), (block_size, 33), (40, 2), (65, 70)]
    items = [
        Item(0.01 * number, {"prompt_ids": [20 + number] * prompt, "max_new_tokens": new, "ignore_eos": True})
        for number, (prompt, new) in enumerate(lengths)
    ]
    measurement, _ = play_virtually(items, folder, dllm_fdfo=fdfo, chunked_prefill_size=block_size)
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


class LargeResults(TorchDispatchMode):
    """Keeps the sizes in bytes of the results of operations that are new memory of at least so many bytes."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()
        self.least_bytes = least_bytes
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                if leaf.nbytes >= self.least_bytes:
                    self.sizes.append(leaf.nbytes)
        return result


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_a_greedy_step_copies_no_logits(algorithm: str) -> None:
    """The step of 112 blocks works in place: no second tensor of the logits' size, which at a vocabulary of 157184 would
    be 2.1 GiB."""
    loop = make_loop(num_slots=112, num_pages=112)
    rows = [start(f"r{number}", effort(9), algorithm=algorithm) for number in range(112)]
    driver = Driver(loop)
    driver.run(starts=rows, max_forwards=1)
    resident = list(loop.sessions["s"].rows.values())
    batch = build_batch(resident, [True] * 112, loop.columns)
    with torch.inference_mode():
        logits = torch.randn(112, BLOCK, VOCAB)
        with LargeResults(logits.nbytes) as large:
            step(batch, logits, loop.columns, mask_token_id=1)
    assert large.sizes == []

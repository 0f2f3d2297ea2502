"""The shipped model through the loop, against a loop without KV that recomputes everything in every step."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.model_folder import load_tokenizer, read_model_folder
from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.algorithms.naive import NaiveRow, step_joint_threshold, step_low_confidence
from tests.model.reference import reference_logits
from tests.worker.scripted import Driver, names, start
from worker_svc.algorithms import ALGORITHMS
from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models.loading import load_model

PATH = Path("models/tiny-llada2")
FOLDER = read_model_folder(PATH)
B, MASK = FOLDER.block_size, FOLDER.mask_token_id
NAIVE_STEPS = {"LowConfidence": step_low_confidence, "JointThreshold": step_joint_threshold}


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return load_file(PATH / "model.safetensors")


def make_loop(
    *,
    batch_invariant: bool = False,
    chunk: int = 2048,
    page_size: int = B,
    slots: int = 16,
    fused_commit: bool = False,
    early_end: bool = True,
    caching: bool = True,
) -> DenoiseLoop:
    torch.set_num_threads(1)
    model = load_model(FOLDER, dtype=torch.float32, device="cpu")
    runner = TorchModelRunner(model, ATTENTION_BACKENDS["torch"](), batch_invariant=batch_invariant)
    sizes = (B, MASK, 1024, page_size, slots, 512 * B // page_size, chunk)
    config = LoopConfig(
        "scripted", *sizes, fused_commit=fused_commit, early_end=early_end, enable_prefix_caching=caching
    )
    return DenoiseLoop(runner, config, lambda: 0.0)


def text_ids(length: int) -> list[int]:
    """Token ids of chat prompts one after the other, cut to length."""
    tokenizer = load_tokenizer(PATH)
    problems = [json.loads(line)["prompt"] for line in (PATH / "problems.jsonl").read_text().splitlines()[:40]]
    text = "".join(f"<role>HUMAN</role>{problem}<|role_end|><role>ASSISTANT</role>" for problem in problems)
    ids: list[int] = tokenizer.encode(text).ids
    return ids[-length:]


def start_row(name: str, prompt: list[int], algorithm: str, tokens_left: int = 600, **fields: Any) -> pb.StartRow:
    assert MASK == 1  # as in the scripted model, whose helper this is
    return start(name, prompt, tokens_left=tokens_left, algorithm=algorithm, **fields)


def run_blocks(driver: Driver, row: pb.StartRow, num_blocks: int, mode: pb.Mode, max_forwards: int = 0) -> list[int]:
    """Ids of the row's first done blocks."""
    ids: list[int] = []
    reply = driver.run(starts=[row], mode=mode, max_forwards=max_forwards)
    ids += unpack_ids(reply.rows.done_ids)
    while len(ids) < num_blocks * B:
        named = names(row.request_id, attempt=row.attempt)
        reply = driver.run(continues=named, mode=mode, max_forwards=max_forwards)
        ids += unpack_ids(reply.rows.done_ids)
    return ids


def naive_blocks(
    prompt: list[int],
    num_blocks: int,
    algorithm: str,
    size: int = B,
    on_step: Callable[[NaiveRow, NaiveRow, torch.Tensor], None] = lambda before, after, logits: None,
    **params: float,
) -> list[int]:
    """The same by a loop without KV: a pass over everything before and in the block for every step.

    `on_step` sees the row before and after each step, and the step's logits float32 [B, V].
    """
    values = {param.name: param.default for param in ALGORITHMS[algorithm].params} | params
    sequence = prompt[: len(prompt) // size * size]
    tail = prompt[len(sequence) :]
    out: list[int] = []
    for _ in range(num_blocks):
        row = NaiveRow(
            ids=tail + [MASK] * (size - len(tail)),
            masked=[False] * len(tail) + [True] * (size - len(tail)),
            editable=[False] * len(tail) + [True] * (size - len(tail)),
            params=values,
            mask_token_id=MASK,
            block_index=len(sequence) // size,
        )
        done = False
        while not done:
            logits = reference_logits(weights(), FOLDER.config, sequence + row.ids, size)[-size:]
            before = copy.deepcopy(row)
            done = NAIVE_STEPS[algorithm](row, logits.tolist())
            on_step(before, row, logits)
            row.step_index += 1
        sequence, tail = sequence + row.ids, []
        out += row.ids
    return out


@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 10 * B + 7])
def test_fdfo_sync_and_the_naive_loop_agree(algorithm: str, length: int) -> None:
    """One request, temperature 0: both modes give the same bytes, and the tokens of the loop without KV."""
    prompt = text_ids(length)
    row = start_row("a", prompt, algorithm)
    fdfo = run_blocks(Driver(make_loop()), row, 2, pb.MODE_FDFO)
    sync = run_blocks(Driver(make_loop()), row, 2, pb.MODE_SYNC)
    assert fdfo == sync
    assert fdfo == naive_blocks(prompt, 2, algorithm)


@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
@pytest.mark.parametrize("threshold", [0.05, 0.95])
def test_thresholds_and_a_mask_token_in_the_prompt_agree_too(algorithm: str, threshold: float) -> None:
    """The mask id as text in the prompt changes nothing about the equality, at any threshold."""
    prompt = text_ids(B + 5)
    prompt[3] = prompt[B + 1] = prompt[B + 2] = MASK
    row = start_row("a", prompt, algorithm, algorithm_params={"threshold": threshold})
    assert run_blocks(Driver(make_loop()), row, 1, pb.MODE_FDFO) == naive_blocks(
        prompt, 1, algorithm, threshold=threshold
    )


def test_a_seeded_request_is_the_same_alone_in_company_and_moved() -> None:
    """Batch-invariant, temperature 1: among 15 others, with other chunks and pages, a forward a round, moved in
    mid-block to another worker."""
    prompt = text_ids(3 * B + 9)
    sampling = pb.SamplingParams(temperature=1.0, top_p=0.9, seed=(1 << 64) - 5)
    row = start_row("me", prompt, "LowConfidence", sampling=sampling)
    alone = run_blocks(Driver(make_loop(batch_invariant=True)), row, 2, pb.MODE_FDFO)
    other = run_blocks(Driver(make_loop(batch_invariant=True, chunk=B, page_size=2 * B)), row, 2, pb.MODE_FDFO, 1)
    assert alone == other

    driver = Driver(make_loop(batch_invariant=True))
    company = [
        start_row(
            f"o{n}",
            text_ids(20 + 7 * n),
            "LowConfidence" if n % 2 else "JointThreshold",
            sampling=pb.SamplingParams(temperature=n % 3 / 2, top_p=1, seed=n),
        )
        for n in range(15)
    ]
    reply = driver.run(starts=[*company, row], mode=pb.MODE_SYNC)
    assert unpack_ids(reply.rows.done_ids)[-B:] == alone[:B]

    first = Driver(make_loop(batch_invariant=True)).run(starts=[row], max_forwards=3)
    assert list(first.rows.has_block) == [True]
    moved = start_row("me", prompt, "LowConfidence", sampling=sampling)
    moved.attempt = 2
    moved.block_ids, moved.block_mask = first.rows.block_ids, first.rows.block_masks
    moved.step_count = first.rows.step_counts[0]
    assert run_blocks(Driver(make_loop(batch_invariant=True)), moved, 2, pb.MODE_FDFO) == alone


@pytest.mark.parametrize("algorithm", sorted(NAIVE_STEPS))
@pytest.mark.parametrize("page_size", [B, 2 * B])
def test_a_cached_prefix_gives_the_same_tokens(algorithm: str, page_size: int) -> None:
    """Batch-invariant: without the cache, with a cold one, and from pages that other requests wrote as prompt or as
    output."""
    prompt = text_ids(3 * B + 9)
    sampling = pb.SamplingParams(temperature=1.0, top_p=0.9, seed=11)
    row = start_row("a", prompt, algorithm, sampling=sampling)
    plain = make_loop(batch_invariant=True, page_size=page_size, caching=False)
    expected = run_blocks(Driver(plain), row, 3, pb.MODE_FDFO)
    loop = make_loop(batch_invariant=True, page_size=page_size)
    driver = Driver(loop)
    assert run_blocks(driver, row, 3, pb.MODE_FDFO) == expected
    row.attempt = 2
    computed = loop.totals.prefill_tokens
    assert run_blocks(driver, row, 3, pb.MODE_FDFO) == expected
    assert loop.totals.prefill_tokens - computed == 3 * B % page_size
    # Its own output is the prefix now: the rest of it is found again behind pages that were written while denoising.
    longer = prompt[: 3 * B] + expected[: 2 * B]
    later = start_row("b", longer, algorithm, sampling=sampling)
    later.prompt_length = len(prompt)
    computed = loop.totals.prefill_tokens
    assert run_blocks(driver, later, 1, pb.MODE_FDFO) == expected[2 * B :]
    assert loop.totals.prefill_tokens - computed == 5 * B % page_size


@pytest.mark.parametrize("block_size", [4, 8])
def test_no_block_size_is_built_in(block_size: int) -> None:
    """Blocks of 4 (as SDAR's) and 8 run the same loop: whole block, right grid, right bound."""
    torch.set_num_threads(1)
    runner = TorchModelRunner(load_model(FOLDER, dtype=torch.float32, device="cpu"), ATTENTION_BACKENDS["torch"]())
    config = LoopConfig("scripted", block_size, MASK, 64, block_size, 2, 32, 16)
    prompt = text_ids(2 * block_size + 1)
    row = pb.StartRow(
        request_id="a",
        attempt=1,
        prompt_length=len(prompt),
        prefix_ids=pack_ids(prompt[: 2 * block_size]),
        block_index=2,
        block_ids=pack_ids(prompt[2 * block_size :] + [MASK] * (block_size - 1)),
        block_mask=pack_bits([False] + [True] * (block_size - 1)),
        algorithm="LowConfidence",
        sampling=pb.SamplingParams(top_p=1),
        tokens_left=30,
    )
    reply = Driver(DenoiseLoop(runner, config, lambda: 0.0)).run(starts=[row])
    assert unpack_ids(reply.rows.done_ids) == naive_blocks(prompt, 1, "LowConfidence", block_size)

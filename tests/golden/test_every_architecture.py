"""A tiny random checkpoint of every architecture in the published form, served from its folder by both services."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from common.errors import InvalidField
from common.model_folder import ModelFolder, read_model_folder
from tests.e2e.served import answers as answers_of
from tests.e2e.served import run_together, serving
from tests.golden import published_loops
from tests.golden.loops_of import loop_of
from tests.model.forwards import random_ids
from tests.model.published import CONFIGS, published, write_published
from tests.scheduler.in_memory import Bench, play
from worker_svc.denoise import DenoiseLoop
from worker_svc.models.loading import load_model

MASK = 259
NUM_REQUESTS = 16
SIZES = {"LLaDA2MoeModelLM": 8, "SDARForCausalLM": 4, "SDARMoeForCausalLM": 16, "Fast_dLLM_QwenForCausalLM": 16}


def folder_of(path: Path, name: str, block_size: int) -> ModelFolder:
    """Written as published, read with the block size that a flag would give."""
    model = published(name, head_scale=5.0)
    write_published(path, name, model.config, model.weights)
    return read_model_folder(path, block_size=block_size, mask_token_id=MASK, context_length=512)


@functools.cache
def requests_of(name: str) -> list[tuple[list[int], int]]:
    """Prompts of all lengths around the blocks' borders, and how much to generate."""
    size = SIZES[name]
    lengths = [1, size - 1, size, size + 1, 2 * size, 3 * size + 2]
    return [
        ([token % 250 for token in random_ids(lengths[n % 6], seed=n)], size + 1 + 3 * n % size)
        for n in range(NUM_REQUESTS)
    ]


@functools.cache
def expected_of(name: str) -> list[list[int]]:
    """What the published loop with its published parameters makes of them, one at a time and without KV."""
    size, forward = SIZES[name], published(name, head_scale=5.0).forward
    reference: Callable[..., list[int]]
    if name == "Fast_dLLM_QwenForCausalLM":
        reference = functools.partial(published_loops.fast_dllm, threshold=0.9, small_block_size=8)
    elif name == "LLaDA2MoeModelLM":
        choose = published_loops.llada20(0.95, size, size)
        reference = functools.partial(published_loops.fill_masks, choose=choose)
    else:
        choose = published_loops.sdar("low_confidence_dynamic", 0.85, size, size)
        reference = functools.partial(published_loops.fill_masks, choose=choose)
    return [
        reference(forward, prompt, count, block_size=size, mask_id=MASK, stop_ids=())
        for prompt, count in requests_of(name)
    ]


def make_loop(folder: ModelFolder, **switches: Any) -> DenoiseLoop:
    return loop_of(
        load_model(folder, dtype=None, device="cpu"),
        block_size=folder.block_size,
        mask_id=folder.mask_token_id,
        logit_shift=folder.logit_shift,
        batch_invariant=True,
        fingerprint=folder.fingerprint,
        **switches,
    )


def serve(
    bench: Bench,
    name: str,
    which: slice = slice(None),
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[list[int]]:
    """The published ids of the requests, all at once; none names an algorithm."""
    published_ids: list[list[int]] = []

    async def scene() -> None:
        streams = [
            await bench.submit(f"r{n}", prompt, count, ignore_eos=True)
            for n, (prompt, count) in enumerate(requests_of(name)[which])
        ]
        if meanwhile is not None:
            await meanwhile()
        published_ids.extend([(await bench.read(stream))[0] for stream in streams])

    play(bench, scene)
    return published_ids


@pytest.mark.parametrize(
    ("settings", "fused_commit"),
    [
        ({"rounds_in_flight": 1}, False),
        ({"rounds_in_flight": 2}, True),
        ({"dllm_fdfo": False}, False),
    ],
    ids=["fdfo", "fdfo-overlap-fused", "sync"],
)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_sixteen_together_get_what_the_published_loop_makes(
    tmp_path: Path, name: str, settings: dict[str, Any], fused_commit: bool
) -> None:
    """Batch-invariant, in both modes, with and without overlap and fused commits: the reference's tokens."""
    folder = folder_of(tmp_path, name, SIZES[name])
    loop = make_loop(folder, fused_commit=fused_commit and not folder.logit_shift)
    assert serve(Bench(loop, folder=folder, **settings), name) == expected_of(name)
    assert loop.pool.usage().held == 0


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_one_alone_gets_the_same(tmp_path: Path, name: str) -> None:
    """A batch of one, with overlap."""
    folder = folder_of(tmp_path, name, SIZES[name])
    bench = Bench(make_loop(folder, slots=1), folder=folder)
    assert serve(bench, name, slice(4, 6)) == expected_of(name)[4:6]


def test_a_pool_that_is_too_small_changes_no_token(tmp_path: Path) -> None:
    """Shifted logits: rows are preempted, also where the next block's first token is known to the worker only."""
    name = "Fast_dLLM_QwenForCausalLM"
    folder = folder_of(tmp_path, name, SIZES[name])
    loop = make_loop(folder, num_pages=14)
    bench = Bench(loop, folder=folder)
    assert serve(bench, name) == expected_of(name)
    assert bench.scheduler.counters.preemptions > 0
    assert loop.pool.usage().held == 0


@pytest.mark.parametrize("forwards", [4, 9, 14])
def test_a_worker_that_dies_changes_no_token(tmp_path: Path, forwards: int) -> None:
    """Shifted logits: its requests go on at the restarted one, some of them without their block's first token."""
    name = "Fast_dLLM_QwenForCausalLM"
    folder = folder_of(tmp_path, name, SIZES[name])
    bench = Bench(make_loop(folder), folder=folder)

    async def die() -> None:
        link = bench.links[0]
        while link.loop.totals.forwards < forwards:
            await asyncio.sleep(0)
        link.is_dead = True
        while bench.scheduler.loops[0].is_ready:
            await asyncio.sleep(0)
        link.loop, link.is_dead = make_loop(folder), False

    assert serve(bench, name, meanwhile=die) == expected_of(name)
    assert bench.scheduler.counters.restarts > 0


def refused_or_warned(path: Path, name: str, algorithm: str) -> tuple[str, list[Any]]:
    """What a request with this algorithm is refused with, and what is logged of it; and which is the default."""
    folder = folder_of(path, name, SIZES[name])
    bench, refusals = Bench(make_loop(folder), folder=folder), []

    async def scene() -> None:
        try:
            await bench.read(await bench.submit("a", [1, 2], 4, algorithm=algorithm))
        except InvalidField as error:
            refusals.append(str(error))

    with structlog.testing.capture_logs() as logs:
        play(bench, scene)
    assert bench.scheduler.info().algorithm == folder.algorithms[0]
    return "".join(refusals), [entry["hint"] for entry in logs if entry["event"] == "algorithm_may_not_fit"]


@pytest.mark.parametrize(
    ("name", "algorithm", "refusal", "hint"),
    [
        ("LLaDA2MoeModelLM", "JointThreshold", "", "LLaDA2.0 is not"),
        ("LLaDA2MoeModelLM", "EntropyBounded", "", ""),
        ("SDARForCausalLM", "JointThreshold", "", "not trained for it; what fits is LowConfidenceDynamic, "),
        ("Fast_dLLM_QwenForCausalLM", "JointThreshold", "JointThreshold cannot run on this model", ""),
    ],
)
def test_an_algorithm_that_does_not_fit(tmp_path: Path, name: str, algorithm: str, refusal: str, hint: str) -> None:
    """Who uses one that may not fit is told so once; one that cannot run is refused; those that fit are silent."""
    said, hints = refused_or_warned(tmp_path, name, algorithm)
    assert refusal in said and bool(said) == bool(refusal)
    assert [hint in text for text in hints] == [True] * bool(hint)


def test_processes_serve_shifted_logits(tmp_path: Path) -> None:
    """`fdfo serve` on a folder of Fast-dLLM v2: the published algorithm is the default, and the answers are its."""
    name = "Fast_dLLM_QwenForCausalLM"
    folder_of(tmp_path / "model", name, 16)
    flags = ["--model-path", str(tmp_path / "model"), "--block-size", "16", "--mask-token-id", str(MASK)]
    flags += ["--batch-invariant", "--max-total-tokens", "4096", "--context-length", "512"]
    options = [
        {"prompt_ids": prompt, "max_new_tokens": count, "ignore_eos": True} for prompt, count in requests_of(name)[:6]
    ]
    with serving(tmp_path / "log", *flags) as served:
        found = answers_of(run_together(served.target, options))
    assert [list(ids) for _, ids, *_ in found] == expected_of(name)[:6]  # type: ignore[call-overload]

"""A tiny random checkpoint of every architecture in the published form, served from its folder by both services."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog.testing

from common.errors import InvalidField
from common.model_folder import ModelFolder, read_model_folder
from tests.e2e.served import answers as answers_of
from tests.e2e.served import run_together, serving
from tests.golden import published_loops
from tests.golden.loops_of import loop_of
from tests.model.forwards import random_ids
from tests.model.published import Published, published, write_published
from tests.scheduler.in_memory import Bench, play
from worker_svc.denoise import DenoiseLoop
from worker_svc.models.loading import load_model

MASK = 259
NUM_REQUESTS = 16


class Checkpoint(NamedTuple):
    """What is served, and the published loop that its answers are compared with."""

    architecture: str
    block_size: int
    reference: Callable[..., list[int]]  # takes forward, prompt, count, block_size, mask_id, stop_ids
    algorithm: str = ""  # of the scheduler; empty = the published one
    max_post_edit_steps: int | None = None  # of each request; None = the default
    seed: int = 0
    head_scale: float = 10.0  # some blocks take a forward a token, others few

    @property
    def model(self) -> Published:
        return published(self.architecture, self.seed, self.head_scale)


def llada20(size: int) -> Callable[..., list[int]]:
    return functools.partial(published_loops.fill_masks, choose=published_loops.llada20(0.95, size, size))


def sdar(architecture: str, size: int) -> Checkpoint:
    choose = published_loops.sdar("low_confidence_dynamic", 0.85, size, size)
    return Checkpoint(architecture, size, functools.partial(published_loops.fill_masks, choose=choose))


llada21 = functools.partial(published_loops.llada21, threshold=0.5, editing_threshold=0.0, max_post_steps=3)
fast_dllm = functools.partial(published_loops.fast_dllm, threshold=0.9, small_block_size=8)
CHECKPOINTS = {
    "LLaDA2.0": Checkpoint("LLaDA2MoeModelLM", 8, llada20(8)),
    "LLaDA2.0-CAP": Checkpoint("LLaDA2MoeModelLM", 32, llada20(32), seed=1, head_scale=20.0),  # sure of more
    "LLaDA2.1": Checkpoint("LLaDA2MoeModelLM", 8, llada21, algorithm="JointThreshold", max_post_edit_steps=3),
    **{f"SDAR-b{size}": sdar("SDARForCausalLM", size) for size in (4, 16, 32, 64)},
    **{f"SDAR-MoE-b{size}": sdar("SDARMoeForCausalLM", size) for size in (4, 16, 32, 64)},
    "Fast-dLLM-v2": Checkpoint("Fast_dLLM_QwenForCausalLM", 32, fast_dllm),
}
SHIFTED = Checkpoint("Fast_dLLM_QwenForCausalLM", 16, fast_dllm)


def folder_of(path: Path, checkpoint: Checkpoint) -> ModelFolder:
    """Written as published, read with the block size that a flag would give."""
    write_published(path, checkpoint.architecture, checkpoint.model.config, checkpoint.model.weights)
    return read_model_folder(path, block_size=checkpoint.block_size, mask_token_id=MASK, context_length=512)


def requests_of(size: int) -> list[tuple[list[int], int]]:
    """Prompts of all lengths around the blocks' borders, and how much to generate: up to one and a half blocks."""
    lengths = [1, size - 1, size, size + 1, 2 * size - 1, 2 * size + 1]
    return [
        ([token % 250 for token in random_ids(lengths[n % 6], seed=n)], 1 + 7 * n % (size + size // 2))
        for n in range(NUM_REQUESTS)
    ]


@functools.cache
def expected_of(checkpoint: Checkpoint) -> list[list[int]]:
    """What the published loop with its published parameters makes of them, one at a time and without KV."""
    size, forward = checkpoint.block_size, checkpoint.model.forward
    return [
        checkpoint.reference(forward, prompt, count, block_size=size, mask_id=MASK, stop_ids=())
        for prompt, count in requests_of(size)
    ]


def make_loop(folder: ModelFolder, **switches: Any) -> DenoiseLoop:
    return loop_of(
        load_model(folder, dtype=None, device="cpu"),
        block_size=folder.block_size,
        mask_id=folder.mask_token_id,
        logit_shift=folder.logit_shift,
        batch_invariant=True,
        fingerprint=folder.fingerprint,
        fused_commit=not folder.logit_shift,
        **switches,
    )


def serve(
    bench: Bench,
    which: slice = slice(None),
    max_post_edit_steps: int | None = None,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[list[int]]:
    """The published ids of the requests, all at once; none names an algorithm."""
    published_ids: list[list[int]] = []
    params = {} if max_post_edit_steps is None else {"max_post_edit_steps": max_post_edit_steps}

    async def scene() -> None:
        streams = [
            await bench.submit(f"r{n}", prompt, count, ignore_eos=True, algorithm_params=params)
            for n, (prompt, count) in enumerate(requests_of(bench.scheduler.folder.block_size)[which])
        ]
        if meanwhile is not None:
            await meanwhile()
        published_ids.extend([(await bench.read(stream))[0] for stream in streams])

    play(bench, scene)
    return published_ids


@pytest.mark.parametrize(
    "settings",
    [{"rounds_in_flight": 1}, {"rounds_in_flight": 2}, {"dllm_fdfo": False}],
    ids=["fdfo-1", "fdfo-2", "sync"],
)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_served_is_what_the_published_loop_makes(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Sixteen together and one alone, batch-invariant, in both modes, with and without overlap, with fused commits
    where there are any: the reference's tokens."""
    checkpoint = CHECKPOINTS[name]
    folder = folder_of(tmp_path, checkpoint)
    for slots, which in ((NUM_REQUESTS, slice(None)), (1, slice(4, 6))):
        loop = make_loop(folder, slots=slots)
        bench = Bench(loop, folder=folder, dllm_algorithm=checkpoint.algorithm, **settings)
        assert serve(bench, which, checkpoint.max_post_edit_steps) == expected_of(checkpoint)[which]
        assert loop.pool.usage().held == 0


def test_a_pool_that_is_too_small_changes_no_token(tmp_path: Path) -> None:
    """Shifted logits: rows are preempted, also where the next block's first token is known to the worker only."""
    folder = folder_of(tmp_path, SHIFTED)
    loop = make_loop(folder, num_pages=6)
    bench = Bench(loop, folder=folder)
    assert serve(bench) == expected_of(SHIFTED)
    assert bench.scheduler.counters.preemptions > 0
    assert loop.pool.usage().held == 0


@pytest.mark.parametrize("forwards", [4, 9, 14])
def test_a_worker_that_dies_changes_no_token(tmp_path: Path, forwards: int) -> None:
    """Shifted logits: its requests go on at the restarted one, some of them without their block's first token."""
    folder = folder_of(tmp_path, SHIFTED)
    bench = Bench(make_loop(folder), folder=folder)

    async def die() -> None:
        link = bench.links[0]
        while link.loop.totals.forwards < forwards:
            await asyncio.sleep(0)
        link.is_dead = True
        while bench.scheduler.loops[0].is_ready:
            await asyncio.sleep(0)
        link.loop, link.is_dead = make_loop(folder), False

    assert serve(bench, meanwhile=die) == expected_of(SHIFTED)
    assert bench.scheduler.counters.restarts > 0


def refused_or_warned(path: Path, checkpoint: Checkpoint, algorithm: str) -> tuple[str, list[Any]]:
    """What a request with this algorithm is refused with, and what is logged of it; and which is the default."""
    folder = folder_of(path, checkpoint)
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
        ("LLaDA2.0", "JointThreshold", "", "LLaDA2.0 is not"),
        ("LLaDA2.0", "EntropyBounded", "", ""),
        ("SDAR-b4", "JointThreshold", "", "not trained for it; what fits is LowConfidenceDynamic, "),
        ("Fast-dLLM-v2", "JointThreshold", "JointThreshold cannot run on this model", ""),
    ],
)
def test_an_algorithm_that_does_not_fit(tmp_path: Path, name: str, algorithm: str, refusal: str, hint: str) -> None:
    """Who uses one that may not fit is told so once; one that cannot run is refused; those that fit are silent."""
    said, hints = refused_or_warned(tmp_path, CHECKPOINTS[name], algorithm)
    assert refusal in said and bool(said) == bool(refusal)
    assert [hint in text for text in hints] == [True] * bool(hint)


def test_processes_serve_shifted_logits(tmp_path: Path) -> None:
    """`fdfo serve` on a folder of Fast-dLLM v2: the published algorithm is the default, and the answers are its."""
    folder_of(tmp_path / "model", SHIFTED)
    flags = ["--model-path", str(tmp_path / "model"), "--block-size", "16", "--mask-token-id", str(MASK)]
    flags += ["--batch-invariant", "--max-total-tokens", "4096", "--context-length", "512"]
    options = [
        {"prompt_ids": prompt, "max_new_tokens": count, "ignore_eos": True}
        for prompt, count in requests_of(SHIFTED.block_size)[:6]
    ]
    with serving(tmp_path / "log", *flags) as served:
        found = answers_of(run_together(served.target, options))
    assert [list(ids) for _, ids, *_ in found] == expected_of(SHIFTED)[:6]  # type: ignore[call-overload]

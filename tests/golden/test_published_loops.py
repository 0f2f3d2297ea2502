"""Every architecture's decode loop, as its publication describes it, against the worker's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden import published_loops
from tests.golden.loops_of import answers, loop_of, row_of
from tests.model.forwards import model_of, random_ids
from tests.model.published import published
from worker_svc.denoise import DenoiseLoop

MASK = 259
THRESHOLDS = (0.05, 0.5, 0.95)
Generate = Callable[[list[int], int, Collection[int]], list[int]]  # prompt, gen_length, stop ids -> generated ids


class Case(NamedTuple):
    """One published way to decode, and what a request says to get it."""

    architecture: str
    block_size: int
    algorithm: str
    params: dict[str, float]
    reference: Callable[..., list[int]]  # the loop, with what it needs beside prompt, length and stop ids


def cases() -> list[Case]:
    """Published loops with their options, small blocks so that the reference ends in time."""
    found = []
    for threshold in THRESHOLDS:
        for name, size, steps in (("LLaDA2MoeModelLM", 8, 8), ("LLaDA2MoeModelLM", 8, 3)):
            choose = published_loops.llada20(threshold, size, steps)
            reference = functools.partial(published_loops.fill_masks, choose=choose)
            algorithm = "LowConfidence" if steps == size else "LowConfidenceDynamic"
            params = {"threshold": threshold} | ({} if steps == size else {"denoising_steps": steps})
            found.append(Case(name, size, algorithm, params, reference))
        found.append(
            Case(
                "LLaDA2MoeModelLM",
                8,
                "JointThreshold",
                {"threshold": threshold, "edit_threshold": 0.3, "max_post_edit_steps": 3},
                functools.partial(
                    published_loops.llada21, threshold=threshold, editing_threshold=0.3, max_post_steps=3
                ),
            )
        )
        for name, size, steps in (("SDARForCausalLM", 4, 4), ("SDARMoeForCausalLM", 8, 3)):
            for remasking, algorithm in (
                ("low_confidence_dynamic", "LowConfidenceDynamic"),
                ("low_confidence_static", "LowConfidenceStatic"),
                ("sequential", "Sequential"),
            ):
                choose = published_loops.sdar(remasking, threshold, size, steps)
                has_threshold = algorithm == "LowConfidenceDynamic"
                if has_threshold or threshold == 0.5:
                    params = {"denoising_steps": steps} | ({"threshold": threshold} if has_threshold else {})
                    reference = functools.partial(published_loops.fill_masks, choose=choose)
                    found.append(Case(name, size, algorithm, params, reference))
        for size in (64, 7, 1) if threshold == 0.5 else ():  # the largest, an odd and the smallest
            choose = published_loops.sdar("low_confidence_dynamic", threshold, size, size)
            reference = functools.partial(published_loops.fill_masks, choose=choose)
            found.append(Case("SDARForCausalLM", size, "LowConfidenceDynamic", {"threshold": threshold}, reference))
        bound = 10 * threshold
        reference = functools.partial(published_loops.fill_masks, choose=published_loops.entropy_bounded(bound))
        found.append(Case("SDARForCausalLM", 8, "EntropyBounded", {"entropy_bound": bound}, reference))
        for size, small in ((8, 4), (32 if threshold == 0.5 else 16, 8)):
            reference = functools.partial(published_loops.fast_dllm, threshold=threshold, small_block_size=small)
            params = {"threshold": threshold, "sub_block_size": small}
            found.append(Case("Fast_dLLM_QwenForCausalLM", size, "HierarchyBlock", params, reference))
    return found


def id_of(case: Case) -> str:
    values = "-".join(f"{value:g}" for value in case.params.values())
    return f"{case.architecture}-{case.block_size}-{case.algorithm}-{values}"


def make_loop(case: Case, **switches: Any) -> DenoiseLoop:
    model = published(case.architecture, head_scale=5.0)
    shift = int(case.architecture.startswith("Fast"))
    return loop_of(
        model_of(model.config, model.weights),
        block_size=case.block_size,
        mask_id=MASK,
        logit_shift=shift,
        **switches,
    )


def generate(case: Case) -> Generate:
    plain = published(case.architecture, head_scale=5.0).forward
    known: dict[tuple[int, ...], Tensor] = {}  # stop ids change how far it goes, not what it sees on its way

    def forward(ids: list[int], block_size: int) -> Tensor:
        if tuple(ids) not in known:
            known[tuple(ids)] = plain(ids, block_size)
        return known[tuple(ids)]

    reference = functools.partial(case.reference, forward, block_size=case.block_size, mask_id=MASK)
    return lambda prompt, gen_length, stop_ids: reference(prompt, gen_length, stop_ids=stop_ids)


def prompts(case: Case) -> list[list[int]]:
    """One that ends in its first block, at a block's border, and in a later block with the mask id as text."""
    size = case.block_size
    with_mask = random_ids(2 * size + 3, seed=3)
    with_mask[1] = with_mask[2 * size] = with_mask[2 * size + 2] = MASK
    return [[token % 250 for token in random_ids(length, seed=length)] for length in (1, 2 * size)] + [
        [token if token == MASK else token % 250 for token in with_mask]
    ]


@pytest.mark.parametrize("case", cases(), ids=id_of)
def test_the_published_loop_and_the_worker_agree(case: Case) -> None:
    """Token for token, in both modes: without a stop id, with one that comes early or late, with one of the prompt."""
    reference, gen_length = generate(case), max(6, 2 * case.block_size + 1)
    requests: list[tuple[list[int], list[int]]] = []
    for prompt in prompts(case):
        free = reference(prompt, gen_length, ())
        assert len(free) == gen_length
        late = max(free, key=free.index)
        requests += [(prompt, [stop]) for stop in (MASK, free[1], late, prompt[0])]
    expected = [reference(prompt, gen_length, stop_ids) for prompt, stop_ids in requests]
    assert len({len(ids) for ids in expected}) > 2, "the stop ids must make a difference"
    for mode in (pb.MODE_FDFO, pb.MODE_SYNC):
        loop = make_loop(case)
        rows = [
            row_of(
                f"r{n}",
                prompt,
                loop,
                gen_length,
                stop_token_ids=stop_ids,
                algorithm=case.algorithm,
                algorithm_params=case.params,
            )
            for n, (prompt, stop_ids) in enumerate(requests)
        ]
        assert answers(loop, rows, mode) == expected
        assert loop.pool.usage().held == 0

"""What a step makes of logits in bf16, by what torch makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import BLOCK, MASK, Driver, effort, make_loop, start
from worker_svc.algorithms import ALGORITHMS, sampling
from worker_svc.step import step, step_rows

VOCAB = 256


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of a tensor that an operation gave, by dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves: Iterable[object] = tree_leaves(result)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.most[leaf.dtype] = max(self.most.get(leaf.dtype, 0), leaf.numel())
        return result


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_in_fp32_is_larger_than_a_group(algorithm: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of [positions, vocabulary] there is no copy in fp32 or float64 beyond a group of rows, whichever the algorithm,
    with greedy and with sampled rows and with log probabilities of all."""
    loop = make_loop()
    rows = [
        start(
            f"r{number}",
            effort(9),
            algorithm=algorithm,
            want_logprobs=True,
            sampling=pb.SamplingParams(temperature=float(sampled and number % 2), top_p=0.9),
        )
        for number in range(4)
    ]
    Driver(loop).run(starts=rows, max_forwards=1)
    residents = list(loop.sessions["s"].rows.values())
    batch = step_rows(residents, torch.tensor([row.slot for row in residents]), [True] * 4, loop.columns)
    group = BLOCK * VOCAB
    monkeypatch.setattr(sampling, "MAX_LOGITS_AT_ONCE", group)
    logits = torch.randn(4, BLOCK, VOCAB).to(torch.bfloat16)
    with torch.inference_mode(), Sizes() as sizes:
        step(batch, logits, loop.columns, MASK)
    assert sizes.most[torch.float32] == group
    assert sizes.most.get(torch.float64, 0) <= group

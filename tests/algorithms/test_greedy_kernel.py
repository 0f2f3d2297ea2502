"""The Triton kernel, run by Triton's interpreter on the CPU, against torch's operations."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from tests.algorithms.batches import make_batch, make_row, random_logits
from worker_svc.algorithms import sampling
from worker_svc.algorithms.sampling import candidates

os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton, whose own functions are made then
pytest.importorskip("triton", reason="Triton comes with a torch for CUDA; `pip install triton` for its interpreter")
MASK = 7


@pytest.fixture
def kernel() -> Any:
    """The module, made for the interpreter."""
    return importlib.import_module("worker_svc.algorithms.greedy_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [None, 2.5])
def test_one_pass_finds_what_torch_finds(kernel: Any, dtype: torch.dtype, penalty: float | None) -> None:
    """Tokens and probabilities of logits of several tiles, the last one not full, with ties, with -inf all over a tile,
    and with a penalty on the token before."""
    vocab_size = 2 * kernel.TILE + 100
    logits = random_logits(3, 3, 4, vocab_size, 3.0)
    logits[0, 1, : kernel.TILE] = float("-inf")
    logits[1, 2, [5, 900, vocab_size - 1]] = 50.0  # the first of equals
    logits[2, :, MASK] = 90.0  # never chosen
    logits[2, 3, 11] = 60.0
    rows = [make_row([3, None, 11, None], MASK), make_row([None] * 4, MASK), make_row([4, 5, 11, 12], MASK)]
    batch = make_batch(rows)
    penalties = None if penalty is None else torch.full((3,), penalty)
    logits[2, 2, 5] = 70.0  # the token before: only the penalty lets another one win
    logits[2, 2, 6] = 69.0
    logits = logits.to(dtype)
    expected_tokens, expected = candidates(batch, logits.clone(), penalties)
    previous = sampling.previous_tokens(batch) if penalty is not None else None
    before = logits.clone()
    tokens, probabilities = kernel.best_tokens(logits, MASK, previous, penalties)
    assert torch.equal(logits, before)
    assert tokens.equal(expected_tokens)
    assert tokens[2, 2] == (5 if penalty is None else 6)
    assert tokens[1, 2] == 5 and (tokens != MASK).all()
    assert torch.allclose(probabilities, expected, rtol=1e-5)


def test_a_row_alone_has_the_bits_it_has_in_a_batch(kernel: Any) -> None:
    """A position is a program of its own."""
    logits = random_logits(4, 3, 2, kernel.TILE + 3, 2.0).to(torch.bfloat16)
    together = kernel.best_tokens(logits, MASK)
    for row in range(3):
        alone = kernel.best_tokens(logits[row : row + 1], MASK)
        assert all(one[row : row + 1].equal(other) for one, other in zip(together, alone, strict=True))

"""The best token of each position and its probability in one pass over the logits: a Triton kernel, for CUDA.

It reads each logit once, in the model's dtype, and writes nothing of their size; the same with torch's operations reads
and writes about 15 times as many bytes, in fp32 copies of groups of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # logits a program looks at together
LOWEST = tl.constexpr(-3.0e38)


@triton.jit  # type: ignore[untyped-decorator]
def _best(  # type: ignore[no-untyped-def]
    logits,
    previous,
    penalty,
    tokens,
    probabilities,
    vocab_size,
    block_size,
    mask_token_id,
    HAS_PENALTY: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    best = tl.full((), LOWEST, tl.float32)
    token = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float64)  # of the weights so far, relative to the best
    for start in range(0, vocab_size, TILE):
        ids = start + offsets
        values = tl.load(logits + place * vocab_size + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        if HAS_PENALTY:
            taken_off = tl.load(penalty + place // block_size)
            values = tl.where(ids == tl.load(previous + place), values - taken_off, values)
        values = tl.where(ids == mask_token_id, float("-inf"), values)
        tile_best = tl.max(values, axis=0)
        new_best = tl.maximum(best, tile_best)
        token = tl.where(tile_best > best, start + tl.argmax(values, axis=0), token)  # the first of equals
        tile_total = tl.sum(tl.exp(values - new_best), axis=0)
        total = total * tl.exp(best - new_best).to(tl.float64) + tile_total.to(tl.float64)
        best = new_best
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(probabilities + place, (1.0 / total).to(tl.float32))


def best_tokens(
    logits: Tensor, mask_token_id: int, previous: Tensor | None = None, penalty: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The most probable token but `mask_token_id` of each position, int64 [R, B], and its probability, float32 [R, B].

    `logits` [R, B, V], any float type, are only read. `penalty` float32 [R] is taken off the logit of the token
    `previous` int64 [R, B], -1 = of none. Rows do not depend on each other; one with NaN is undefined.
    """
    num_rows, block_size, vocab_size = logits.shape
    tokens = torch.empty((num_rows, block_size), dtype=torch.int64, device=logits.device)
    probabilities = torch.empty((num_rows, block_size), dtype=torch.float32, device=logits.device)
    _best[(num_rows * block_size,)](
        logits.contiguous(),
        tokens if previous is None else previous.contiguous(),
        probabilities if penalty is None else penalty.contiguous(),
        tokens,
        probabilities,
        vocab_size,
        block_size,
        mask_token_id,
        HAS_PENALTY=penalty is not None,
        TILE=TILE,
    )
    return tokens, probabilities

"""Batches to learn from: clean blocks, and copies of the answers' blocks with masks and wrong tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

END_ID, MASK_ID, NUM_SPECIAL = 0, 1, 5
PADDING_WEIGHT = 0.1  # of the loss at tokens behind an answer's end
SHOWN_WEIGHT = 0.2  # at right tokens among wrong ones


@dataclass(frozen=True)
class NoisyBatch:
    """N problems of U units each, blocks of B tokens: `num_clean` clean ones first, then noisy ones."""

    ids: Tensor  # int64 [N, U, B]
    positions: Tensor  # int64 [N, U, B]
    num_clean: int
    visible: Tensor  # bool [N, U, num_clean + 1]: which clean units a unit sees, and itself
    labels: Tensor  # int64 [N, U, B]
    weights: Tensor  # float32 [N, U, B]: of the loss at each token; units that only fill up have none


def noisy_batch(
    encoded: Sequence[tuple[list[int], list[int]]], block_size: int, vocab_size: int, generator: torch.Generator
) -> NoisyBatch:
    """Of each (turn, answer) the blocks before the last one clean, and every block of the answer in three noisy copies.

    1. Random masks, in a quarter of the copies nothing but masks.
    2. The first tokens of the answer and masks behind them, as when it is worked out one after the other.
    3. Random masks, and some of the other tokens replaced by wrong ones.
    """
    rows = [_blocks(*pair, block_size) for pair in encoded]
    num_clean = max(len(clean) for clean, _, _ in rows) - 1
    num_units = num_clean + 3 * max(len(clean) - first for clean, first, _ in rows)
    shape = (len(rows), num_units, block_size)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels, weights = torch.zeros_like(ids), torch.zeros(shape)
    index = torch.zeros(shape[:2], dtype=torch.int64)  # of the block in its sequence
    index[:, :num_clean] = torch.arange(num_clean)
    for row, (clean, first, weight) in enumerate(rows):
        ids[row, : len(clean) - 1] = clean[:-1]
        others = clean[clean >= NUM_SPECIAL]
        for block in range(first, len(clean)):
            at = num_clean + 3 * (block - first)
            ids[row, at : at + 3], weights[row, at : at + 3] = _copies(
                clean[block], weight[block], others, vocab_size, generator
            )
            labels[row, at : at + 3], index[row, at : at + 3] = clean[block], block
    # A row's clean units that only fill up come after all its blocks.
    visible = torch.cat((torch.arange(num_clean) < index[..., None], torch.ones(*shape[:2], 1, dtype=torch.bool)), 2)
    positions = index[..., None] * block_size + torch.arange(block_size)
    return NoisyBatch(ids, positions, num_clean, visible, labels, weights)


def _blocks(turn: list[int], answer: list[int], block_size: int) -> tuple[Tensor, int, Tensor]:
    """Tokens [blocks, B], the first block with a token of the answer, and the weight [blocks, B] of each token."""
    length = len(turn) + len(answer)
    padding = -length % block_size
    weights = [0.0] * len(turn) + [1.0] * len(answer) + [PADDING_WEIGHT] * padding
    tokens = torch.tensor([*turn, *answer, *[END_ID] * padding])
    return tokens.view(-1, block_size), len(turn) // block_size, torch.tensor(weights).view(-1, block_size)


def _copies(
    clean: Tensor, weight: Tensor, others: Tensor, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids and weights [3, B] of a block's three copies; its answer is where it weighs something."""
    size, is_answer = len(clean), weight > 0
    draws = torch.rand(4, size, generator=generator)
    all_masked, ratio, edit_ratio, wrong_ratio, cut = torch.rand(5, generator=generator).tolist()
    numbers = torch.where(is_answer, torch.arange(size), size)
    first = int(numbers.min())
    masked = torch.stack(
        [
            torch.ones(size, dtype=torch.bool) if all_masked < 0.25 else draws[0] < 0.15 + 0.85 * ratio,
            torch.arange(size) >= first + int(cut * (size - first)),
            draws[1] < 0.9 * edit_ratio,
        ]
    )
    masked &= is_answer
    wrong = is_answer & ~masked[2] & (draws[2] < 0.02 + 0.3 * wrong_ratio)
    any_id = torch.randint(NUM_SPECIAL, vocab_size, (size,), generator=generator)
    other = others[torch.randint(len(others), (size,), generator=generator)]
    ids = torch.where(masked, MASK_ID, clean)
    ids[2] = torch.where(wrong, torch.where(draws[3] < 0.3, any_id, other), ids[2])
    weights = weight * masked
    weights[2] += weight * (wrong + SHOWN_WEIGHT * (is_answer & ~masked[2] & ~wrong))
    return ids, weights

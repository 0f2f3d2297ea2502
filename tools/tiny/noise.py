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
    """U blocks of B tokens for each of N problems; blocks that only fill up see themselves and weigh nothing."""

    ids: Tensor  # int64 [N, U * B]
    positions: Tensor  # int64 [N, U * B]
    visible: Tensor  # bool [N, U * B, U * B]: a block sees itself and the clean ones before it
    labels: Tensor  # int64 [N, U * B]
    weights: Tensor  # float32 [N, U * B]: of the loss at each token


def noisy_batch(
    encoded: Sequence[tuple[list[int], list[int]]], block_size: int, vocab_size: int, generator: torch.Generator
) -> NoisyBatch:
    """Of each (turn, answer) the blocks before the last one clean, and every block of the answer in three noisy copies.

    1. Random masks, in a quarter of the copies nothing but masks.
    2. The first tokens of the answer and masks behind them, as when it is worked out one after the other.
    3. Random masks, and some of the other tokens replaced by wrong ones.
    """
    rows = [_blocks(*pair, block_size) for pair in encoded]
    num_units = max(len(clean) - 1 + 3 * (len(clean) - first) for clean, first, _ in rows)
    shape = (len(rows), num_units, block_size)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels, weights = torch.zeros_like(ids), torch.zeros(shape)
    index = torch.zeros(shape[:2], dtype=torch.int64)  # of the block in its sequence
    is_clean = torch.zeros(shape[:2], dtype=torch.bool)
    for row, (clean, first, weight) in enumerate(rows):
        num_clean = len(clean) - 1
        ids[row, :num_clean] = clean[:-1]
        index[row, :num_clean] = torch.arange(num_clean)
        is_clean[row, :num_clean] = True
        unit = num_clean
        for block in range(first, len(clean)):
            copies = slice(unit, unit + 3)
            noisy, noisy_weight = _copies(
                clean[block], weight[block], clean[clean >= NUM_SPECIAL], vocab_size, generator
            )
            ids[row, copies], weights[row, copies] = noisy, noisy_weight
            labels[row, copies], index[row, copies] = clean[block], block
            unit += 3
    before = is_clean[:, None, :] & (index[:, None, :] < index[:, :, None])
    sees = before | torch.eye(num_units, dtype=torch.bool)
    visible = sees.repeat_interleave(block_size, dim=1).repeat_interleave(block_size, dim=2)
    positions = index[..., None] * block_size + torch.arange(block_size)
    return NoisyBatch(ids.flatten(1), positions.flatten(1), visible, labels.flatten(1), weights.flatten(1))


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

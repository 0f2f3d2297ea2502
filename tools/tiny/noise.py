"""Batches to learn from: clean blocks, and copies of the answers' blocks with masks and wrong tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

END_ID, MASK_ID, NUM_SPECIAL = 0, 1, 5
NUM_COPIES = 3
PADDING_WEIGHT = 0.1  # of the loss at tokens behind an answer's end
RIGHT_WEIGHT = 0.2  # at right tokens among wrong ones


@dataclass(frozen=True)
class NoisyBatch:
    """N problems of U units each, blocks of B tokens: `num_clean` clean ones first, then the noisy copies."""

    ids: Tensor  # int64 [N, U, B]
    positions: Tensor  # int64 [N, U, B]
    num_clean: int
    visible: Tensor  # bool [N, U, num_clean + 1]: which clean units a unit sees, and itself
    labels: Tensor  # int64 [N, U, B]: the right tokens
    answer: Tensor  # float32 [N, U, B]: what is to be learned in noisy units, 0 elsewhere; PADDING_WEIGHT behind it
    right_weight: Tensor  # float32 [U, 1]

    def weights(self) -> Tensor:
        """Of the loss at each token, float32 [N, U, B]: `answer` at masks and wrong tokens, less at right ones."""
        return self.answer * torch.where(self.ids == self.labels, self.right_weight, 1.0)

    def with_copy(self, copy: int) -> NoisyBatch:
        """The same with the clean units and one copy of each block alone: 0, 1 or 2."""
        num_units = self.ids.shape[1]
        units = [*range(self.num_clean), *range(self.num_clean + copy, num_units, NUM_COPIES)]
        rest = (self.labels[:, units], self.answer[:, units], self.right_weight[units])
        return NoisyBatch(self.ids[:, units], self.positions[:, units], self.num_clean, self.visible[:, units], *rest)

    def set_third_copies(self, ids: Tensor) -> None:
        """In three of four problems. ids: of all units of `with_copy`, with what is now in its noisy ones."""
        is_set = torch.arange(len(ids)) % 4 > 0
        self.ids[is_set, self.num_clean + 2 :: NUM_COPIES] = ids[is_set, self.num_clean :]


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
    num_units = num_clean + NUM_COPIES * max(len(clean) - first for clean, first, _ in rows)
    shape = (len(rows), num_units, block_size)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels, answer = torch.zeros_like(ids), torch.zeros(shape)
    index = torch.zeros(shape[:2], dtype=torch.int64)  # of the block in its sequence
    index[:, :num_clean] = torch.arange(num_clean)
    for row, (clean, first, weights) in enumerate(rows):
        ids[row, : len(clean) - 1] = clean[:-1]
        others = clean[clean >= NUM_SPECIAL]
        for block in range(first, len(clean)):
            at = num_clean + NUM_COPIES * (block - first)
            units = slice(at, at + NUM_COPIES)
            ids[row, units] = _copies(clean[block], weights[block] > 0, others, vocab_size, generator)
            labels[row, units], answer[row, units], index[row, units] = clean[block], weights[block], block
    # A row's clean units that only fill up come after all its blocks, so none of its units sees them.
    visible = torch.cat((torch.arange(num_clean) < index[..., None], torch.ones(*shape[:2], 1, dtype=torch.bool)), 2)
    positions = index[..., None] * block_size + torch.arange(block_size)
    right_weight = torch.zeros(num_units, 1)
    right_weight[num_clean + 2 :: NUM_COPIES] = RIGHT_WEIGHT
    return NoisyBatch(ids, positions, num_clean, visible, labels, answer, right_weight)


def _blocks(turn: list[int], answer: list[int], block_size: int) -> tuple[Tensor, int, Tensor]:
    """Tokens [blocks, B], the first block with a token of the answer, and the weight [blocks, B] of each token."""
    padding = -(len(turn) + len(answer)) % block_size
    weights = [0.0] * len(turn) + [1.0] * len(answer) + [PADDING_WEIGHT] * padding
    tokens = torch.tensor([*turn, *answer, *[END_ID] * padding])
    return tokens.view(-1, block_size), len(turn) // block_size, torch.tensor(weights).view(-1, block_size)


def _copies(clean: Tensor, is_answer: Tensor, others: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Ids [3, B] of a block's copies."""
    size = len(clean)
    draws = torch.rand(4, size, generator=generator)
    all_masked, ratio, cut, edit_ratio, wrong_ratio = torch.rand(5, generator=generator).tolist()
    first = int(is_answer.int().argmax())
    masked = torch.stack(
        [
            torch.full((size,), all_masked < 0.25) | (draws[0] < 0.15 + 0.85 * ratio),
            torch.arange(size) >= first + int(cut * (size - first)),
            draws[1] < 0.9 * edit_ratio,
        ]
    )
    ids = torch.where(masked & is_answer, MASK_ID, clean)
    wrong = is_answer & ~masked[2] & (draws[2] < 0.02 + 0.3 * wrong_ratio)
    any_id = torch.randint(NUM_SPECIAL, vocab_size, (size,), generator=generator)
    other = others[torch.randint(len(others), (size,), generator=generator)]
    ids[2] = torch.where(wrong, torch.where(draws[3] < 0.3, any_id, other), ids[2])
    return ids

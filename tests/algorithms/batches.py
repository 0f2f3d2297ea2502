"""Step batches from plain rows, and a small model whose logits are a fixed function of the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.algorithms.naive import NaiveRow
from worker_svc.algorithms.base import DllmAlgorithm, SamplingColumns, StepBatch

Model = Callable[[Tensor], Tensor]  # ids int64 [R, B] -> logits float32 [R, B, V], each row by itself


def make_row(ids: Sequence[int | None], mask_token_id: int, *, num_prompt: int = 0, **settings: object) -> NaiveRow:
    """A row whose `None` positions are masked; the first `num_prompt` ones are prompt."""
    return NaiveRow(
        ids=[mask_token_id if token is None else token for token in ids],
        masked=[token is None for token in ids],
        editable=[position >= num_prompt for position in range(len(ids))],
        mask_token_id=mask_token_id,
        **{"params": {}, **settings},  # type: ignore[arg-type]
    )


def defaults(algorithm: DllmAlgorithm, **changes: float) -> dict[str, float]:
    """The algorithm's parameters with some changed."""
    return {param.name: param.default for param in algorithm.params} | changes


def make_batch(rows: Sequence[NaiveRow]) -> StepBatch:
    """The rows as tensors; all of them have the same block size and mask token."""

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return StepBatch(
        ids=torch.tensor([row.ids for row in rows]),
        masked=torch.tensor([row.masked for row in rows]),
        editable=torch.tensor([row.editable for row in rows]),
        block_index=integers([row.block_index for row in rows]),
        step_index=integers([row.step_index for row in rows]),
        sampling=SamplingColumns(
            temperature=floats([row.temperature for row in rows]),
            top_p=floats([row.top_p for row in rows]),
            min_p=floats([row.min_p for row in rows]),
            top_k=integers([row.top_k for row in rows]),
            seed=integers([row.seed - (1 << 64 if row.seed >> 63 else 0) for row in rows]),
            sample_index=integers([row.sample_index for row in rows]),
            any_sampling=any(row.temperature > 0 for row in rows),
        ),
        params={name: floats([row.params[name] for row in rows]) for name in rows[0].params},
        mask_token_id=rows[0].mask_token_id,
    )


def random_logits(seed: int, num_rows: int, block_size: int, vocab_size: int, scale: float) -> Tensor:
    """float32 [R, B, V]; scale 0 = flat."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, block_size, vocab_size, generator=generator) * scale


def small_model(seed: int, block_size: int, vocab_size: int, scale: float) -> Model:
    """Logits that depend on every id of the row's block; multiples of 2**-6, so that their sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    from_ids = torch.randn(block_size, block_size, vocab_size, vocab_size, generator=generator)
    from_ids = (from_ids * scale * 64 / block_size**0.5).round() / 64

    def logits(ids: Tensor) -> Tensor:
        to, of = torch.arange(block_size)[:, None], torch.arange(block_size)[None, :]
        by_source: Tensor = from_ids[to, of, ids[:, None, :]]
        return by_source.sum(dim=2)

    return logits


def run_block(algorithm: DllmAlgorithm, batch: StepBatch, model: Model, max_steps: int) -> list[int]:
    """Steps until every row is done; the forwards each row took. A done row is stepped on a copy only."""
    num_rows = batch.ids.shape[0]
    state = algorithm.init_step_state(num_rows, "cpu")
    forwards = [0] * num_rows
    done = torch.zeros(num_rows, dtype=torch.bool)
    for count in range(1, max_steps + 1):
        before = batch.ids.clone(), batch.masked.clone()
        done_now = algorithm.step(batch, model(batch.ids), state)
        batch.step_index += 1
        batch.ids.copy_(torch.where(done[:, None], before[0], batch.ids))
        batch.masked.copy_(torch.where(done[:, None], before[1], batch.masked))
        for row in range(num_rows):
            if done_now[row] and not done[row]:
                forwards[row] = count
        done |= done_now
        if done.all():
            return forwards
    raise AssertionError(f"rows {(~done).nonzero().flatten().tolist()} are not done after {max_steps} forwards")

"""Candidates: greedy choice, filters, draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms import naive
from tests.algorithms.batches import make_batch, make_row, random_logits
from tests.algorithms.naive import NaiveRow
from worker_svc.algorithms import sampling
from worker_svc.algorithms.base import StepBatch
from worker_svc.algorithms.sampling import candidates, draw_uniforms
from worker_svc.records import log_probabilities

MASK = 0


def row(block_size: int = 4, **sampling_settings: Any) -> NaiveRow:
    return make_row([None] * block_size, MASK, **sampling_settings)


def find(rows: list[NaiveRow], logits: Tensor) -> tuple[Tensor, Tensor]:
    return candidates(make_batch(rows), logits.clone())


def uniforms_of(batch: StepBatch) -> Tensor:
    return draw_uniforms(batch.sampling, batch.block_index, batch.step_index, batch.ids.shape[1])


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 2**32 - 1),
    block_index=st.integers(0, 2**31),
    step_index=st.integers(0, 2**31),
)
def test_uniforms_equal_those_of_unbounded_integers(
    seed: int, sample_index: int, block_index: int, step_index: int
) -> None:
    """The wrapped int64 arithmetic gives the bits of the same hash in Python's integers."""
    one = row(seed=seed, sample_index=sample_index, block_index=block_index, step_index=step_index)
    expected = [naive.uniform(seed, sample_index, block_index, step_index, position) for position in range(4)]
    assert uniforms_of(make_batch([one]))[0].tolist() == expected


def test_uniforms_are_fixed() -> None:
    """The hash is part of what a seed means: these numbers stay the same in every version."""
    numbers = uniforms_of(make_batch([row(2, seed=0), row(2, seed=2**64 - 1, sample_index=1, block_index=2)]))
    assert numbers.tolist() == [
        [0.47141042966848024, 0.6477578607352581],
        [0.21022390892082088, 0.5369710798679717],
    ]


@pytest.mark.parametrize("name", ["seed", "sample_index", "block_index", "step_index"])
def test_each_field_changes_the_uniforms(name: str) -> None:
    """Draws differ when any one of seed, sample, block and step differs, and from position to position."""
    numbers = uniforms_of(make_batch([row(), row(**{name: 1})])).flatten().tolist()
    assert len(set(numbers)) == len(numbers)


def test_uniforms_are_uniform_over_fields() -> None:
    """Counted up in any field, the numbers fill ten bins evenly (chi-square, 9 degrees, fixed seeds)."""
    for name in ("seed", "sample_index", "block_index", "step_index"):
        numbers = uniforms_of(make_batch([row(**{name: count}) for count in range(2500)])).flatten()
        observed = torch.histc(numbers, bins=10, min=0, max=1)
        assert ((observed - 1000) ** 2 / 1000).sum() < 27.9, name  # p = 0.001


@settings(max_examples=150, deadline=None)
@given(
    data_seed=st.integers(0, 2**32),
    vocab_size=st.integers(2, 12),
    scale=st.sampled_from([0.0, 1.0, 6.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.0078125, 0.25, 0.875, 1.0]),
    min_p=st.sampled_from([0.0, 0.125, 0.625, 1.0]),
)
def test_draws_agree_with_the_naive_version(
    data_seed: int, vocab_size: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """A drawn token passed the filters, has its probability after them, and is where the uniform number falls."""
    # The filters' values are exact in float32, so that ties are ties in both versions.
    one = row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=data_seed)
    logits = random_logits(data_seed, 1, 4, vocab_size, scale)
    tokens, confidences = find([one], logits)
    for position in range(4):
        one.closest = math.inf
        probabilities = naive.filtered_probabilities(one, logits[0, position].tolist())
        if one.closest < 1e-5:
            continue  # rounding decides what a filter keeps
        token = int(tokens[0, position])
        number = naive.uniform(one.seed, 0, 0, 0, position)
        assert probabilities[token] > 0
        assert float(confidences[0, position]) == pytest.approx(probabilities[token], rel=1e-5)
        assert sum(probabilities[:token]) - 1e-5 <= number <= sum(probabilities[: token + 1]) + 1e-5


@settings(deadline=None)
@given(data_seed=st.integers(0, 2**32), vocab_size=st.integers(2, 40), scale=st.sampled_from([0.0, 1.0, 10.0, 1e4]))
def test_greedy_confidence_is_the_softmax_probability(data_seed: int, vocab_size: int, scale: float) -> None:
    """Temperature 0 takes the best token but the mask, with its float32 softmax probability to rounding."""
    logits = random_logits(data_seed, 1, 4, vocab_size, scale)
    tokens, confidences = find([row()], logits)
    probabilities = logits.index_fill(2, torch.tensor([MASK]), -torch.inf).softmax(dim=-1)
    best = probabilities.max(dim=-1)
    torch.testing.assert_close(confidences, best.values, rtol=3e-7, atol=0)
    assert tokens.equal(logits[:, :, 1:].argmax(dim=-1) + 1)


def test_equal_logits_give_the_lowest_id() -> None:
    """Among equal logits the candidate is the lowest id that is not the mask."""
    for vocab_size in (3, 8, 33, 1000):
        tokens, confidences = find([row()], torch.zeros(1, 4, vocab_size))
        assert tokens.tolist() == [[1] * 4]
        assert confidences.flatten().tolist() == pytest.approx([1 / (vocab_size - 1)] * 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_a_candidate(temperature: float) -> None:
    """However sure the model is of the mask token, another one comes, with its probability among the others."""
    logits = torch.zeros(1, 4, 3)
    logits[..., MASK] = 50.0
    tokens, confidences = find([row(temperature=temperature)], logits)
    assert (tokens != MASK).all()
    assert confidences.tolist() == [[0.5] * 4]


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.5, "top_k": 3, "seed": 4, "sample_index": 2},
    {"temperature": 2.0, "top_p": 0.7, "min_p": 0.05, "seed": 5, "block_index": 9, "step_index": 2},
]


def test_a_row_depends_on_nothing_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled rows have the same bits alone and in a mixed batch, also when it is filtered in groups."""
    rows = [row(seed=1), *(row(**kwargs) for kwargs in SAMPLED), row(seed=2, top_k=1, top_p=0.1, min_p=0.9)]
    logits = random_logits(7, len(rows), 4, 50, 2.0)
    alone = [find([one], logits[[place]]) for place, one in enumerate(rows)]
    for max_logits in (1, 2 * 4 * 50, 1 << 26):
        monkeypatch.setattr(sampling, "MAX_LOGITS_AT_ONCE", max_logits)
        tokens, confidences = find(rows, logits)
        assert tokens.equal(torch.cat([one[0] for one in alone]))
        assert confidences.equal(torch.cat([one[1] for one in alone]))


def test_a_greedy_row_comes_from_the_kernel_in_all_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is the kernel, whose sums are rounded otherwise than torch's, a greedy row has its results beside
    sampled rows too, and a sampled row has none of them."""
    logits, penalty = random_logits(5, 3, 4, 30, 1.0), torch.full((3,), 1.5)
    rows = [row(), row(temperature=1.0, seed=3), row()]
    expected = candidates(make_batch(rows), logits.clone(), penalty)
    seen = []

    def kernel(given: Tensor, mask: int, previous: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((given.clone(), mask, previous, off))
        return torch.full(given.shape[:2], 29), torch.full(given.shape[:2], 0.125)

    monkeypatch.setattr(sampling, "greedy_kernel", lambda device: kernel)
    tokens, probabilities = candidates(make_batch(rows), logits.clone(), penalty)
    assert (tokens[[0, 2]] == 29).all() and (probabilities[[0, 2]] == 0.125).all()
    assert tokens[1].equal(expected[0][1]) and probabilities[1].equal(expected[1][1])
    alone = candidates(make_batch(rows[:1]), logits[:1].clone(), penalty[:1])
    assert tokens[:1].equal(alone[0]) and probabilities[:1].equal(alone[1])
    given, mask, previous, off = seen[0]
    assert given.equal(logits) and mask == MASK and previous.equal(sampling.previous_tokens(make_batch(rows)))
    assert off.equal(penalty)


def test_logits_in_bfloat16_are_summed_in_groups_as_if_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest logit, log-sum-exp and entropy of bf16 logits, a row at a time in fp32, are those of a float64 copy."""
    monkeypatch.setattr(sampling, "MAX_LOGITS_AT_ONCE", 1)
    logits = random_logits(8, 3, 4, 5000, 3.0).to(torch.bfloat16)
    naive_logits = logits.double()
    naive_logits[..., 0] = float("-inf")
    expected = naive_logits.log_softmax(dim=-1)
    logprobs = log_probabilities(logits.clone(), expected.argmax(dim=-1))
    naive_raw = logits.double().log_softmax(dim=-1).gather(-1, expected.argmax(dim=-1, keepdim=True)).squeeze(-1)
    assert torch.allclose(logprobs.double(), naive_raw, atol=1e-5)
    entropy = sampling.entropies(logits.clone(), 0)
    assert torch.allclose(entropy.double(), (-expected.exp() * expected.nan_to_num(neginf=0)).sum(-1), atol=1e-4)
    tokens, confidences = find([row(seed=1)] * 3, logits)
    assert tokens.equal(expected.argmax(dim=-1))
    assert torch.allclose(confidences.double(), expected.amax(dim=-1).exp(), rtol=1e-5)


def test_parameters_of_the_first_row_are_not_those_of_all() -> None:
    """Rows of one batch with the same logits and seed, but other parameters, get what their own parameters say."""
    logits = random_logits(1, 1, 32, 20, 0.5)
    rows = [
        row(32, temperature=1.0),
        row(32),
        row(32, temperature=1.0, top_k=1),
        row(32, temperature=1.0, top_k=2),
        row(32, temperature=100.0),
        row(32, temperature=1.0, seed=1),
    ]
    tokens, _ = find(rows, logits.expand(len(rows), 32, 20))
    best_two = logits[0, :, 1:].topk(2, dim=-1).indices + 1
    assert tokens[1].equal(best_two[:, 0])
    assert tokens[2].equal(best_two[:, 0])
    assert (tokens[3, :, None] == best_two).any(dim=-1).all()
    assert len({tuple(one) for one in tokens.tolist()}) == len(rows) - 1  # only greedy and top_k 1 agree


def test_temperature_zero_does_not_sample() -> None:
    """With temperature 0, seed and filters change nothing, also beside a row that samples."""
    logits = random_logits(2, 1, 4, 20, 0.1).expand(3, 4, 20)
    tokens, confidences = find([row(seed=1, top_k=2, top_p=0.5), row(seed=2), row(temperature=1.0)], logits)
    assert tokens[0].equal(tokens[1])
    assert confidences[0].equal(confidences[1])
    assert tokens[0].equal(logits[0, :, 1:].argmax(dim=-1) + 1)


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}, {"temperature": 2.0}])
def test_draws_follow_the_distribution(kwargs: dict[str, Any]) -> None:
    """Over 8000 fixed draws each token comes as often as its filtered probability says (chi-square)."""
    logits = torch.tensor([9.0, 0.0, 1.0, 2.0, -1.0, 1.5])
    one = row(**{"temperature": 1.0, **kwargs})
    rows = [replace(one, seed=seed) for seed in range(2000)]
    tokens, _ = find(rows, logits.expand(len(rows), 4, 6))
    observed = tokens.flatten().bincount(minlength=6).tolist()
    expected = [8000 * probability for probability in naive.filtered_probabilities(one, logits.tolist())]
    assert all(count == 0 for count, mean in zip(observed, expected, strict=True) if mean == 0)
    possible = [(count, mean) for count, mean in zip(observed, expected, strict=True) if mean > 0]
    critical = {2: 10.8, 3: 13.8, 5: 18.5}[len(possible)]  # p = 0.001
    assert sum((count - mean) ** 2 / mean for count, mean in possible) < critical


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    """Four tokens tie for the first place and top_k is 2: all four are drawn, no other."""
    logits = torch.tensor([0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    tokens, confidences = find(
        [row(temperature=1.0, top_k=2, seed=seed) for seed in range(50)], logits.expand(50, 4, 6)
    )
    assert set(tokens.flatten().tolist()) == {2, 3, 4, 5}
    assert (confidences == 0.25).all()


def test_top_p_takes_equal_tokens_by_id() -> None:
    """Of ten equal tokens top_p 0.25 keeps the first three: the sum has passed it with the third."""
    tokens, _ = find([row(temperature=1.0, top_p=0.25, seed=seed) for seed in range(50)], torch.zeros(50, 4, 11))
    assert set(tokens.flatten().tolist()) == {1, 2, 3}


@pytest.mark.parametrize("kwargs", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_strictest_filters_keep_the_best_token(kwargs: dict[str, Any]) -> None:
    """No filter leaves a row without a token; the best one remains, with probability 1."""
    logits = random_logits(3, 1, 4, 20, 1.0)
    tokens, confidences = find([row(temperature=1.0, **kwargs)], logits)
    assert tokens.equal(logits[:, :, 1:].argmax(dim=-1) + 1)
    assert (confidences == 1).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e38])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
def test_extreme_numbers_stay_finite(temperature: float, scale: float) -> None:
    """Very small and very large temperatures and logits give a real token and a probability."""
    tokens, confidences = find([row(temperature=temperature)], random_logits(4, 1, 4, 20, scale))
    assert ((tokens > 0) & (tokens < 20)).all()
    assert ((confidences > 0) & (confidences <= 1)).all()


def test_tokens_of_probability_zero_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the uniform numbers the drawn token is a possible one, though impossible ones lie around it."""
    logits = torch.full((1, 4, 9), -1000.0)
    logits[..., 3], logits[..., 5] = 1.0, 1.0
    ends = torch.tensor([[0.0, 2.0**-53, 0.5 - 2.0**-53, 1 - 2.0**-53]], dtype=torch.float64)
    monkeypatch.setattr(sampling, "draw_uniforms", lambda *_: ends)
    tokens, _ = find([row(temperature=1.0)], logits)
    assert tokens.tolist() == [[3, 3, 3, 5]]

"""From the logits of a block to one candidate token for each position, with its probability.

The order: the mask token's logit becomes minus infinity; the penalty; division by the temperature; top-k (every value
that ties with the k-th largest stays); top-p on what is left (tokens in falling order, equal ones by id, until their
sum has passed p; the first always stays); min-p (tokens below min_p times the largest probability go); softmax.
Temperature 0 takes the most probable token, the lowest id among equals, with its probability at temperature 1.

A draw takes one uniform number a position from a counter hash and looks it up in the cumulative distribution, tokens
in the order of their ids. There is no generator to carry: the number is a function of (seed, sample, block, step,
position), whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from worker_svc.algorithms.base import SamplingColumns, StepBatch

# Logits are looked at in fp32, in groups of rows with at most so many: the fp32 copy of a whole batch would be larger
# than all else that a forward keeps, and filters need about 50 bytes a logit.
MAX_LOGITS_AT_ONCE = 1 << 26


def row_groups(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of `logits` [R, B, V] in groups, each also as float32 [r, B, V]: a copy, or the logits themselves where
    they are float32."""
    at_once = max(1, MAX_LOGITS_AT_ONCE // max(1, logits[0].numel())) if len(logits) else 1
    for first in range(0, len(logits), at_once):
        rows = slice(first, first + at_once)
        yield rows, logits[rows].float()


def greedy_kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`best_tokens` of greedy_kernel.py where it runs: Triton comes with a torch for CUDA only."""
    if device.type != "cuda":
        return None
    from worker_svc.algorithms.greedy_kernel import best_tokens

    return best_tokens


def candidates(batch: StepBatch, logits: Tensor, penalty: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token for every position, masked or not: ids int64 [R, B] and their probabilities float32 [R, B].

    `logits` [R, B, V] may be overwritten. `penalty` float32 [R] is taken off the logit of the token that now stands at
    the previous position of the block, from position 1 on; a masked position holds no token.
    For a sampled row the probability is that of the drawn token after the filters. A greedy row has the same bits
    whether or not others are sampled.
    """
    sampling = batch.sampling
    previous = None if penalty is None else previous_tokens(batch)
    best_tokens = greedy_kernel(logits.device)
    if best_tokens is not None:
        tokens, probabilities = best_tokens(logits, batch.mask_token_id, previous, penalty)
        if not sampling.any_sampling:
            return tokens, probabilities
    else:
        tokens, probabilities = torch.zeros_like(batch.ids), torch.zeros_like(batch.ids, dtype=torch.float32)
    uniforms = None
    if sampling.any_sampling:
        uniforms = draw_uniforms(sampling, batch.block_index, batch.step_index, batch.ids.shape[1])
    for rows, group in row_groups(logits):
        group[..., batch.mask_token_id] = float("-inf")
        if penalty is not None and previous is not None:
            places = previous[rows, 1:, None]
            group[:, 1:].scatter_add_(2, places, -penalty[rows, None, None].expand(places.shape))
        top_logits, best = group.max(dim=-1, keepdim=True)  # the first of equals
        # From here on relative to the largest one: no temperature can make them overflow.
        group.sub_(top_logits)
        drawn = None if uniforms is None else _draw(group, sampling, rows, uniforms[rows])
        if best_tokens is None:
            tokens[rows], probabilities[rows] = best.squeeze(-1), _probability_of_best(group)
        if drawn is not None:
            is_sampled = sampling.temperature[rows, None] > 0
            tokens[rows] = torch.where(is_sampled, drawn[0], tokens[rows])
            probabilities[rows] = torch.where(is_sampled, drawn[1], probabilities[rows])
    return tokens, probabilities


def previous_tokens(batch: StepBatch) -> Tensor:
    """int64 [R, B]: the token before each position of the block, -1 at the first. Where that is masked it is the mask
    token, whose logit is minus infinity already."""
    standing = torch.where(batch.masked, batch.mask_token_id, batch.ids)
    return torch.nn.functional.pad(standing[:, :-1], (1, 0), value=-1)


def entropies(logits: Tensor, mask_token_id: int) -> Tensor:
    """float32 [R, B], in nats: of the distributions that `logits` [R, B, V] give without the mask token, whose logit
    becomes minus infinity; nothing else of them changes.

    Sums are float64 so that their order, which changes with the batch, does not show in the result.
    """
    logits[..., mask_token_id] = float("-inf")
    result = torch.zeros(logits.shape[:2], dtype=torch.float32, device=logits.device)
    for rows, group in row_groups(logits):
        relative = group - group.amax(dim=-1, keepdim=True)
        weights = relative.exp()
        # A weight of 0 adds nothing, and 0 times minus infinity would.
        products = relative.mul_(weights).nan_to_num_(nan=0.0)
        total = weights.sum(dim=-1, dtype=torch.float64)
        result[rows] = (total.log() - products.sum(dim=-1, dtype=torch.float64) / total).to(torch.float32)
    return result


def _probability_of_best(relative: Tensor) -> Tensor:
    """float32 [r, B] from logit - largest logit, which is overwritten: the best token's weight is 1.

    The sum is float64 so that its order, which changes with the batch, does not show in the result.
    """
    return relative.exp_().sum(dim=-1, dtype=torch.float64).reciprocal().to(torch.float32)


def _draw(logits: Tensor, sampling: SamplingColumns, rows: slice, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Filter and draw for these rows: ids int64 [r, B], probabilities float32 [r, B]. Largest logit 0 everywhere.

    Rows of temperature 0 get a result that the caller drops.
    """
    temperature, top_p, min_p = (
        column[rows, None, None] for column in (sampling.temperature, sampling.top_p, sampling.min_p)
    )
    vocab_size = logits.shape[-1]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)

    top_k = sampling.top_k[rows, None, None]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kept = ordered >= ordered.gather(-1, (top_k - 1).expand(*ordered.shape[:-1], 1))

    ordered_weights = ordered.exp().mul_(kept)
    sums = ordered_weights.cumsum(dim=-1, dtype=torch.float64)
    sum_before = sums - ordered_weights
    kept &= (sum_before <= top_p * sums[..., -1:]) | (top_p >= 1)
    kept &= ordered_weights >= min_p  # the largest weight is 1

    weights = scaled.exp_().mul_(torch.zeros_like(kept).scatter_(-1, order, kept))
    # A token of weight 0 is never the first above the target, however the sums are rounded; and the target is below
    # the largest sum, as uniform <= 1 - 2**-53.
    sums = weights.cumsum(dim=-1, dtype=torch.float64).masked_fill_(weights == 0, -1.0)
    total = sums.amax(dim=-1, keepdim=True)
    tokens = (sums > uniforms[..., None] * total).to(torch.uint8).argmax(dim=-1, keepdim=True)
    probability = (weights.gather(-1, tokens) / total).to(torch.float32)
    return tokens.squeeze(-1), probability.squeeze(-1)


def draw_uniforms(sampling: SamplingColumns, block_index: Tensor, step_index: Tensor, block_size: int) -> Tensor:
    """float64 [R, block_size], uniform on multiples of 2**-53 in [0, 1): one number for each position of each row.

    hash = mix(seed + G); then for sample, block, step, position in turn hash = mix((hash ^ field) + G), modulo 2**64,
    with the constants and the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014). The number is the upper 53 bits of the hash.
    """
    position = torch.arange(block_size, device=sampling.seed.device)[None, :]
    hashed = mix64(sampling.seed[:, None])
    for field in (sampling.sample_index[:, None], block_index[:, None], step_index[:, None], position):
        hashed = mix64(hashed ^ field)
    return unit_interval(hashed)


def unit_interval(bits: Tensor) -> Tensor:
    """float64 in [0, 1), a multiple of 2**-53, from the upper bits of int64."""
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _signed(bits: int) -> int:
    """The int64 with these 64 bits; torch has no arithmetic for uint64, and int64 wraps to the same bits."""
    return bits - (1 << 64 if bits >> 63 else 0)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def mix64(bits: Tensor) -> Tensor:
    """The output of SplitMix64 for the state int64 `bits`: a hash; every bit of it depends on all bits."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros; `>>` alone shifts in the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)

"""The decode loops of the published models, from their descriptions alone: one request, greedy, without KV, slow.

`forward(ids, block_size)` gives the logits [n, V] of all positions under a block mask. Where the published files err,
the plain intent is followed: which positions are masked is remembered and not read off the ids (a prompt may hold the
mask id), the mask id is never predicted, and a stop id counts in generated positions only. The result is what a user
gets: the generated ids up to the first stop id, at most `gen_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tests.model.published import Forward

Guess = tuple[int, float, float]  # token, its probability, and the entropy of the whole distribution in nats
Choose = Callable[[list[int], list[Guess], int], list[int]]  # masked positions, guesses, step -> positions to fill


def guesses(forward: Forward, ids: list[int], block_size: int, mask_id: int) -> list[Guess]:
    """What the model says of each position of the last block."""
    logits = forward(ids, block_size)[-block_size:].double()
    logits[:, mask_id] = float("-inf")
    distribution = logits.softmax(-1)
    probabilities, tokens = distribution.max(-1)
    entropies = -torch.special.xlogy(distribution, distribution).sum(-1)
    return list(zip(tokens.tolist(), probabilities.tolist(), entropies.tolist(), strict=True))


def cut(generated: list[int], gen_length: int, stop_ids: Collection[int]) -> list[int]:
    """Up to the first stop id, which is included."""
    ends = [place for place, token in enumerate(generated) if token in stop_ids]
    return generated[: min([gen_length, *(place + 1 for place in ends[:1])])]


def surest(masked: list[int], found: list[Guess], count: int) -> list[int]:
    return sorted(masked, key=lambda position: (-found[position][1], position))[:count]


def transfer_schedule(block_size: int, steps: int) -> list[int]:
    """The block split evenly over the steps, the remainder going to the first ones."""
    return [block_size // steps + (step < block_size % steps) for step in range(steps)]


def fill_masks(
    forward: Forward,
    prompt: list[int],
    gen_length: int,
    *,
    block_size: int,
    mask_id: int,
    stop_ids: Collection[int],
    choose: Choose,
) -> list[int]:
    """Block by block: while a mask remains, a forward, and what `choose` says is written. After a block with a stop id
    no other follows. LLaDA2.0 and SDAR differ in `choose` only."""
    ids = list(prompt)
    while len(ids) < len(prompt) + gen_length and not set(stop_ids) & set(ids[len(prompt) :]):
        first = len(ids) // block_size * block_size
        block = ids[first:] + [mask_id] * (first + block_size - len(ids))
        masked, step = list(range(len(ids) - first, block_size)), 0
        while masked:
            found = guesses(forward, ids[:first] + block, block_size, mask_id)
            for position in choose(masked, found, step):
                block[position] = found[position][0]
                masked.remove(position)
            step += 1
        ids[first:] = block
    return cut(ids[len(prompt) :], gen_length, stop_ids)


def llada20(threshold: float, block_size: int, steps: int) -> Choose:
    """All above the threshold, if there are as many as the schedule says; else the surest, as many as it says."""
    schedule = transfer_schedule(block_size, steps)

    def choose(masked: list[int], found: list[Guess], step: int) -> list[int]:
        hits = [position for position in masked if found[position][1] > threshold]
        return hits if len(hits) >= schedule[step] else surest(masked, found, schedule[step])

    return choose


def sdar(remasking: str, threshold: float, block_size: int, steps: int) -> Choose:
    """SDAR's three strategies."""
    schedule = transfer_schedule(block_size, steps)

    def choose(masked: list[int], found: list[Guess], step: int) -> list[int]:
        count = schedule[step]
        if remasking == "sequential":
            return masked[:count]
        hits = [position for position in masked if found[position][1] > threshold]
        if remasking == "low_confidence_dynamic" and len(hits) >= count:
            return hits
        return surest(masked, found, count)

    return choose


def entropy_bounded(bound: float) -> Choose:
    """In order of growing entropy while the running sum stays below the bound, at least one."""

    def choose(masked: list[int], found: list[Guess], step: int) -> list[int]:
        order = sorted(masked, key=lambda position: (found[position][2], position))
        spent, count = 0.0, 0
        while count < len(order) and (spent := spent + found[order[count]][2]) < bound:
            count += 1
        return order[: max(1, count)]

    return choose


def llada21(
    forward: Forward,
    prompt: list[int],
    gen_length: int,
    *,
    block_size: int,
    mask_id: int,
    stop_ids: Collection[int],
    threshold: float,
    editing_threshold: float,
    max_post_steps: int,
) -> list[int]:
    """LLaDA2.1's loop: set tokens may be edited, until a step changes nothing or `max_post_steps` are spent."""
    ids = list(prompt)
    while len(ids) < len(prompt) + gen_length and not set(stop_ids) & set(ids[len(prompt) :]):
        first = len(ids) // block_size * block_size
        num_prompt = max(0, len(prompt) - first)
        block = ids[first:] + [mask_id] * (first + block_size - len(ids))
        masked, post = list(range(len(ids) - first, block_size)), 0
        while True:
            if not masked:
                post += 1
                if post > max_post_steps:
                    break
            found = guesses(forward, ids[:first] + block, block_size, mask_id)
            hits = [position for position in masked if found[position][1] > threshold] or surest(masked, found, 1)
            edits = [
                position
                for position in range(num_prompt, block_size)
                if position not in masked
                and found[position][1] > editing_threshold
                and found[position][0] != block[position]
            ]
            had_masks = bool(masked)
            for position in hits + edits:
                block[position] = found[position][0]
            masked = [position for position in masked if position not in hits]
            if not had_masks and not edits:
                break
        ids[first:] = block
    return cut(ids[len(prompt) :], gen_length, stop_ids)


def fast_dllm(
    forward: Forward,
    prompt: list[int],
    gen_length: int,
    *,
    block_size: int,
    small_block_size: int,
    mask_id: int,
    stop_ids: Collection[int],
    threshold: float,
) -> list[int]:
    """Fast-dLLM v2's loop: the logits of i - 1 speak of i, a block begins with what the last row before it says, and
    sub-blocks are filled from left to right."""

    def first_token_after(ids: list[int]) -> int:
        return guesses(forward, ids, block_size, mask_id)[-1][0]

    ids = list(prompt)
    if len(prompt) % block_size == 0:
        ids.append(first_token_after(ids))
    while len(ids) < len(prompt) + gen_length and not set(stop_ids) & set(ids[len(prompt) :]):
        first = len(ids) // block_size * block_size
        block = ids[first:] + [mask_id] * (first + block_size - len(ids))
        masked = list(range(len(ids) - first, block_size))
        for small in range(0, block_size, small_block_size):
            while here := [position for position in masked if small <= position < small + small_block_size]:
                rows = guesses(forward, ids[:first] + block, block_size, mask_id)
                found = [rows[max(position - 1, 0)] for position in range(block_size)]
                hits = {position for position in here if found[position][1] > threshold}
                for position in hits | set(surest(here, found, 1)):
                    block[position] = found[position][0]
                    masked.remove(position)
        ids[first:] = block
        ids.append(first_token_after(ids))
    return cut(ids[len(prompt) :], gen_length, stop_ids)

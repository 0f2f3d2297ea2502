"""The algorithms once more, one row and one position at a time in plain floats: slow, and plain to read.

`step_*` work on a `NaiveRow` in place and return done. Every comparison of two rounded numbers notes how close it was
in `row.closest`, so that a test can leave out cases that rounding decides; exact ties count as no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MASK_64 = (1 << 64) - 1


@dataclass
class NaiveRow:
    """One block of one row, as lists."""

    ids: list[int]
    masked: list[bool]
    editable: list[bool]
    params: dict[str, float]
    mask_token_id: int
    block_index: int = 0
    step_index: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    post_edit_steps: int = 0
    closest: float = field(default=math.inf)

    def is_above(self, value: float, bound: float) -> bool:
        if value != bound:
            self.closest = min(self.closest, abs(value - bound))
        return value > bound


Logits = list[list[float]]  # [B][V]
NaiveStep = Callable[[NaiveRow, Logits], bool]


def uniform(seed: int, sample_index: int, block_index: int, step_index: int, position: int) -> float:
    """The number of a draw, in Python's unbounded integers."""

    def mix(bits: int) -> int:
        bits &= MASK_64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK_64
        return bits ^ (bits >> 31)

    hashed = mix(seed + 0x9E3779B97F4A7C15)
    for part in (sample_index, block_index, step_index, position):
        hashed = mix((hashed ^ (part & MASK_64)) + 0x9E3779B97F4A7C15)
    return (hashed >> 11) / (1 << 53)


def filtered_probabilities(row: NaiveRow, logits: list[float]) -> list[float]:
    """What a sampled row draws from at one position: temperature, top-k, top-p, min-p, softmax."""
    allowed = [token for token in range(len(logits)) if token != row.mask_token_id]
    largest = max(logits[token] for token in allowed)
    scaled = {token: (logits[token] - largest) / row.temperature for token in allowed}
    ordered = sorted(allowed, key=lambda token: (-scaled[token], token))
    if row.top_k:
        last = scaled[ordered[min(row.top_k, len(ordered)) - 1]]
        ordered = [token for token in ordered if scaled[token] >= last]
    total = math.fsum(math.exp(scaled[token]) for token in ordered)
    kept, before = [], 0.0
    for token in ordered:
        weight = math.exp(scaled[token])
        passed_p = row.top_p < 1 and row.is_above(before / total, row.top_p)
        below_min_p = row.min_p > 0 and row.is_above(row.min_p, weight)
        if not passed_p and not below_min_p:
            kept.append(token)
        before += weight
    total = math.fsum(math.exp(scaled[token]) for token in kept)
    return [math.exp(scaled[token]) / total if token in kept else 0.0 for token in range(len(logits))]


def candidate(row: NaiveRow, position: int, logits: list[float]) -> tuple[int, float]:
    """The token that this step would put at a position, and its probability."""
    if row.temperature > 0:
        probabilities = filtered_probabilities(row, logits)
        target = uniform(row.seed, row.sample_index, row.block_index, row.step_index, position)
        token, total = -1, 0.0
        for possible in (token for token, probability in enumerate(probabilities) if probability > 0):
            token = possible
            total += probabilities[possible]
            if row.is_above(total, target):
                break
        return token, probabilities[token]
    allowed = [token for token in range(len(logits)) if token != row.mask_token_id]
    best = allowed[0]
    for token in allowed:
        if row.is_above(logits[token], logits[best]):
            best = token
    return best, 1 / math.fsum(math.exp(logits[token] - logits[best]) for token in allowed)


def to_fill(row: NaiveRow, confidences: list[float]) -> set[int]:
    """Masked positions above the threshold, or else the most confident one."""
    masked = [position for position, is_masked in enumerate(row.masked) if is_masked]
    hits = {position for position in masked if row.is_above(confidences[position], row.params["threshold"])}
    if hits or not masked:
        return hits
    best = masked[0]
    for position in masked:
        if row.is_above(confidences[position], confidences[best]):
            best = position
    return {best}


def step_low_confidence(row: NaiveRow, logits: Logits) -> bool:
    if not any(row.masked):
        return True
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    for position in to_fill(row, [confidence for _, confidence in found]):
        row.ids[position] = found[position][0]
        row.masked[position] = False
    return False


def step_joint_threshold(row: NaiveRow, logits: Logits) -> bool:
    if not any(row.masked):
        row.post_edit_steps += 1
        if row.post_edit_steps > row.params["max_post_edit_steps"]:
            return True
    had_masks = any(row.masked)
    logits = [list(values) for values in logits]
    for position in range(1, len(logits)):
        if not row.masked[position - 1]:
            logits[position][row.ids[position - 1]] -= row.params["penalty_lambda"]
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    fill = to_fill(row, [confidence for _, confidence in found])
    edits = {
        position
        for position, (token, confidence) in enumerate(found)
        if row.editable[position]
        and not row.masked[position]
        and token != row.ids[position]
        and row.is_above(confidence, row.params["edit_threshold"])
    }
    for position in fill | edits:
        row.ids[position] = found[position][0]
        row.masked[position] = False
    return not had_masks and not edits


def scheduled_count(row: NaiveRow) -> int:
    """How many positions SDAR's schedule gives to this step: the block split evenly, the first steps take the rest."""
    size = len(row.ids)
    steps = int(row.params["denoising_steps"]) or size
    schedule = [size // steps + (1 if step < size % steps else 0) for step in range(steps)]
    return max(1, schedule[row.step_index] if row.step_index < steps else size // steps)


def surest_first(row: NaiveRow, values: list[float]) -> list[int]:
    """The masked positions by falling value, equal ones from the left."""
    masked = [position for position, is_masked in enumerate(row.masked) if is_masked]
    for position in masked:  # how close they are to each other
        for other in masked:
            row.is_above(values[position], values[other])
    return sorted(masked, key=lambda position: (-values[position], position))


def fill_and_report(row: NaiveRow, found: list[tuple[int, float]], positions: Iterable[int]) -> bool:
    """Write the candidates at `positions`; done is what an algorithm that never edits says."""
    done = not any(row.masked)
    for position in positions:
        row.ids[position] = found[position][0]
        row.masked[position] = False
    return done


def step_static(row: NaiveRow, logits: Logits) -> bool:
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    return fill_and_report(row, found, surest_first(row, [c for _, c in found])[: scheduled_count(row)])


def step_dynamic(row: NaiveRow, logits: Logits) -> bool:
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    count, order = scheduled_count(row), surest_first(row, [c for _, c in found])
    hits = [position for position in order if row.is_above(found[position][1], row.params["threshold"])]
    return fill_and_report(row, found, hits if len(hits) >= count else order[:count])


def step_sequential(row: NaiveRow, logits: Logits) -> bool:
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    masked = [position for position, is_masked in enumerate(row.masked) if is_masked]
    return fill_and_report(row, found, masked[: scheduled_count(row)])


def step_entropy_bounded(row: NaiveRow, logits: Logits) -> bool:
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    entropies = []
    for values in logits:
        largest = max(value for token, value in enumerate(values) if token != row.mask_token_id)
        weights = [math.exp(value - largest) for token, value in enumerate(values) if token != row.mask_token_id]
        total = math.fsum(weights)
        entropies.append(-math.fsum(w / total * math.log(w / total) for w in weights if w > 0))
    chosen: list[int] = []
    spent = 0.0
    for position in surest_first(row, [-entropy for entropy in entropies]):
        spent += entropies[position]
        if not row.is_above(row.params["entropy_bound"], spent) and chosen:
            break
        chosen.append(position)
        if not spent < row.params["entropy_bound"]:
            break
    return fill_and_report(row, found, chosen)


def step_hierarchy(row: NaiveRow, logits: Logits) -> bool:
    if not any(row.masked):
        return True
    found = [candidate(row, position, values) for position, values in enumerate(logits)]
    size, hidden = int(row.params["sub_block_size"]), list(row.masked)
    first = row.masked.index(True) // size * size
    row.masked = [masked and first <= position < first + size for position, masked in enumerate(hidden)]
    chosen = to_fill(row, [confidence for _, confidence in found])
    row.masked = hidden
    return fill_and_report(row, found, chosen)


NAIVE_STEPS: dict[str, NaiveStep] = {
    "LowConfidence": step_low_confidence,
    "JointThreshold": step_joint_threshold,
    "LowConfidenceDynamic": step_dynamic,
    "LowConfidenceStatic": step_static,
    "Sequential": step_sequential,
    "EntropyBounded": step_entropy_bounded,
    "HierarchyBlock": step_hierarchy,
}

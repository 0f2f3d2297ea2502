"""A start row, checked before it takes anything: what is wrong becomes the row status `bad state`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import short
from common.limits import MAX_ROW_STOP_TOKEN_IDS
from common.packing import unpack_bits
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import ALGORITHMS
from worker_svc.algorithms.base import DllmAlgorithm
from worker_svc.rows import RowKey, RowName, Start


class BadStart(ValueError):
    """One line that begins with the field's name."""

    def __init__(self, message: str) -> None:
        super().__init__(short(message))


@dataclass(frozen=True)
class StartRules:
    """What a start must fit."""

    block_size: int
    vocab_size: int
    max_blocks: int  # per request, prompt and output together
    logit_shift: int = 0


def decode_start(start: pb.StartRow, rules: StartRules) -> Start:
    """The row of a StartRow; raises BadStart."""
    size = rules.block_size
    if not 0 <= start.block_index < rules.max_blocks:
        raise BadStart(f"block_index: {start.block_index} is over the context length of {rules.max_blocks} blocks")
    block_start = start.block_index * size
    if not 0 < start.prompt_length < block_start + size:
        raise BadStart("prompt_length: at least 1, and the block must have a generated position")
    prefix = _ids(start.prefix_ids, "prefix_ids", block_start, rules.vocab_size)
    block_ids = _ids(start.block_ids, "block_ids", size, rules.vocab_size)
    try:
        mask = unpack_bits(start.block_mask, size)
    except ValueError as error:
        raise BadStart(f"block_mask: {error}") from None
    num_prompt = max(0, start.prompt_length - block_start)
    if any(mask[:num_prompt]):
        raise BadStart("block_mask: a prompt position is masked")
    algorithm = ALGORITHMS.get(start.algorithm)
    if algorithm is None:
        raise BadStart(f"algorithm: {start.algorithm!r} is unknown; known are {', '.join(sorted(ALGORITHMS))}")
    _check(len(start.algorithm_params) <= len(algorithm.params), f"algorithm_params: more than {algorithm.name} has")
    params = _params(algorithm, dict(start.algorithm_params))
    if start.step_count + sum(mask) > algorithm.max_steps(size, params):
        raise BadStart(f"step_count: {start.step_count} leaves too few steps for {sum(mask)} masked positions")
    try:
        state = algorithm.decode_state(start.algo_state, params) if start.algo_state else {}
    except ValueError as error:
        raise BadStart(f"algo_state: {error}") from None
    sampling = start.sampling
    _check(0 <= sampling.temperature < math.inf, "sampling.temperature: finite and not negative")
    _check(0 < sampling.top_p <= 1, "sampling.top_p: above 0, at most 1")
    _check(0 <= sampling.min_p <= 1, "sampling.min_p: 0 to 1")
    _check(len(start.stop_token_ids) <= MAX_ROW_STOP_TOKEN_IDS, f"stop_token_ids: at most {MAX_ROW_STOP_TOKEN_IDS}")
    stops = list(dict.fromkeys(start.stop_token_ids))
    _check(all(stop < rules.vocab_size for stop in stops), "stop_token_ids: outside the vocabulary")
    limit_position = block_start + num_prompt + start.tokens_left
    _check(
        start.tokens_left > 0 and limit_position <= rules.max_blocks * size,
        f"tokens_left: at least 1, and {rules.max_blocks * size} positions at most with what is there",
    )
    steps = _records(start, "first_unmask_steps", torch.int32, size) if start.want_first_unmask_steps else None
    logprobs = _records(start, "logprobs", torch.float32, size) if start.want_logprobs else None
    _check(
        steps is None or bool(((steps >= 0) & (steps < max(start.step_count, 1))).all()),
        "first_unmask_steps: a step that the block has not had",
    )
    _check(logprobs is None or bool((logprobs <= 0).all()), "logprobs: above 0, or no number")
    decoded = Start(
        name=RowName(RowKey(start.request_id, start.sample_index), start.attempt),
        prompt_length=start.prompt_length,
        prefix=prefix.view(start.block_index, size),
        block_index=start.block_index,
        block_ids=block_ids,
        block_mask=torch.tensor(mask),
        is_complete=not any(mask),
        step_count=start.step_count,
        algorithm=start.algorithm,
        params=params,
        state=state,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, rules.vocab_size),
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=stops,
        limit_position=limit_position,
        first_unmask_steps=steps,
        logprobs=logprobs,
    )
    if rules.logit_shift:
        _check(not algorithm.edits, f"algorithm: {algorithm.name} edits, and with shifted logits nothing may")
        return _lead_in(decoded) if mask[0] else decoded
    return decoded


def _lead_in(start: Start) -> Start:
    """With shifted logits a block's first token is known by the forward over the block before, so a start that lacks it
    begins with that one, which is complete. Position 0 is never masked there: a prompt has a token."""
    _check(
        bool(start.block_mask.all()) and start.step_count == 0 and not start.state,
        "block_mask: with shifted logits a block is begun from its first position on",
    )
    return replace(
        start,
        prefix=start.prefix[:-1],
        block_index=start.block_index - 1,
        block_ids=start.prefix[-1],
        block_mask=torch.zeros_like(start.block_mask),
        is_complete=True,
        is_lead_in=True,
    )


def decode_starts(starts: Iterable[pb.StartRow], rules: StartRules) -> list[Start | BadStart]:
    """Each row of a round, or what is wrong with it."""
    decoded: list[Start | BadStart] = []
    for start in starts:
        try:
            decoded.append(decode_start(start, rules))
        except BadStart as error:
            decoded.append(error)
    return decoded


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise BadStart(message)


def _ids(packed: bytes, field: str, count: int, vocab_size: int) -> Tensor:
    """Packed ids as int64 [count], all inside the vocabulary."""
    if len(packed) != 4 * count:
        raise BadStart(f"{field}: {len(packed)} bytes where {count} ids take {4 * count}")
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    ids = torch.frombuffer(bytearray(packed), dtype=torch.int32).to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise BadStart(f"{field}: an id is outside the vocabulary of {vocab_size}")
    return ids


def _records(start: pb.StartRow, field: str, dtype: torch.dtype, size: int) -> Tensor:
    """Packed values of the block's positions, [B] of `dtype`. A block without steps may leave them out: zeros."""
    packed: bytes = getattr(start, field)
    if not packed and start.step_count == 0:
        return torch.zeros(size, dtype=dtype)
    if len(packed) != 4 * size:
        raise BadStart(f"{field}: {len(packed)} bytes where {size} values take {4 * size}")
    return torch.frombuffer(bytearray(packed), dtype=dtype)


def _params(algorithm: DllmAlgorithm, given: dict[str, float]) -> dict[str, float]:
    """All parameters of the algorithm, absent ones at their defaults."""
    params = {param.name: given.pop(param.name, param.default) for param in algorithm.params}
    if given:
        raise BadStart(f"algorithm_params: {algorithm.name} has no {', '.join(sorted(given))}")
    for param in algorithm.params:
        value = params[param.name]
        if not param.min_value <= value <= param.max_value or (param.is_integer and value != int(value)):
            raise BadStart(f"algorithm_params.{param.name}: {value} is not in {param.min_value}..{param.max_value}")
    return params

"""Going on with a request that another call began: the value that travels through its client, made and checked.

A value is a byte with the version, a checksum, and a ResumeState (resume.proto). The checksum finds damage, not intent:
whatever a client could have made up is checked like any input, here and where the committed ids are replayed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from common.errors import InvalidField
from common.fingerprint import short_fingerprint
from common.packing import pack_ids
from fdfo.scheduler.v1 import resume_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2 as api

if TYPE_CHECKING:
    from scheduler_svc.validation import GenerateSpec

VERSION = 1
CHECKSUM_BYTES = 8
MAX_COUNT = 2**48  # of forwards and of rounds, so that they can still be added to


@dataclass(frozen=True)
class Past:
    """A sample as its client knows it. `field`: the path of its Resume, for errors."""

    field: str
    committed_ids: list[int]
    sample: pb.ResumedSample


def request_part(spec: GenerateSpec, seed: int, fingerprint: str) -> pb.ResumedRequest:
    """What every value of a request says of it."""
    sampling = spec.sampling
    options = (
        *(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, seed),
        *(spec.max_new_tokens, spec.stop_strings, spec.request_stop_ids, spec.ignore_eos, spec.num_samples),
        *(spec.algorithm, sorted(spec.algorithm_params.items()), spec.logprobs, spec.first_unmask_steps),
    )
    digest = hashlib.blake2b(pack_ids(spec.prompt_ids), digest_size=16)
    digest.update(repr(options).encode())
    return pb.ResumedRequest(
        fingerprint=short_fingerprint(fingerprint),
        request_hash=digest.digest(),
        seed=seed,
        max_new_tokens=spec.max_new_tokens,
        algorithm=spec.algorithm,
        algorithm_params=spec.algorithm_params,
    )


def encode(state: bytes) -> bytes:
    """The value of a serialised ResumeState."""
    return bytes([VERSION]) + _checksum(state) + state


def decode(value: bytes, field: str) -> pb.ResumeState:
    """Raises InvalidField for what no scheduler of this version made."""
    if not value:
        raise InvalidField(field, "is missing: send the resume value of the last message")
    if value[0] != VERSION:
        raise InvalidField(field, f"is of version {value[0]}; this scheduler knows version {VERSION}")
    checksum, body = value[1 : 1 + CHECKSUM_BYTES], value[1 + CHECKSUM_BYTES :]
    try:
        if checksum == _checksum(body):
            return pb.ResumeState.FromString(body)
    except DecodeError:
        pass
    raise InvalidField(field, "is damaged: send it as it came")


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()


def as_begun(request: api.GenerateRequest, chosen: pb.ResumedRequest) -> api.GenerateRequest:
    """The request with what its first scheduler chose where it leaves something open: another one's defaults may
    differ."""
    begun = api.GenerateRequest()
    begun.CopyFrom(request)
    if not request.sampling.HasField("seed"):
        begun.sampling.seed = chosen.seed
    if not request.HasField("max_new_tokens"):
        begun.max_new_tokens = chosen.max_new_tokens
    begun.algorithm = request.algorithm or chosen.algorithm
    for name, value in chosen.algorithm_params.items():
        if name not in request.algorithm_params:
            begun.algorithm_params[name] = value
    return begun


def check_request(states: Sequence[pb.ResumeState], ours: pb.ResumedRequest) -> None:
    """Raises InvalidField unless every value is of the request that `ours` describes."""
    for i, state in enumerate(states):
        field, theirs = f"resumes[{i}].value", state.request
        if theirs.fingerprint != ours.fingerprint:
            raise InvalidField(
                field, f"is of another model: its fingerprint is {theirs.fingerprint}, ours {ours.fingerprint}"
            )
        if theirs != ours:
            raise InvalidField(field, "is of a request with another prompt or other options")


def read_past(
    resumes: Sequence[api.Resume], states: Sequence[pb.ResumeState], spec: GenerateSpec, vocab_size: int, mask_id: int
) -> dict[int, Past]:
    """The samples that go on, by index. Raises InvalidField."""
    past: dict[int, Past] = {}
    for i, (resume, state) in enumerate(zip(resumes, states, strict=True)):
        field, sample = f"resumes[{i}]", state.sample
        index = sample.sample_index
        if index >= spec.num_samples:
            raise InvalidField(f"{field}.value", f"is of sample {index}; the request has {spec.num_samples}")
        if index in past:
            raise InvalidField(f"{field}.value", f"is of sample {index}, as that of {past[index].field} is")
        if len(resume.committed_ids) > spec.max_new_tokens:
            raise InvalidField(
                f"{field}.committed_ids",
                f"has {len(resume.committed_ids)} ids; the request ends after {spec.max_new_tokens}",
            )
        ids = list(resume.committed_ids)
        for k, token_id in enumerate(ids):
            if token_id >= vocab_size or token_id == mask_id:
                raise InvalidField(
                    f"{field}.committed_ids[{k}]",
                    f"must be below {vocab_size} and not the mask token {mask_id}, not {token_id}",
                )
        _check_counts(f"{field}.value", sample, spec, len(ids))
        past[index] = Past(field, ids, sample)
    return past


def _check_counts(field: str, sample: pb.ResumedSample, spec: GenerateSpec, num_ids: int) -> None:
    usage = sample.usage
    if max(usage.forwards, usage.rounds) > MAX_COUNT:
        raise InvalidField(field, f"counts more than {MAX_COUNT} forwards or rounds")
    if usage.prompt_tokens != len(spec.prompt_ids) or usage.cached_tokens > usage.prompt_tokens:
        raise InvalidField(field, f"counts other prompt tokens than {len(spec.prompt_ids)}")
    num_held = num_ids - usage.completion_tokens
    wanted = (num_held * spec.logprobs, num_held * spec.first_unmask_steps)
    if num_held < 0 or (len(sample.logprobs), len(sample.first_unmask_steps)) != wanted:
        raise InvalidField(field, f"does not fit {num_ids} committed ids")
    if any(math.isnan(value) for value in sample.logprobs):
        raise InvalidField(field, "has a log probability that is not a number")

"""What a client may ask for. Everything wrong is refused here, before any work, naming the field."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.architectures import ARCHITECTURES
from common.errors import InvalidField
from common.limits import MAX_REQUEST_STOP_TOKEN_IDS
from common.model_folder import ModelFolder
from fdfo.scheduler.v1 import scheduler_pb2
from scheduler_svc.conversation import MAX_MESSAGES, count_chars, encode_conversation
from scheduler_svc.resume import Past, as_begun, check_request, decode, read_past, request_part
from scheduler_svc.text import TextCodec
from scheduler_svc.unserved import refuse_unknown_fields, refuse_unsupported

# Ten times the longest prompts; what is refused for its size is hardly looked at.
MAX_CLIENT_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_ABORTED_IDS = 4096
MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_TEMPERATURE = 2.0
MAX_SAMPLES = 16
MAX_PRIORITY = 1000
PROVISIONAL_EVERY_FORWARDS = 4
# Draws are keyed by a signed 64-bit number on the device.
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class ParamInfo:
    """One number that an algorithm takes; both limits are allowed values."""

    name: str
    default: float
    min_value: float
    max_value: float
    is_integer: bool = False


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm as the worker reports it."""

    name: str
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True)
class Rules:
    """What requests are checked against.

    default_params: the server's defaults, for the default algorithm only; the others have their own.
    max_tokens_in_pool: tokens of the largest KV pool among the workers; None while none is known.
    fdfo: whether rounds end before all their blocks are done.
    """

    codec: TextCodec
    folder: ModelFolder
    default_algorithm: str
    default_params: Mapping[str, float]
    algorithms: Mapping[str, AlgorithmInfo]
    max_tokens_in_pool: int | None = None
    fdfo: bool = True


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the most probable token. top_p 1, top_k 0, min_p 0: off. seed None: to be drawn."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None


@dataclass(frozen=True)
class GenerateSpec:
    """A request that can be run. `request_id` may be empty: to be drawn. `algorithm_params` has every parameter.
    `past`: of samples that another call began, by index. `provisional_every_forwards`: 0 = never."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    request_stop_ids: tuple[int, ...]
    ignore_eos: bool
    algorithm: str
    algorithm_params: dict[str, float]
    num_samples: int = 1
    priority: int = 0
    logprobs: bool = False
    first_unmask_steps: bool = False
    provisional_every_forwards: int = 0
    past: Mapping[int, Past] = dataclasses.field(default_factory=dict)


def parse_generate(request: scheduler_pb2.GenerateRequest, rules: Rules) -> GenerateSpec:
    """Raises InvalidField with the field's path in the request. What costs most, encoding the prompt, comes last."""
    _refuse_too_many(request, rules)
    refuse_unknown_fields(request)
    refuse_unsupported(request)
    _check_request_id(request.request_id)
    num_samples, priority = _num_samples(request), _priority(request)
    provisional_every_forwards = _provisional_every_forwards(request, rules)
    if len(request.resumes) > num_samples:
        raise InvalidField("resumes", f"must have at most one entry a sample; it has {len(request.resumes)}")
    states = [decode(resume.value, f"resumes[{i}].value") for i, resume in enumerate(request.resumes)]
    if states:
        request = as_begun(request, states[0].request)
    sampling = _sampling(request.sampling, rules.folder.vocab_size)
    stop_strings = _stop_strings(request.stop)
    request_stop_ids = _request_stop_ids(request.stop_token_ids, rules.folder.vocab_size)
    algorithm = request.algorithm or rules.default_algorithm
    algorithm_params = _algorithm_params(algorithm, request.algorithm_params, rules)
    if request.HasField("max_new_tokens") and request.max_new_tokens == 0:
        raise InvalidField("max_new_tokens", "must be at least 1; leave it out to generate up to the context limit")
    prompt_field, prompt_ids = _prompt(request, rules)
    max_new_tokens = _max_new_tokens(request, prompt_field, len(prompt_ids), rules)
    spec = GenerateSpec(
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_strings=stop_strings,
        request_stop_ids=request_stop_ids,
        ignore_eos=request.ignore_eos,
        algorithm=algorithm,
        algorithm_params=algorithm_params,
        num_samples=num_samples,
        priority=priority,
        logprobs=request.logprobs,
        first_unmask_steps=request.first_unmask_steps,
        provisional_every_forwards=provisional_every_forwards,
    )
    if not states:
        return spec
    folder, seed = rules.folder, request.sampling.seed
    check_request(states, request_part(spec, seed, folder.fingerprint))
    return dataclasses.replace(
        spec, past=read_past(request.resumes, states, spec, folder.vocab_size, folder.mask_token_id)
    )


def check_defaults(rules: Rules) -> None:
    """Raises InvalidField if the server's own defaults are not what its workers serve."""
    _algorithm_params(rules.default_algorithm, rules.default_params, rules)


def check_abort(request: scheduler_pb2.AbortRequest) -> None:
    """Raises InvalidField for more ids than a call may name; unknown ones are the caller's to ignore."""
    if (count := len(request.request_ids)) > MAX_ABORTED_IDS:
        raise InvalidField("request_ids", f"must have at most {MAX_ABORTED_IDS} ids; it has {count}")


def _refuse_too_many(request: scheduler_pb2.GenerateRequest, rules: Rules) -> None:
    """Before anything walks over a list: millions of entries would keep the event loop from everyone else."""
    for field, count, most, what in (
        ("prompt_ids", len(request.prompt_ids.ids), rules.folder.context_length, "tokens (the context limit)"),
        ("messages", len(request.messages.messages), MAX_MESSAGES, "messages"),
        ("resumes", len(request.resumes), MAX_SAMPLES, "entries"),
        *(
            (f"resumes[{i}].committed_ids", len(resume.committed_ids), rules.folder.context_length, "ids")
            for i, resume in enumerate(request.resumes)
        ),
        ("stop", len(request.stop), MAX_STOP_STRINGS, "strings"),
        ("stop_token_ids", len(request.stop_token_ids), MAX_REQUEST_STOP_TOKEN_IDS, "ids"),
    ):
        if count > most:
            raise InvalidField(field, f"must have at most {most} {what}; it has {count}")


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidField(
            "request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters; it has {len(request_id)}"
        )
    if any(unicodedata.category(char) == "Cc" for char in request_id):
        raise InvalidField("request_id", "must not contain control characters")


def _num_samples(request: scheduler_pb2.GenerateRequest) -> int:
    num_samples = request.n if request.HasField("n") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidField("n", f"must be from 1 to {MAX_SAMPLES}, not {num_samples}")
    return num_samples


def _priority(request: scheduler_pb2.GenerateRequest) -> int:
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidField("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {request.priority}")
    return request.priority


def _provisional_every_forwards(request: scheduler_pb2.GenerateRequest, rules: Rules) -> int:
    if not request.HasField("provisional_every_forwards"):
        return 0
    if not rules.fdfo:
        raise InvalidField(
            "provisional_every_forwards",
            "is not served in lockstep (--no-dllm-fdfo): no block is shown before it is done; leave it out",
        )
    return request.provisional_every_forwards or PROVISIONAL_EVERY_FORWARDS


def _sampling(sampling: scheduler_pb2.SamplingParams, vocab_size: int) -> Sampling:
    temperature = sampling.temperature  # 0 when absent
    if not 0 <= temperature <= MAX_TEMPERATURE:  # false for nan, too
        raise InvalidField("sampling.temperature", f"must be from 0 to {MAX_TEMPERATURE:g}, not {temperature:g}")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidField("sampling.top_p", f"must be above 0 and at most 1 (1 = off), not {top_p:g}")
    min_p = sampling.min_p
    if not 0 <= min_p <= 1:
        raise InvalidField("sampling.min_p", f"must be from 0 (off) to 1, not {min_p:g}")
    seed = sampling.seed if sampling.HasField("seed") else None
    if seed is not None and seed > MAX_SEED:
        raise InvalidField("sampling.seed", f"must be from 0 to {MAX_SEED}, not {seed}")
    # Keeping the best top_k of fewer tokens keeps all: off. People send 2**30 for that.
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)


def _stop_strings(stop: Iterable[str]) -> tuple[str, ...]:
    strings = tuple(stop)
    for i, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidField(f"stop[{i}]", f"must have 1 to {MAX_STOP_STRING_CHARS} characters; it has {len(string)}")
    return strings


def _request_stop_ids(stop_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    ids = tuple(stop_token_ids)
    for i, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidField(f"stop_token_ids[{i}]", f"must be below {vocab_size}, not {token_id}")
    return ids


def _algorithm_params(algorithm: str, given: Mapping[str, float], rules: Rules) -> dict[str, float]:
    if algorithm not in rules.algorithms:
        is_known = any(algorithm in architecture.algorithms for architecture in ARCHITECTURES.values())
        what = f"{algorithm} cannot run on this model" if is_known else f"unknown algorithm {algorithm!r}"
        raise InvalidField("algorithm", f"{what}; this server has {', '.join(sorted(rules.algorithms))}")
    known = {param.name: param for param in rules.algorithms[algorithm].params}
    params = {param.name: param.default for param in known.values()}
    if algorithm == rules.default_algorithm:
        params.update(rules.default_params)
    for name, value in given.items():
        if name not in known:
            raise InvalidField(
                "algorithm_params",
                f"{algorithm} has no parameter {name!r}; it has {', '.join(sorted(known)) or 'none'}",
            )
        param = known[name]
        low, high = f"{param.min_value:g}", f"{param.max_value:g}"
        if not param.min_value <= value <= param.max_value:
            shown = f"{value!r}" if f"{value:g}" in (low, high) else f"{value:g}"
            raise InvalidField("algorithm_params", f"{name} must be from {low} to {high}, not {shown}")
        if param.is_integer and not value.is_integer():
            raise InvalidField("algorithm_params", f"{name} must be an integer, not {value:g}")
        params[name] = value
    return params


def _prompt(request: scheduler_pb2.GenerateRequest, rules: Rules) -> tuple[str, list[int]]:
    """The field that holds the prompt, and its ids: at least one, none of them reserved."""
    field = request.WhichOneof("prompt")
    if request.parse_special_tokens and field != "text":
        raise InvalidField("parse_special_tokens", "belongs to a prompt in text")
    max_chars = rules.folder.context_length * rules.codec.max_chars_per_token
    match field:
        case None:
            raise InvalidField("prompt", "is missing: set text, prompt_ids or messages")
        case "text":
            if not request.text:
                raise InvalidField("text", "must not be empty")
            _refuse_too_long("text", len(request.text), max_chars, rules)
            ids = rules.codec.encode_text(request.text, request.parse_special_tokens)
            if not ids:
                raise InvalidField("text", "encodes to no tokens")
            if rules.folder.mask_token_id in ids:
                raise InvalidField("text", "contains the mask token, which is reserved; turn off parse_special_tokens")
        case "prompt_ids":
            ids = list(request.prompt_ids.ids)
            if not ids:
                raise InvalidField("prompt_ids", "must not be empty")
            for i, token_id in enumerate(ids):
                if token_id >= rules.folder.vocab_size:
                    raise InvalidField(
                        f"prompt_ids.ids[{i}]", f"must be below {rules.folder.vocab_size}, not {token_id}"
                    )
                if token_id == rules.folder.mask_token_id:
                    raise InvalidField(f"prompt_ids.ids[{i}]", f"{token_id} is the mask token, which is reserved")
        case "messages":
            _refuse_too_long("messages", count_chars(request.messages), max_chars, rules)
            ids = encode_conversation(request.messages, rules.codec)
            if not ids:
                raise InvalidField("messages", "the model's chat template makes no tokens of them")
            if rules.folder.mask_token_id in ids:
                raise InvalidField("messages", "the model's chat template puts in the mask token, which is reserved")
    return field, ids


def _refuse_too_long(field: str, num_chars: int, max_chars: int, rules: Rules) -> None:
    """Encoding would block other requests for long, only to refuse the prompt then."""
    if num_chars > max_chars:
        limit = rules.folder.context_length
        raise InvalidField(field, f"has {num_chars} characters; no text that long fits the context limit of {limit}")


def _max_new_tokens(request: scheduler_pb2.GenerateRequest, prompt_field: str, prompt_length: int, rules: Rules) -> int:
    """Resolved, or refused: by the context limit, or because no KV pool will ever hold it."""
    folder = rules.folder
    room = folder.context_length - prompt_length
    limit = f"the context limit of {folder.context_length} tokens"
    if rules.max_tokens_in_pool is not None:
        # A request takes whole blocks.
        pool_room = rules.max_tokens_in_pool // folder.block_size * folder.block_size - prompt_length
        if pool_room < room:
            room = pool_room
            limit = f"the worker's KV pool of {rules.max_tokens_in_pool} tokens (max_total_tokens)"
    if room < 1:
        raise InvalidField(prompt_field, f"has {prompt_length} tokens; {limit} leaves no room to generate")
    if not request.HasField("max_new_tokens"):
        return room
    if request.max_new_tokens > room:
        raise InvalidField(
            "max_new_tokens",
            f"must be at most {room} after a prompt of {prompt_length} tokens, not {request.max_new_tokens}: {limit}",
        )
    return request.max_new_tokens

"""Hostile messages, made from the protos: a good message, mutated field by field and byte by byte by a seed.

The generator knows descriptors only, so a field that is added later is attacked too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from common.errors import refusal_reason
from common.packing import pack_bits, pack_ids
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb

RUN_ROUND = "/fdfo.worker.v1.WorkerService/RunRound"
GENERATE = "/fdfo.scheduler.v1.SchedulerService/Generate"
DEADLINE_S = 1.0
AT_ONCE = 16
NUM_SCHEDULER_IDS = 32  # more than are under way, so that the rounds of each come in order

Field: TypeAlias = Any  # a FieldDescriptor; protobuf has one in Python and one in C

INTS = (0, 1, 2, 31, 32, 127, 255, 256, 4096, 65535, 2**31 - 1, -1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, float("nan"), float("inf"), -float("inf"), 0.5, 1e308)
TEXTS = (
    "",
    "\0",
    "a" * 257,
    "x" * 20_000,
    "\u202e\ufeff",
    "🍪" * 300,
    "<|mask|>",
    "{{7*7}}",
    "../../etc",
    "%s%n",
    "\r\n",
    "é",
)
BYTES = (b"", b"\0", b"\xff" * 4, b"\x80" * 31, b"\0" * 128, b"\xff\xff\xff\x7f" * 32, b"\1" * 4096)

_BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


def mutate(message: Message, draws: random.Random) -> bytes:
    """The wire form of a copy of `message` with some fields, and sometimes some bytes, changed."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draws.choice((1, 1, 1, 2, 3, 6))):
        _mutate_field(copy, draws)
    wire = copy.SerializeToString()
    return draws.choices((_same, _cut, _flip, _unknown, _bad_text, _deep), (12, 1, 2, 2, 1, 1))[0](wire, draws)


def _mutate_field(message: Message, draws: random.Random) -> None:
    """Change one field: of a message in this one more often than not, else of this one."""
    inner = [each for descriptor in message.DESCRIPTOR.fields for each in _inner_messages(message, descriptor)]
    if inner and draws.random() < 0.6:
        return _mutate_field(draws.choice(inner), draws)
    descriptor: Field = draws.choice(message.DESCRIPTOR.fields)
    if draws.random() < 0.1:
        message.ClearField(descriptor.name)
    elif descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        key, value = descriptor.message_type.fields
        if value.message_type is None:
            getattr(message, descriptor.name)[_value(key, draws)] = _value(value, draws)
    elif descriptor.is_repeated:
        _mutate_repeated(getattr(message, descriptor.name), descriptor, draws)
    elif descriptor.message_type is not None:
        getattr(message, descriptor.name).SetInParent()
    else:
        setattr(message, descriptor.name, _value(descriptor, draws))


def _inner_messages(message: Message, descriptor: Field) -> Sequence[Message]:
    if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
        return ()
    value = getattr(message, descriptor.name)
    if descriptor.is_repeated:
        return list(value)
    return [value] if message.HasField(descriptor.name) else ()


def _mutate_repeated(values: Any, descriptor: Field, draws: random.Random) -> None:
    """More, fewer, twice the same, or another value in it."""
    if len(values) and draws.random() < 0.3:
        del values[draws.randrange(len(values)) :]
    elif len(values) and draws.random() < 0.3:
        values.extend(list(values)[: draws.randint(1, 3)])
    elif descriptor.message_type is not None:
        values.add()
    else:
        values.extend(_value(descriptor, draws) for _ in range(draws.choice((1, 1, 2, 17, 300))))


def _value(descriptor: Field, draws: random.Random) -> Any:
    """Any value that the field can hold on the wire; extremes more often than not."""
    kind = descriptor.type
    if kind in _BITS:
        lowest, highest = _BITS[kind]
        return draws.choice([value for value in INTS if lowest <= value <= highest])
    if kind in _FLOATS:
        return draws.choice(FLOATS)  # one too large for a float becomes infinite
    if kind == FieldDescriptor.TYPE_BOOL:
        return draws.random() < 0.5
    if kind == FieldDescriptor.TYPE_ENUM:
        return draws.choice((0, 1, 2, 3, 99, -1, 2**31 - 1))
    if kind == FieldDescriptor.TYPE_STRING:
        return draws.choice(TEXTS)
    assert kind == FieldDescriptor.TYPE_BYTES, f"{descriptor.full_name}: a type that no proto here has had"
    return draws.choice(BYTES) + draws.randbytes(draws.choice((0, 0, 1, 3)))


def _same(wire: bytes, draws: random.Random) -> bytes:
    return wire


def _cut(wire: bytes, draws: random.Random) -> bytes:
    return wire[: draws.randrange(len(wire) + 1)]


def _flip(wire: bytes, draws: random.Random) -> bytes:
    changed = bytearray(wire)
    for _ in range(draws.randint(1, 8) if wire else 0):
        changed[draws.randrange(len(changed))] = draws.randrange(256)
    return bytes(changed)


def _unknown(wire: bytes, draws: random.Random) -> bytes:
    """Field 1000 to 1003, once or many times."""
    return wire + _tagged(1000 + draws.randrange(4), draws.randbytes(5)) * draws.choice((1, 1, 1000))


def _bad_text(wire: bytes, draws: random.Random) -> bytes:
    """Bytes that are no UTF-8, in field 1, which is text in both messages."""
    return wire + _tagged(1, b"\xff\xfe\xc3\x28")


def _deep(wire: bytes, draws: random.Random) -> bytes:
    """Messages in messages: an unknown one, or one of the first 32 fields."""
    inner = b""
    number = draws.choice((1001, draws.randrange(1, 33)))
    for _ in range(draws.choice((10, 99, 150, 1000))):
        inner = _tagged(number, inner)
    return wire + inner


def _tagged(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def good_round(info: pb.GetWorkerInfoResponse, number: int) -> pb.RunRoundRequest:
    """What a scheduler might send: one start, one continue, one release, each generation its first round."""
    size = info.block_size
    start = pb.StartRow(
        request_id=f"hostile-{number % 3}",
        attempt=1 + number,
        prompt_length=size + 1,
        prefix_ids=pack_ids([5] * size),
        block_index=1,
        block_ids=pack_ids([5] + [info.mask_token_id] * (size - 1)),
        block_mask=pack_bits([False] + [True] * (size - 1)),
        algorithm=info.algorithms[number % len(info.algorithms)].name,
        sampling=pb.SamplingParams(temperature=float(number % 2), top_p=1.0, seed=number),
        stop_token_ids=[0],
        tokens_left=size,
        want_logprobs=number % 5 == 0,
        want_first_unmask_steps=number % 7 == 0,
    )
    return pb.RunRoundRequest(
        scheduler_id=f"hostile-{number // 2 % NUM_SCHEDULER_IDS}",
        generation=1 + number,
        worker_epoch=info.worker_epoch,
        fingerprint=info.fingerprint,
        round_id=1,
        mode=pb.MODE_FDFO,
        max_forwards=2,
        max_round_ms=50,
        releases=pb.RowNames(request_ids=["gone"], sample_indexes=[0], attempts=[1]),
        starts=[start],
        continues=pb.RowNames(request_ids=["unknown"], sample_indexes=[0], attempts=[1]),
    )


def good_generate(number: int) -> api.GenerateRequest:
    """What a client might send; each kind of prompt in turn."""
    request = api.GenerateRequest(
        request_id=f"hostile-{number}",
        sampling=api.SamplingParams(temperature=0.5, top_p=0.9, top_k=20, min_p=0.01, seed=number),
        max_new_tokens=4,
        stop=["."],
        stop_token_ids=[7],
        algorithm="LowConfidence",
        algorithm_params={"threshold": 0.9},
        n=1,
        priority=0,
    )
    match number % 3:
        case 0:
            request.text = "Count from 1 to 3."
        case 1:
            request.prompt_ids.ids.extend([5, 6, 7])
        case 2:
            request.messages.messages.add(role="user", content="Count from 1 to 3.")
    return request


@dataclass
class Outcome:
    """How the services took it: what was answered how often, and what they may not answer."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


# Beside OK. A deadline is ours: a round may wait for one that never comes, an answer may be long.
ALLOWED_AT_WORKER = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED}
ALLOWED_AT_SCHEDULER = ALLOWED_AT_WORKER | {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def attack(worker: str, scheduler: str, info: pb.GetWorkerInfoResponse, count: int, seed: int) -> Outcome:
    """Send `count` hostile messages, half of them to each service, some at a time."""
    outcome = Outcome()
    gate = asyncio.Semaphore(AT_ONCE)
    async with grpc.aio.insecure_channel(worker) as to_worker, grpc.aio.insecure_channel(scheduler) as to_scheduler:
        rounds: Any = to_worker.unary_unary(RUN_ROUND)  # of bytes; the types know of messages only
        answers: Any = to_scheduler.unary_stream(GENERATE)

        async def send(number: int) -> None:
            draws = random.Random(f"{seed}/{number}")
            async with gate:
                if number % 2:
                    wire = mutate(good_round(info, number), draws)
                    call = rounds(wire, timeout=DEADLINE_S)
                    await _judge(outcome, "RunRound", number, _one(call), _is_allowed_at_worker)
                else:
                    wire = mutate(good_generate(number), draws)
                    call = answers(wire, timeout=DEADLINE_S)
                    await _judge(outcome, "Generate", number, _all(call), _is_allowed_at_scheduler)

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(send(number))
    return outcome


async def _one(call: Any) -> None:
    pb.RunRoundResponse.FromString(await call)


async def _all(call: Any) -> None:
    async for event in call:
        api.GenerateResponse.FromString(event)


def _is_allowed_at_worker(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in ALLOWED_AT_WORKER or refusal_reason(error) is not None


def _is_allowed_at_scheduler(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in ALLOWED_AT_SCHEDULER


async def _judge(
    outcome: Outcome, method: str, number: int, answer: Any, is_allowed: Callable[[grpc.aio.AioRpcError], bool]
) -> None:
    try:
        await answer
    except grpc.aio.AioRpcError as error:
        outcome.answers[f"{method} {refusal_reason(error) or error.code().name}"] += 1
        if not is_allowed(error):
            outcome.faults.append(f"message {number}: {method} answered {error.code().name}: {error.details()}"[:300])
    else:
        outcome.answers[f"{method} OK"] += 1

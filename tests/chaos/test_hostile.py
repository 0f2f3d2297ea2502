"""The generator of hostile messages: repeatable, and it leaves no field of the protos alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from google.protobuf.message import DecodeError, Message

from fdfo.worker.v1 import worker_pb2 as pb
from tests.chaos.hostile import good_generate, good_round, mutate

INFO = pb.GetWorkerInfoResponse(
    worker_epoch="e",
    fingerprint="f",
    block_size=32,
    mask_token_id=1,
    algorithms=[pb.AlgorithmInfo(name="LowConfidence"), pb.AlgorithmInfo(name="JointThreshold")],
)
COUNT = 800


def fields(message: Message, path: str = "") -> Iterator[tuple[str, object]]:
    """Every field of a message and of the messages in it, with its value; of repeated ones the first."""
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        yield f"{path}{descriptor.name}", str(value)
        if descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            inner = (value[0] if len(value) else None) if descriptor.is_repeated else value
            if inner is not None:
                yield from fields(inner, f"{path}{descriptor.name}.")


@pytest.mark.parametrize("good", [lambda number: good_round(INFO, number), good_generate])
def test_every_field_is_attacked_and_some_messages_are_none(good: Callable[[int], Message]) -> None:
    """Of 800 messages most can be decoded, between them they change every field, and the same seed repeats them."""
    changed: set[str] = set()
    undecodable = 0
    names: set[str] = set()
    for number in range(COUNT):
        message = good(number)
        wire = mutate(message, random.Random(number))
        assert wire == mutate(message, random.Random(number))
        try:
            mutant = type(message).FromString(wire)
        except DecodeError:
            undecodable += 1
            continue
        before = dict(fields(message))
        names |= before.keys()
        changed |= {name for name, value in fields(mutant) if before.get(name) != value}
    assert names <= changed
    assert 0.05 * COUNT < undecodable < 0.4 * COUNT

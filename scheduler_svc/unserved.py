"""Fields of a request that are refused by name whatever they say: those of later versions and those never served."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import InvalidField
from fdfo.scheduler.v1 import scheduler_pb2

MAX_NAMED_UNKNOWN_BYTES = 4096

# Field to (the value that asks for nothing, why it is refused). None: every value asks for something.
UNSUPPORTED: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "json_schema": ("", "constrained output is not served: a block is filled in any order"),
        "regex": ("", "constrained output is not served: a block is filled in any order"),
        "grammar": ("", "constrained output is not served: a block is filled in any order"),
        "logit_bias": (None, "logit bias is not served"),
        "frequency_penalty": (0.0, "penalties are not served"),
        "presence_penalty": (0.0, "penalties are not served"),
        "repetition_penalty": (1.0, "penalties are not served"),
        "min_new_tokens": (0, "a minimum length is not served"),
    }
)


def refuse_unknown_fields(request: Message) -> None:
    """A newer client's field would be ignored in silence otherwise."""
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if num_bytes := request.ByteSize() - known.ByteSize():
        if num_bytes <= MAX_NAMED_UNKNOWN_BYTES:
            _name_unknown_field(request, "")
        raise InvalidField("(unknown)", f"{num_bytes} bytes are fields that are unknown to this version")


def _name_unknown_field(message: Message, path: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        number = unknown[0].field_number
        raise InvalidField(f"{path}{number}", f"field number {number} is unknown to this version")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for i, item in enumerate(value):
                _name_unknown_field(item, f"{path}{field.name}[{i}].")
        else:
            _name_unknown_field(value, f"{path}{field.name}.")


def refuse_unsupported(request: scheduler_pb2.GenerateRequest) -> None:
    for field, value in request.ListFields():
        if field.name in UNSUPPORTED:
            neutral, reason = UNSUPPORTED[field.name]
            if neutral is None or value != neutral:
                raise InvalidField(field.name, f"is not supported: {reason}")

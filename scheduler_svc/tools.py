"""What a conversation holds as JSON texts, read and checked: tools, calls of them, variables of the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidField

MAX_TOOLS = 1024

JsonObject = dict[str, Any]


def read_tools(texts: Sequence[str], field: str) -> list[JsonObject]:
    """Each text's object. Raises InvalidField naming the text that is none."""
    if len(texts) > MAX_TOOLS:
        raise InvalidField(field, f"must have at most {MAX_TOOLS} entries; it has {len(texts)}")
    return [read_object(text, f"{field}[{i}]") for i, text in enumerate(texts)]


def read_tool_calls(texts: Sequence[str], field: str) -> list[JsonObject]:
    """As read_tools; arguments that come as text, as OpenAI's do, become the object that templates expect."""
    calls = read_tools(texts, field)
    for i, call in enumerate(calls):
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = read_object(arguments or "{}", f"{field}[{i}].arguments")
    return calls


def read_object(text: str, field: str) -> JsonObject:
    """The object. Raises InvalidField for what is none."""
    try:
        value = json.loads(text)
        # A template writes it again: infinities, NaN and halves of surrogate pairs must not come out.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidField(field, "must be a JSON object")
    return value

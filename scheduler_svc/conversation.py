"""A prompt of messages: checked, and encoded with the chat template."""

from __future__ import annotations

from common.errors import InvalidField
from fdfo.scheduler.v1 import scheduler_pb2
from scheduler_svc.text import TextCodec
from scheduler_svc.tools import read_object, read_tool_calls, read_tools

MAX_MESSAGES = 4096
ROLES = ("system", "user", "assistant", "tool")


def count_chars(chat: scheduler_pb2.ChatMessages) -> int:
    """Of all that the template is given; a message counts as one more."""
    num_chars = len(chat.messages) + sum(map(len, chat.tools)) + len(chat.chat_template_kwargs)
    return num_chars + sum(len(message.content) + sum(map(len, message.tool_calls)) for message in chat.messages)


def encode_conversation(chat: scheduler_pb2.ChatMessages, codec: TextCodec) -> list[int]:
    """The prompt's ids. Raises InvalidField with the field's path in the request."""
    if not chat.messages:
        raise InvalidField("messages", "must not be empty")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidField(
                f"messages.messages[{i}].role", f"must be one of {', '.join(ROLES)}, not {message.role!r}"
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidField(f"messages.messages[{i}].tool_calls", f"belong to the assistant, not to {message.role}")
    field = "messages.chat_template_kwargs"
    template_kwargs = read_object(chat.chat_template_kwargs or "{}", field)
    for name in template_kwargs:
        if name in codec.reserved_variables:
            raise InvalidField(field, f"must not set {name}, which the template gets from elsewhere")
        if not name.isidentifier():
            raise InvalidField(field, f"has {name!r}, which is no name of a variable")
    return codec.encode_chat(
        [(message.role, message.content) for message in chat.messages],
        read_tools(chat.tools, "messages.tools"),
        {
            i: read_tool_calls(message.tool_calls, f"messages.messages[{i}].tool_calls")
            for i, message in enumerate(chat.messages)
            if message.tool_calls
        },
        template_kwargs,
    )

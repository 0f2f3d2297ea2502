"""The options of `generate` and `stream`, for both clients, and how they become a request.

Only what cannot be put on the wire is refused here; ranges and names are the server's to judge, so that there is one
rule and any client hears the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._errors import InvalidRequest
from fdfo_client._timeout import Timeout, timeout_of

MAX_SHOWN_CHARS = 80


class Message(TypedDict):
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool".

    content: may be None where there are tool_calls.
    tool_calls: what the assistant called in this turn, as OpenAI's API has it.
    """

    role: str
    content: str | None
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]


class GenerateOptions(TypedDict, total=False):
    """Keyword options of `generate` and `stream`. An option that is None or left out takes the server's default.

    prompt_ids: the prompt as token ids.
    messages: the prompt as a conversation, rendered with the model's chat template.
    tools: what the model may call in answer to messages, as the chat template expects it; most expect OpenAI's form.
    chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.
    max_new_tokens: at most so many tokens, 1 or more. Default: up to the context limit.
    temperature: 0 (the default) takes the most probable token; up to 2.
    top_p: above 0, up to 1; 1 is off.
    top_k: 0 is off.
    min_p: 0 to 1; 0 is off.
    seed: the same seed gives the same tokens. Default: the server draws one, see `Completion.seed`.
    stop: a string, or up to 16, at whose first appearance the text ends; none is ever part of the text.
    stop_token_ids: token ids that end the text, besides the model's own.
    ignore_eos: the model's own stop ids become ordinary tokens.
    algorithm: "LowConfidence" or "JointThreshold"; the server may know more.
    algorithm_params: by name, such as {"threshold": 0.9}.
    n: 1 to 16 samples of the answer, all from one seed; see `Completion.samples`. At temperature 0 they are equal.
    priority: a request of a higher one runs earlier, and in the place of lower ones when the server is full; -1000 to
        1000, 0 by default.
    logprobs: give each token's log probability, by the model's own logits, in the step that last set it.
    first_unmask_steps: give the step of its block, from 0, that first unmasked each token's position.
    provisional_every_forwards: let `stream` give the incomplete block every so many forwards, as a `Provisional` event;
        0 takes the server's default. A server in lockstep refuses it.
    request_id: unique among live requests. Default: the server draws one.
    parse_special_tokens: special tokens in a text prompt are read as such; else they are plain text.
    timeout: seconds until the answer must be complete, or a `Timeout` of several parts. Default: none.
    """

    prompt_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    algorithm: str | None
    algorithm_params: Mapping[str, float] | None
    n: int | None
    priority: int | None
    logprobs: bool
    first_unmask_steps: bool
    provisional_every_forwards: int | None
    request_id: str | None
    parse_special_tokens: bool
    timeout: float | Timeout | None


_FIELDS = (
    "max_new_tokens",
    "n",
    "priority",
    "request_id",
    "algorithm",
    "ignore_eos",
    "parse_special_tokens",
    "logprobs",
    "first_unmask_steps",
    "provisional_every_forwards",
)
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")


def build_request(prompt: str | None, options: GenerateOptions) -> tuple[pb.GenerateRequest, Timeout]:
    """The request and its timeout. Raises InvalidRequest, or TypeError for an option that does not exist."""
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"no such option: {', '.join(unknown)}; there are {', '.join(GenerateOptions.__annotations__)}")

    request = pb.GenerateRequest()
    _set_prompt(request, prompt, options.get("prompt_ids"), options.get("messages"))
    for name in ("tools", "chat_template_kwargs"):
        if options.get(name) and request.WhichOneof("prompt") != "messages":
            raise InvalidRequest(f"{name}: must be given with messages", name)
    if tools := options.get("tools"):
        _extend_json(request.messages.tools, "tools", tools)
    if kwargs := options.get("chat_template_kwargs"):
        request.messages.chat_template_kwargs = _json_object("chat_template_kwargs", kwargs)
    for name in _SAMPLING_FIELDS:
        _set_scalar(request.sampling, name, options.get(name))
    for name in _FIELDS:
        _set_scalar(request, name, options.get(name))
    stop = options.get("stop")
    _extend(request.stop, "stop", [stop] if isinstance(stop, str) else stop or ())
    _extend(request.stop_token_ids, "stop_token_ids", options.get("stop_token_ids") or ())
    _update(request.algorithm_params, "algorithm_params", options.get("algorithm_params") or {})

    return request, timeout_of(options.get("timeout"))


def _set_prompt(
    request: pb.GenerateRequest,
    prompt: str | None,
    prompt_ids: Sequence[int] | None,
    messages: Sequence[Message] | None,
) -> None:
    if [prompt, prompt_ids, messages].count(None) != 2:
        raise InvalidRequest("prompt: give exactly one of prompt, prompt_ids and messages", "prompt")
    if prompt is not None:
        _set_scalar(request, "text", prompt, called="prompt")
    elif prompt_ids is not None:
        request.prompt_ids.SetInParent()  # so that an empty list is sent as one, and refused by the server
        _extend(request.prompt_ids.ids, "prompt_ids", prompt_ids)
    else:
        request.messages.SetInParent()
        if not isinstance(messages, Iterable):
            raise _unfit("messages", "a list of messages", messages)
        for index, message in enumerate(messages):
            try:
                calls = message.get("tool_calls") or ()
                content = message.get("content") if calls else message["content"]
                turn = request.messages.messages.add(role=message["role"], content=content)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise InvalidRequest(
                    f"messages[{index}]: must be a mapping with the texts role and content, not {_shown(message)}",
                    "messages",
                ) from None
            for key in message.keys() - Message.__annotations__.keys():
                if message[key] is not None:  # type: ignore[literal-required]
                    what = f"must be left out: what is served of a message is {', '.join(Message.__annotations__)}"
                    raise InvalidRequest(f"messages[{index}].{key}: {what}", f"messages[{index}].{key}")
            _extend_json(turn.tool_calls, f"messages[{index}].tool_calls", calls)


# protobuf raises TypeError for a wrong type and ValueError for a number out of range or text that is not Unicode. Its
# own words name types of Python and C, so the field says what it takes.


def _set_scalar(message: pb.GenerateRequest | pb.SamplingParams, name: str, value: object, called: str = "") -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        wanted = _WANTED[message.DESCRIPTOR.fields_by_name[name].type]
        raise _unfit(called or name, wanted, value) from None


def _extend(field: Any, name: str, values: Sequence[object]) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError):
        wanted = _WANTED[FieldDescriptor.TYPE_STRING if name == "stop" else FieldDescriptor.TYPE_UINT32]
        raise _unfit(name, f"a list, of each {wanted}", values) from None


def _extend_json(field: Any, name: str, values: Sequence[Mapping[str, Any]]) -> None:
    try:
        field.extend([json.dumps(value, ensure_ascii=False) for value in values])
    except (TypeError, ValueError, RecursionError):
        raise _unfit(name, "a list of what JSON can hold", values) from None


def _json_object(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise _unfit(name, "a mapping of names to what JSON can hold", value) from None


def _update(field: Any, name: str, values: Mapping[str, float]) -> None:
    try:
        field.update(values)
    except (TypeError, ValueError):
        raise _unfit(name, "a mapping of names to numbers", values) from None


def _unfit(name: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name}: must be {wanted}, not {_shown(value)}", name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


_WANTED = {
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 2**64 - 1",
    FieldDescriptor.TYPE_INT32: "a whole number from -2**31 to 2**31 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a text of Unicode characters",
}

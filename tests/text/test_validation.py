from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.errors import InvalidField
from common.model_folder import read_model_folder
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.text import TextCodec
from scheduler_svc.unserved import UNSUPPORTED
from scheduler_svc.validation import (
    AlgorithmInfo,
    GenerateSpec,
    ParamInfo,
    Rules,
    Sampling,
    parse_generate,
)
from tests.text.folders import (
    LLADA2_CONFIG,
    LLADA2_TEMPLATE,
    SHIPPED,
    byte_tokenizer,
    llada2_tokenizer,
    write_folder,
)

B = 32
MASK = 1
CONTEXT = 4096
FOLDER = read_model_folder(SHIPPED)
THRESHOLD = ParamInfo("threshold", 0.95, 0.0, 1.0)
RULES = Rules(
    codec=TextCodec(SHIPPED),
    folder=FOLDER,
    default_algorithm="LowConfidence",
    default_params={"threshold": 0.9},
    algorithms={
        "LowConfidence": AlgorithmInfo("LowConfidence", (THRESHOLD,)),
        "JointThreshold": AlgorithmInfo(
            "JointThreshold",
            (ParamInfo("threshold", 0.5, 0.0, 1.0), ParamInfo("max_post_edit_steps", 16, 0, 1024, is_integer=True)),
        ),
    },
)


def ids(num: int) -> api.TokenIds:
    return api.TokenIds(ids=[10] * num)


def chat(*messages: tuple[str, str]) -> api.ChatMessages:
    return api.ChatMessages(messages=[api.ChatMessage(role=role, content=content) for role, content in messages])


def refusal(request: api.GenerateRequest, rules: Rules = RULES) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        parse_generate(request, rules)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_request_with_tools(tmp_path: Path) -> None:
    """Tools and calls reach the chat template as objects."""
    codec = TextCodec(write_folder(tmp_path, tokenizer=llada2_tokenizer(), template=LLADA2_TEMPLATE))
    call = {"role": "assistant", "tool_calls": ['{"function": {"name": "f", "arguments": "{\\"x\\": 1}"}}']}
    request = api.GenerateRequest(
        messages=api.ChatMessages(messages=[{"role": "user", "content": "go"}, call], tools=['{"name": "f"}'])
    )
    calls = {1: [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    expected = codec.encode_chat([("user", "go"), ("assistant", "")], [{"name": "f"}], calls)
    assert parse_generate(request, dataclasses.replace(RULES, codec=codec)).prompt_ids == expected


def test_a_request_with_template_variables(tmp_path: Path) -> None:
    """They reach the chat template as JSON has them; those that it does not know have no effect."""
    template = "{{ messages[0].content }} {{ depth + 1 }} {{ enable_thinking is false }} {{ documents[0].text }}"
    rules = dataclasses.replace(RULES, codec=TextCodec(write_folder(tmp_path, template=template)))
    kwargs = '{"depth": 2, "enable_thinking": false, "documents": [{"text": "ü"}], "other": null, "self": 1}'
    request = api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "user"}], chat_template_kwargs=kwargs))
    assert parse_generate(request, rules).prompt_ids == list(" 3 True ü".encode())


def test_the_least_request() -> None:
    """A prompt alone is greedy, with the server's defaults, and may go on up to the context limit."""
    assert parse_generate(api.GenerateRequest(prompt_ids=ids(5)), RULES) == GenerateSpec(
        request_id="",
        prompt_ids=[10] * 5,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None),
        max_new_tokens=CONTEXT - 5,
        stop_strings=(),
        request_stop_ids=(),
        ignore_eos=False,
        algorithm="LowConfidence",
        algorithm_params={"threshold": 0.9},
    )


def test_a_full_request() -> None:
    """Every served field arrives."""
    request = api.GenerateRequest(
        request_id="r-1",
        messages=chat(("user", "hi")),
        sampling=api.SamplingParams(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=0),
        max_new_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[3, 511],
        ignore_eos=True,
        algorithm="JointThreshold",
        algorithm_params={"max_post_edit_steps": 3},
        n=16,
        priority=-1000,
        logprobs=True,
        first_unmask_steps=True,
    )
    assert parse_generate(request, RULES) == GenerateSpec(
        request_id="r-1",
        prompt_ids=RULES.codec.encode_chat([("user", "hi")]),
        sampling=Sampling(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=0),
        max_new_tokens=9,
        stop_strings=("a", "b"),
        request_stop_ids=(3, 511),
        ignore_eos=True,
        algorithm="JointThreshold",
        algorithm_params={"threshold": 0.5, "max_post_edit_steps": 3},
        num_samples=16,
        priority=-1000,
        logprobs=True,
        first_unmask_steps=True,
    )


REFUSALS: dict[str, tuple[api.GenerateRequest, str, str]] = {
    "no prompt": (api.GenerateRequest(), "prompt", "is missing"),
    "empty text": (api.GenerateRequest(text=""), "text", "empty"),
    "empty ids": (api.GenerateRequest(prompt_ids=ids(0)), "prompt_ids", "empty"),
    "no messages": (api.GenerateRequest(messages=chat()), "messages", "empty"),
    "unknown role": (
        api.GenerateRequest(messages=chat(("user", "x"), ("robot", "y"))),
        "messages.messages[1].role",
        "one of system, user, assistant, tool, not 'robot'",
    ),
    "no role": (api.GenerateRequest(messages=chat(("", "y"))), "messages.messages[0].role", "one of"),
    "mask id": (
        api.GenerateRequest(prompt_ids=api.TokenIds(ids=[10, MASK])),
        "prompt_ids.ids[1]",
        "1 is the mask token",
    ),
    "id without a token": (api.GenerateRequest(prompt_ids=api.TokenIds(ids=[512])), "prompt_ids.ids[0]", "below 512"),
    "huge id": (api.GenerateRequest(prompt_ids=api.TokenIds(ids=[2**32 - 1])), "prompt_ids.ids[0]", "below 512"),
    "mask text read as special": (
        api.GenerateRequest(text="a<|mask|>", parse_special_tokens=True),
        "text",
        "mask token",
    ),
    "special tokens of ids": (
        api.GenerateRequest(prompt_ids=ids(1), parse_special_tokens=True),
        "parse_special_tokens",
        "belongs to a prompt in text",
    ),
    "prompt at the context limit": (
        api.GenerateRequest(prompt_ids=ids(CONTEXT)),
        "prompt_ids",
        "context limit of 4096",
    ),
    "prompt over the context limit": (
        api.GenerateRequest(prompt_ids=ids(CONTEXT + 9)),
        "prompt_ids",
        "at most 4096 tokens (the context limit); it has 4105",
    ),
    "text over the context limit": (api.GenerateRequest(text="1" * CONTEXT), "text", "context limit of 4096"),
    "text far over the context limit": (api.GenerateRequest(text="a" * 1_000_000), "text", "has 1000000 characters"),
    "a tool that is no JSON": (
        api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "user"}], tools=["{}", "{"])),
        "messages.tools[1]",
        "no JSON",
    ),
    "a call that is no object": (
        api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "assistant", "tool_calls": ["1"]}])),
        "messages.messages[0].tool_calls[0]",
        "JSON object",
    ),
    "a call of the user": (
        api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "user", "tool_calls": ["{}"]}])),
        "messages.messages[0].tool_calls",
        "assistant",
    ),
    **{
        f"template variables {kwargs[:16]}": (
            api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "user"}], chat_template_kwargs=kwargs)),
            "messages.chat_template_kwargs",
            words,
        )
        for kwargs, words in (
            ("{", "is no JSON"),
            ("[1]", "must be a JSON object"),
            ('{"a": NaN}', "is no JSON"),
            ('{"messages": []}', "must not set messages"),
            ('{"tools": []}', "must not set tools"),
            ('{"add_generation_prompt": false}', "must not set add_generation_prompt"),
            ('{"eos_token": "x"}', "must not set eos_token"),
            ('{"a b": 1}', "has 'a b', which is no name"),
        )
    },
    "template variables far over the context limit": (
        api.GenerateRequest(
            messages=api.ChatMessages(messages=[{"role": "user"}], chat_template_kwargs="{}" + " " * 900_000)
        ),
        "messages",
        "context limit",
    ),
    "tools far over the context limit": (
        api.GenerateRequest(messages=api.ChatMessages(messages=[{"role": "user"}], tools=[" " * 900_000 + "{}"])),
        "messages",
        "context limit",
    ),
    "messages over the context limit": (
        api.GenerateRequest(messages=chat(("user", "1" * CONTEXT))),
        "messages",
        "context limit of 4096",
    ),
    "messages far over it": (
        api.GenerateRequest(messages=chat(*[("user", "a" * 100_000)] * 9)),
        "messages",
        "has 900009 characters",
    ),
    "messages too many": (
        api.GenerateRequest(messages=chat(*[("user", "")] * 4097)),
        "messages",
        "at most 4096 messages; it has 4097",
    ),
    "committed ids too many": (
        api.GenerateRequest(text="x", resumes=[api.Resume(committed_ids=[3] * 4097)]),
        "resumes[0].committed_ids",
        "at most 4096 ids; it has 4097",
    ),
    "unknown fields without end": (
        api.GenerateRequest.FromString(b"\xf8\x07\x01" * 100_000),
        "(unknown)",
        "300000 bytes are fields that are unknown to this version",
    ),
    "max_new_tokens 0": (
        api.GenerateRequest(prompt_ids=ids(1), max_new_tokens=0),
        "max_new_tokens",
        "must be at least 1",
    ),
    "max_new_tokens absurd": (
        api.GenerateRequest(prompt_ids=ids(1), max_new_tokens=2**32 - 1),
        "max_new_tokens",
        "at most 4095",
    ),
    "max_new_tokens one too many": (
        api.GenerateRequest(prompt_ids=ids(96), max_new_tokens=4001),
        "max_new_tokens",
        "at most 4000 after a prompt of 96 tokens, not 4001",
    ),
    "stop empty": (api.GenerateRequest(text="x", stop=["a", ""]), "stop[1]", "1 to 256 characters"),
    "stop too long": (api.GenerateRequest(text="x", stop=["a" * 257]), "stop[0]", "it has 257"),
    "stop too many": (api.GenerateRequest(text="x", stop=["a"] * 17), "stop", "at most 16"),
    "stop id": (api.GenerateRequest(text="x", stop_token_ids=[3, 512]), "stop_token_ids[1]", "below 512"),
    "stop ids too many": (api.GenerateRequest(text="x", stop_token_ids=[3] * 257), "stop_token_ids", "at most 64"),
    "algorithm": (
        api.GenerateRequest(text="x", algorithm="Magic"),
        "algorithm",
        "unknown algorithm 'Magic'; this server has JointThreshold, LowConfidence",
    ),
    "algorithm of other models": (
        api.GenerateRequest(text="x", algorithm="HierarchyBlock"),
        "algorithm",
        "HierarchyBlock cannot run on this model; this server has JointThreshold, LowConfidence",
    ),
    "parameter": (
        api.GenerateRequest(text="x", algorithm_params={"heat": 1}),
        "algorithm_params",
        "LowConfidence has no parameter 'heat'; it has threshold",
    ),
    "parameter of another algorithm": (
        api.GenerateRequest(text="x", algorithm_params={"max_post_edit_steps": 1}),
        "algorithm_params",
        "no parameter 'max_post_edit_steps'",
    ),
    "parameter too high": (
        api.GenerateRequest(text="x", algorithm_params={"threshold": 1.5}),
        "algorithm_params",
        "threshold must be from 0 to 1, not 1.5",
    ),
    "parameter a little too high": (
        api.GenerateRequest(text="x", algorithm_params={"threshold": 1.0000001}),
        "algorithm_params",
        "threshold must be from 0 to 1, not 1.0000001",
    ),
    "parameter too low": (
        api.GenerateRequest(text="x", algorithm_params={"threshold": -0.1}),
        "algorithm_params",
        "threshold must be",
    ),
    "parameter nan": (
        api.GenerateRequest(text="x", algorithm_params={"threshold": math.nan}),
        "algorithm_params",
        "not nan",
    ),
    "parameter no integer": (
        api.GenerateRequest(text="x", algorithm="JointThreshold", algorithm_params={"max_post_edit_steps": 1.5}),
        "algorithm_params",
        "max_post_edit_steps must be an integer, not 1.5",
    ),
    "no samples": (api.GenerateRequest(text="x", n=0), "n", "must be from 1 to 16, not 0"),
    "samples too many": (api.GenerateRequest(text="x", n=2**32 - 1), "n", "must be from 1 to 16, not 4294967295"),
    "priority too high": (api.GenerateRequest(text="x", priority=1001), "priority", "from -1000 to 1000, not 1001"),
    "priority too low": (api.GenerateRequest(text="x", priority=-(2**31)), "priority", "not -2147483648"),
    "request id too long": (api.GenerateRequest(text="x", request_id="é" * 129), "request_id", "it has 129"),
    "request id with a line break": (api.GenerateRequest(text="x", request_id="a\nb"), "request_id", "control"),
    "request id with an escape": (api.GenerateRequest(text="x", request_id="\x1b[2J"), "request_id", "control"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_by_name(case: str) -> None:
    """Every kind of bad input gets INVALID_ARGUMENT with the field and what is allowed, in one line."""
    request, field, words = REFUSALS[case]
    error = refusal(request)
    assert error.field == field
    assert words in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, -math.inf)],
        *[("top_p", value) for value in (0.0, -1.0, 1.1, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        ("seed", 2**63),
    ],
)
def test_sampling_out_of_range(name: str, value: float) -> None:
    """Sampling parameters out of range are refused by name."""
    request = api.GenerateRequest(text="x")
    setattr(request.sampling, name, value)
    assert refusal(request).field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (0.0, 2.0)],
        *[("top_p", value) for value in (1e-6, 1.0)],
        *[("min_p", value) for value in (0.0, 1.0)],
        *[("top_k", value) for value in (0, 1, 511)],
        *[("seed", value) for value in (0, 2**63 - 1)],
    ],
)
def test_sampling_at_its_limits(name: str, value: float) -> None:
    """The limits themselves are allowed and arrive; a seed of 0 is a seed."""
    request = api.GenerateRequest(text="x")
    setattr(request.sampling, name, value)
    assert getattr(parse_generate(request, RULES).sampling, name) == pytest.approx(value)


@pytest.mark.parametrize("top_k", [512, 2**30, 2**32 - 1])
def test_a_top_k_of_all_tokens_is_off(top_k: int) -> None:
    """Keeping as many tokens as there are filters nothing."""
    request = api.GenerateRequest(text="x", sampling=api.SamplingParams(top_k=top_k))
    assert parse_generate(request, RULES).sampling.top_k == 0


def test_provisional_blocks_are_asked_for_by_presence() -> None:
    """Absent is never, 0 the default; a server in lockstep refuses the field by name."""
    request = api.GenerateRequest(text="x")
    assert parse_generate(request, RULES).provisional_every_forwards == 0
    for value, every in ((0, 4), (1, 1), (2**32 - 1, 2**32 - 1)):
        request.provisional_every_forwards = value
        assert parse_generate(request, RULES).provisional_every_forwards == every
        error = refusal(request, dataclasses.replace(RULES, fdfo=False))
        assert error.field == "provisional_every_forwards" and "leave it out" in error.message


ASKING: dict[str, api.GenerateRequest] = {
    "json_schema": api.GenerateRequest(json_schema="{}"),
    "regex": api.GenerateRequest(regex="a+"),
    "grammar": api.GenerateRequest(grammar="root ::= x"),
    "logit_bias": api.GenerateRequest(logit_bias={5: 0.0}),
    "frequency_penalty": api.GenerateRequest(frequency_penalty=0.1),
    "presence_penalty": api.GenerateRequest(presence_penalty=math.nan),
    "repetition_penalty": api.GenerateRequest(repetition_penalty=0.0),
    "min_new_tokens": api.GenerateRequest(min_new_tokens=1),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(field: str) -> None:
    """A field that this version does not serve is refused at once, not left to wait for ever."""
    request = ASKING[field]
    request.text = "x"
    error = refusal(request)
    assert error.field == field
    assert "not supported" in error.message


def test_neutral_values_of_unsupported_fields_ask_for_nothing() -> None:
    """Clients that write out defaults are served."""
    request = api.GenerateRequest(
        text="x",
        n=1,
        priority=0,
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        min_new_tokens=0,
        json_schema="",
        logprobs=False,
    )
    assert parse_generate(request, RULES) == parse_generate(api.GenerateRequest(text="x"), RULES)


def test_every_field_of_the_proto_is_served_or_refused() -> None:
    """A field added to the proto must be parsed or put into the table; it is never ignored."""
    served = {"request_id", "text", "prompt_ids", "messages", "sampling", "max_new_tokens", "stop", "stop_token_ids"}
    served |= {"ignore_eos", "algorithm", "algorithm_params", "parse_special_tokens", "logprobs", "first_unmask_steps"}
    served |= {"n", "priority", "resumes", "provisional_every_forwards"}
    assert served | set(UNSUPPORTED) == {field.name for field in api.GenerateRequest.DESCRIPTOR.fields}
    assert not served & set(UNSUPPORTED)


# Field 100 as a varint, which no message has.
UNKNOWN = b"\xa0\x06\x05"


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (lambda request: request, "100"),
        (lambda request: request.sampling, "sampling.100"),
        (lambda request: request.messages, "messages.100"),
        (lambda request: request.messages.messages[1], "messages.messages[1].100"),
    ],
)
def test_fields_of_a_newer_version_are_refused(place: Callable[[api.GenerateRequest], object], field: str) -> None:
    """A field number that this version does not know is refused, at any depth."""
    request = api.GenerateRequest(
        messages=chat(("user", "x"), ("user", "y")),
        sampling=api.SamplingParams(temperature=1),
        algorithm_params={"threshold": 0.5},
    )
    parse_generate(request, RULES)
    place(request).MergeFromString(UNKNOWN)  # type: ignore[attr-defined]
    error = refusal(request)
    assert error.field == field
    assert "100" in error.message


@pytest.mark.parametrize("prompt_length", [1, B - 1, B, B + 1, 2 * B, 10 * B + 7])
@pytest.mark.parametrize("max_new_tokens", [1, B - 1, B, B + 1])
def test_lengths_around_a_block(prompt_length: int, max_new_tokens: int) -> None:
    """Prompt and output of any length beside a block border are taken as they are."""
    request = api.GenerateRequest(prompt_ids=ids(prompt_length), max_new_tokens=max_new_tokens)
    spec = parse_generate(request, RULES)
    assert (len(spec.prompt_ids), spec.max_new_tokens) == (prompt_length, max_new_tokens)


def test_the_longest_request() -> None:
    """Prompt and output may fill the context to the last token."""
    spec = parse_generate(api.GenerateRequest(prompt_ids=ids(CONTEXT - 1), max_new_tokens=1), RULES)
    assert spec.max_new_tokens == 1
    spec = parse_generate(api.GenerateRequest(prompt_ids=ids(1), max_new_tokens=CONTEXT - 1), RULES)
    assert spec.max_new_tokens == CONTEXT - 1


def test_what_can_never_fit_the_kv_pool() -> None:
    """A pool of 100 tokens holds three whole blocks; more is refused, naming the worker's limit."""
    rules = dataclasses.replace(RULES, max_tokens_in_pool=100)
    assert parse_generate(api.GenerateRequest(prompt_ids=ids(90)), rules).max_new_tokens == 6
    assert parse_generate(api.GenerateRequest(prompt_ids=ids(90), max_new_tokens=6), rules).max_new_tokens == 6
    error = refusal(api.GenerateRequest(prompt_ids=ids(90), max_new_tokens=7), rules)
    assert error.field == "max_new_tokens"
    assert "at most 6" in error.message
    assert "KV pool of 100 tokens (max_total_tokens)" in error.message
    error = refusal(api.GenerateRequest(prompt_ids=ids(96)), rules)
    assert error.field == "prompt_ids"
    assert "max_total_tokens" in error.message


def test_a_pool_larger_than_the_context_changes_nothing() -> None:
    """The smaller of context limit and pool counts."""
    rules = dataclasses.replace(RULES, max_tokens_in_pool=10 * CONTEXT)
    assert parse_generate(api.GenerateRequest(prompt_ids=ids(6)), rules).max_new_tokens == CONTEXT - 6


@pytest.mark.parametrize("text", ["<|mask|>", "a<|mask|><|mask|>b", "<|endoftext|>"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_special_text_in_prompts_is_served(text: str, role: str) -> None:
    """The mask token's text in a prompt or message is text: accepted, and never the mask id."""
    for request in (api.GenerateRequest(text=text), api.GenerateRequest(messages=chat((role, text)))):
        assert MASK not in parse_generate(request, RULES).prompt_ids


def test_special_tokens_of_text_on_request() -> None:
    """parse_special_tokens reads the others: a prompt in the model's own format can be sent as text."""
    request = api.GenerateRequest(text="<role>HUMAN</role>hi<|role_end|>", parse_special_tokens=True)
    assert [token_id for token_id in parse_generate(request, RULES).prompt_ids if token_id <= 4] == [2, 3, 4]


def test_a_template_that_gives_nothing(tmp_path: Path) -> None:
    """Messages that render to nothing, or to the mask token, are refused."""
    for template, words in (("", "no chat template"), ("{{ '' }}", "no tokens"), ("<|mask|>", "mask token")):
        path = write_folder(tmp_path, template=template, tokenizer=byte_tokenizer([]), config=LLADA2_CONFIG)
        rules = dataclasses.replace(RULES, codec=TextCodec(path), folder=read_model_folder(path))
        error = refusal(api.GenerateRequest(messages=chat(("user", "x"))), rules)
        assert error.field == "messages"
        assert words in error.message


def test_ids_of_the_padded_head_may_stand_in_prompts(tmp_path: Path) -> None:
    """Rows of the head without a token can be published, so the next turn may have them; beyond the head is nothing."""
    path = write_folder(tmp_path)  # 261 tokens, 600 rows
    rules = dataclasses.replace(RULES, codec=TextCodec(path), folder=read_model_folder(path))
    request = api.GenerateRequest(prompt_ids=api.TokenIds(ids=[261, 599]), stop_token_ids=[599])
    assert parse_generate(request, rules).request_stop_ids == (599,)
    assert refusal(api.GenerateRequest(prompt_ids=api.TokenIds(ids=[600])), rules).field == "prompt_ids.ids[0]"


def test_two_defaults_of_an_algorithm() -> None:
    """The server's parameters are defaults for its own algorithm; another algorithm has its own."""
    assert parse_generate(api.GenerateRequest(text="x"), RULES).algorithm_params == {"threshold": 0.9}
    other = api.GenerateRequest(text="x", algorithm="JointThreshold")
    assert parse_generate(other, RULES).algorithm_params == {"threshold": 0.5, "max_post_edit_steps": 16}
    given = api.GenerateRequest(text="x", algorithm="LowConfidence", algorithm_params={"threshold": 0.25})
    assert parse_generate(given, RULES).algorithm_params == {"threshold": 0.25}

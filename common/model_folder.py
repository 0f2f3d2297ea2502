"""Facts of a Hugging Face model folder that both services need. Nothing here loads weights or imports torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.architectures import ARCHITECTURES, REFUSED, Architecture, CheckpointError
from common.fingerprint import make_fingerprint
from common.folder_files import ModelFolderError, folder_name, one_line, parse_json_object, read_json_if_there
from common.tokenizer_files import load_tokenizer, read_chat_templates, special_token_texts

__all__ = ["ModelFolder", "ModelFolderError", "load_tokenizer", "read_model_folder"]


@dataclass(frozen=True)
class ModelFolder:
    """What is served: everything that the engine must know of a model, resolved.

    has_weights: False for what computes from its configuration alone.
    logit_shift: 1 = the logits of a position speak of the next one.
    algorithms: those that fit, by name, the default first.
    vocab_size: rows of the head. num_tokens: ids from here on have no token (padding of the head).
    context_length: tokens of prompt and output together.
    fingerprint: of configuration, tokenizer, chat templates, block size and mask id, and of samples of the weights
    (common/fingerprint.py).
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
    said = json.dumps([read_chat_templates(path), block_size, mask_token_id], sort_keys=True)
    parts = (config_bytes, _tokenizer_bytes(path, tokenizer), said.encode())
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
        fingerprint=make_fingerprint(parts, path, has_weights),
        config=config,
        warnings=warnings,
    )


def _read_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    file = path / "config.json"
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: config.json is missing; is this the folder of a checkpoint?") from error
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {one_line(error)}") from error
    return data, parse_json_object(file, data)


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
    named = re.search(r"-b(\d+)(?=-|$)", folder_name(path))
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
    texts = (*architecture.mask_token_texts, special_token_texts(path).get("mask_token"))
    ids = {text: tokenizer.token_to_id(text) for text in texts if text}
    found = {text: token_id for text, token_id in ids.items() if token_id is not None}
    # A tokenizer that was saved again may have two: a tool that did not find the text it looked for added it.
    usual = config.get("mask_token_id") or architecture.mask_token_id
    if len(set(found.values())) == 1 or usual in found.values():
        return usual if usual in found.values() else next(iter(found.values()))
    if found:
        listed = " and ".join(f"{text} with id {token_id}" for text, token_id in found.items())
        raise ModelFolderError(
            f"{path}: the tokenizer has {listed}, and only one is the mask token; say which: --mask-token-id"
        )
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
    eos = read_json_if_there(file).get("eos_token_id")
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


def _tokenizer_bytes(path: Path, tokenizer: Tokenizer) -> bytes:
    """What is hashed of the tokenizer."""
    file = path / "tokenizer.json"
    try:
        return file.read_bytes() if file.is_file() else tokenizer.to_str().encode()
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {one_line(error)}") from error

"""A model folder: what it is, whether its files are whole, and what memory it takes."""

from __future__ import annotations

import json
import math
import os
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.fingerprint import short_fingerprint
from fdfo_client.commands.words import count, size
from fdfo_client.doctor.finding import Finding, fail, ok, warn
from worker_svc.settings import WorkerSettings, default_kv_tokens

if TYPE_CHECKING:
    from common.model_folder import ModelFolder

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_FOUND_CHARS = 240
TIGHT = 0.9  # more of the free memory than this is too near


@dataclass(frozen=True)
class Weights:
    """All tensors in a folder's files."""

    num_files: int
    num_tensors: int
    num_numbers: int


class BadWeights(Exception):
    """One line: which file, and what is wrong with it."""


def check(path: Path, free_bytes: int | None, where: str) -> tuple[list[Finding], str | None]:
    """The findings, and the folder's fingerprint if it can be read. `free_bytes`: the memory `where` it goes, None when
    that is not known. Needs the extra scheduler."""
    from common.model_folder import ModelFolderError, read_model_folder

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it is asked for folders without tokenizer.json
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = read_model_folder(path)
    except ModelFolderError as error:
        found = textwrap.shorten(str(error).removeprefix(f"{path}: "), MAX_FOUND_CHARS, placeholder=" ...")
        return [fail(f"model {path}", found, _advice(path, found))], None
    return list(_check_folder(path, folder, free_bytes, where)), folder.fingerprint


def _advice(path: Path, found: str) -> str:
    """What to do about a folder of which this was found."""
    if not (path / "config.json").is_file() or "not served" in found:
        return "name the folder of a checkpoint that is served: docs/models.md"
    if "tokenizer" in found and not (path / "tokenizer.json").is_file():
        return "fetch tokenizer.json of the checkpoint, or convert its tokenizer to it"
    if "cannot be read" in found or "not valid JSON" in found:
        return "fetch the file again, and see that this user may read it"
    return "correct the file, or fetch it again; what a folder must have: docs/models.md"


def _check_folder(path: Path, folder: ModelFolder, free_bytes: int | None, where: str) -> Iterator[Finding]:
    from common.tokenizer_files import read_chat_templates

    yield ok(
        f"model {path}",
        f"{folder.architecture}, blocks of {folder.block_size}, context of {folder.context_length}, "
        f"fingerprint {short_fingerprint(folder.fingerprint)}",
    )
    for hint in folder.warnings:
        yield warn("model", hint, "give the flag to both services if so")
    yield ok("tokenizer", f"{folder.num_tokens} tokens, mask {folder.mask_token_id}, stop {folder.stop_token_ids}")
    said = folder.config.get("mask_token_id", folder.mask_token_id)
    if said != folder.mask_token_id:
        found = f"config.json says {said!r:.40}, the tokenizer {folder.mask_token_id}, which is served"
        yield warn("mask token", found, "correct mask_token_id of config.json, or give services --mask-token-id")
    if not read_chat_templates(path):
        yield warn("chat template", "none, so messages are refused", "ask with plain prompts: fdfo generate --raw")
    if folder.has_weights:
        try:
            weights = read_weights(path)
        except BadWeights as error:
            yield fail("weights", str(error), "fetch the file again")
            return
        yield ok("weights", f"{weights.num_numbers / 1e6:.1f} M parameters in {count(weights.num_files, 'file')}")
        yield check_memory(folder, weights, free_bytes, where)


def read_weights(path: Path) -> Weights:
    """From the headers of the safetensors files. Raises BadWeights for one that is missing or not whole."""
    index = path / "model.safetensors.index.json"
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise BadWeights(f"{index.name} is no index of shards") from None
    if not names:
        raise BadWeights("there is no *.safetensors file")
    headers = [_read_header(path / name) for name in names]
    shapes = [shape for header in headers for shape in header]
    return Weights(len(names), len(shapes), sum(math.prod(shape) for shape in shapes))


def check_memory(folder: ModelFolder, weights: Weights, free_bytes: int | None, where: str) -> Finding:
    """Weights and KV pool as a worker without further flags takes them, against what is free."""
    from common.architectures import ARCHITECTURES, CheckpointError

    dtype = str(folder.config.get("dtype") or folder.config.get("torch_dtype") or "float32")
    if dtype not in DTYPE_BYTES:
        return fail("memory", f"config.json: dtype {dtype} is not served", "give workers --dtype float32 or bfloat16")
    try:
        backbone = ARCHITECTURES[folder.architecture].backbone(folder.config)
    except CheckpointError as error:
        return fail("memory", str(error), "correct config.json, or fetch it again")
    tokens = default_kv_tokens(folder.context_length, folder.block_size, WorkerSettings.max_running_requests)
    token_bytes = 2 * backbone.num_layers * backbone.num_kv_heads * backbone.head_dim * DTYPE_BYTES[dtype]
    weight_bytes, kv_bytes = weights.num_numbers * DTYPE_BYTES[dtype], tokens * token_bytes
    needed = weight_bytes + kv_bytes
    found = f"{size(weight_bytes)} of weights and {size(kv_bytes)} of KV ({tokens} tokens) in {dtype}"
    if free_bytes is None:
        return warn(
            "memory", f"{found}; what is free on {where} is not known", "run fdfo doctor on the machine that has it"
        )
    found += f"; {size(free_bytes)} free on {where}"
    advice = "give workers a smaller --max-total-tokens, or another --device"
    if needed > free_bytes:
        return fail("memory", found, advice)
    return warn("memory", found, advice) if needed > TIGHT * free_bytes else ok("memory", found)


def _read_header(file: Path) -> list[list[int]]:
    """The shapes of its tensors. The format: 8 bytes little-endian length, so many bytes of JSON, the tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            num_bytes = file.stat().st_size
            if length > num_bytes - 8:
                raise BadWeights(f"{file.name} is cut off, or no safetensors file")
            tensors = [value for name, value in json.loads(stream.read(length)).items() if name != "__metadata__"]
        if 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0) != num_bytes:
            raise BadWeights(f"{file.name} has not the size that its header says")
        return [tensor["shape"] for tensor in tensors]
    except OSError as error:
        raise BadWeights(f"{file.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise BadWeights(f"{file.name}: its header is not that of a safetensors file") from None

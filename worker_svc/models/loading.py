"""Weights of a published checkpoint, from safetensors files into a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.architectures import ARCHITECTURES, Backbone, CheckpointError
from common.model_folder import ModelFolder
from worker_svc.models.base import BlockModel
from worker_svc.models.decoder import Decoder
from worker_svc.models.shard import WHOLE, Shard

__all__ = ["CheckpointError", "load_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
STORED_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

HEAD_NAME = "lm_head.weight"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Stored:
    """A tensor as its file's header describes it."""

    file: Path
    name: str
    dtype: str  # as the file writes it
    shape: tuple[int, ...]
    num_bytes: int


def load_model(
    folder: ModelFolder,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    shard: Shard = WHOLE,
    on_progress: Callable[[int, int], None] | None = None,
) -> BlockModel:
    """The model of `folder`, or a shard of it, on `device`, ready to run. `dtype`: float32, bfloat16, or None for the
    folder's own.

    Names and shapes are compared before memory is taken; then each tensor (of a shard, its part alone) is read,
    converted to `dtype` and copied to its place, so that never more than one is there twice.
    `on_progress(bytes_read, bytes_total)` is called about ten times. Raises CheckpointError, one line, for whatever
    cannot be served.
    """
    backbone = ARCHITECTURES[folder.architecture].backbone(folder.config)
    stored = _read_headers(_weight_files(folder.path))
    if dtype is None:
        dtype = _stored_dtype(folder.config, stored)
    with torch.device("meta"):  # shapes without memory
        shapes = Decoder(backbone, dtype)
    second_head = stored.pop(HEAD_NAME, None) if backbone.tied_head else None
    merged_experts = any(name.endswith(".mlp.experts.gate_proj") for name in stored)
    _compare(stored, shapes.checkpoint_tensors(merged_experts))
    if second_head is not None:
        _check_same(second_head, stored[f"{backbone.names.embedding}.weight"])

    with torch.device(device):
        model = Decoder(backbone, dtype, shard)
    places = model.checkpoint_tensors(merged_experts)
    total_bytes = sum(tensor.num_bytes for tensor in stored.values())
    done_bytes, reported_tenths = 0, 0
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        with _open(file) as reader:
            for name, tensor in stored.items():
                if tensor.file == file:
                    places[name].copy_(_part(reader, tensor, places[name], shard, _blocks_of_rows(name, backbone)))
                    done_bytes += tensor.num_bytes
                    if on_progress is not None and done_bytes * 10 // total_bytes > reported_tenths:
                        reported_tenths = done_bytes * 10 // total_bytes
                        on_progress(done_bytes, total_bytes)
    return model.eval()


def _part(reader: Any, tensor: _Stored, place: torch.Tensor, shard: Shard, blocks: tuple[int, ...]) -> torch.Tensor:
    """What belongs in `place`: the whole tensor, or in the dimension that is cut this rank's part. `blocks`: where rows
    of several kinds are stored above each other, how many of each; of each kind the rank has a part."""
    cut = [dim for dim, (stored, own) in enumerate(zip(tensor.shape, place.shape, strict=True)) if stored != own]
    if not cut:
        return reader.get_tensor(tensor.name)  # type: ignore[no-any-return]
    (dim,) = cut
    view, parts, first = reader.get_slice(tensor.name), [], 0
    for length in blocks if dim == 0 and blocks else (tensor.shape[dim],):
        own = length // shard.size
        start = first + shard.rank * own
        parts.append(view[(*[slice(None)] * dim, slice(start, start + own))])
        first += length
    return torch.cat(parts, dim)


def _blocks_of_rows(name: str, backbone: Backbone) -> tuple[int, ...]:
    """The rows of q, k and v in a tensor that has all three; empty for any other."""
    names = backbone.names
    if len(names.qkv) > 1 or f".{names.attention}.{names.qkv[0]}." not in name:
        return ()
    return tuple(heads * backbone.head_dim for heads in (backbone.num_heads, *[backbone.num_kv_heads] * 2))


def _stored_dtype(config: dict[str, Any], stored: dict[str, _Stored]) -> torch.dtype:
    """What config.json says; of one that says nothing, the type of most bytes."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        num_bytes: Counter[str] = Counter()
        for tensor in stored.values():
            num_bytes[STORED_DTYPE_NAMES[tensor.dtype]] += tensor.num_bytes
        name = max(num_bytes, key=num_bytes.__getitem__, default="float32")
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in DTYPES:
        raise CheckpointError(f"the checkpoint's dtype {name!r} is not served; choose --dtype {' or '.join(DTYPES)}")
    return DTYPES[name]


def _weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The files with weights; for each the tensors that the index expects in it (None = there is no index)."""
    index = path / INDEX_NAME
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            others = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern)]
            found = f"; {min(others)} is there, but only safetensors is read" if others else ""
            raise CheckpointError(f"{path}: there is no *.safetensors file{found}")
        if len(files) > 1:
            raise CheckpointError(f"{path}: {len(files)} safetensors files but no {INDEX_NAME}")
        return {files[0]: None}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        items = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no valid index of shards: {_one_line(error)}") from error
    names_by_file: dict[Path, set[str] | None] = {}
    for name, file_name in items:
        # Shards lie beside the index; a path would read files from elsewhere.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not (path / file_name).is_file():
            raise CheckpointError(f"{index}: {name} is in {file_name!r}, and there is no such file in the folder")
        names = names_by_file.setdefault(path / file_name, set())
        assert names is not None
        names.add(name)
    return names_by_file


def _read_headers(files: dict[Path, set[str] | None]) -> dict[str, _Stored]:
    """All tensors by the name the model knows them by."""
    stored: dict[str, _Stored] = {}
    for file, names_in_index in files.items():
        with _open(file) as reader:
            names_in_file = list(reader.keys())
            if names_in_index is not None and names_in_index != set(names_in_file):
                differing = names_in_index ^ set(names_in_file)
                raise CheckpointError(f"{file}: its tensors are not those of {INDEX_NAME}: {_list(differing)}")
            for name in names_in_file:
                view = reader.get_slice(name)
                shape, stored_dtype = tuple(view.get_shape()), view.get_dtype()
                if stored_dtype not in STORED_DTYPE_BYTES:
                    raise CheckpointError(f"{file}: {name} is stored as {stored_dtype}; read are F32, BF16 and F16")
                known_as = _without_prefix(name)
                if known_as in stored:
                    raise CheckpointError(f"{file}: {name} is there twice")
                num_bytes = STORED_DTYPE_BYTES[stored_dtype] * torch.Size(shape).numel()
                stored[known_as] = _Stored(file, name, stored_dtype, shape, num_bytes)
    return stored


def _open(file: Path) -> Any:  # safe_open has no types
    """Raises CheckpointError for a file that is cut off, or no safetensors file."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read, fetch it again: {_one_line(error)}") from error


def _compare(stored: dict[str, _Stored], expected: dict[str, torch.Tensor]) -> None:
    missing = expected.keys() - stored.keys()
    if missing:
        raise CheckpointError(f"tensors missing in the checkpoint: {_list(missing)}")
    surplus = stored.keys() - expected.keys()
    if surplus:
        raise CheckpointError(f"tensors in the checkpoint that the model has no use for: {_list(surplus)}")
    for name, tensor in stored.items():
        if tensor.shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, and config.json asks for "
                f"{list(expected[name].shape)}"
            )


def _check_same(head: _Stored, embedding: _Stored) -> None:
    """Some checkpoints hold a tied head as a tensor of its own; another one than the embedding is a contradiction."""
    with _open(head.file) as one, _open(embedding.file) as other:
        if not torch.equal(one.get_tensor(head.name), other.get_tensor(embedding.name)):
            raise CheckpointError(
                f"{head.file}: {head.name} is not the embedding, and config.json says tie_word_embeddings"
            )


def _without_prefix(name: str) -> str:
    """Exports from multi-modal classes call the model `model.language_model`."""
    rest = name.removeprefix("model.language_model.")
    return name if rest == name else f"model.{rest.removeprefix('model.')}"


def _list(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

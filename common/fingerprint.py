"""Whether scheduler and worker serve the same model: a hash of what was read, and one of samples of the weights.

A scheduler needs no weights (docs/decisions/0003-what-is-in-a-fingerprint.md), so the two stay apart in the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from common.folder_files import ModelFolderError, one_line, read_json_if_there

HASH_CHARS = 32
SHORT_CHARS = 8
# Of each file so many evenly spaced pieces are read: half a MiB, however many GB it has.
NUM_SAMPLES = 128
SAMPLE_BYTES = 4096
INDEX_NAME = "model.safetensors.index.json"


def make_fingerprint(parts: Iterable[bytes], path: Path, has_weights: bool) -> str:
    """`A-B`, 32 hex digits each: A of `parts`, B of the folder's weight files. B is empty where there are none: in a
    scheduler's folder, and for what computes without weights.

    Depends on the files' content, never on where the folder lies. Raises ModelFolderError for a file that is cut off.
    """
    return f"{_hash(parts)}-{_hash_of_weights(path) if has_weights else ''}"


def check_fingerprint(theirs: str, ours: str) -> None:
    """Raises ValueError unless a worker with `theirs` serves the model `ours`; without weights here any will do."""
    (their_model, _, their_weights), (our_model, _, our_weights) = theirs.partition("-"), ours.partition("-")
    shown = f"its fingerprint is {short_fingerprint(theirs)}, ours {short_fingerprint(ours)}"
    if their_model != our_model:
        raise ValueError(
            f"another model: {shown}; start both services with the same --model-path, --block-size and --mask-token-id"
        )
    if our_weights and their_weights != our_weights:
        raise ValueError(
            f"another model: {shown}; the configuration is the same, the weights are not those of this scheduler's "
            "folder, or of its first worker where that has none"
        )


def short_fingerprint(fingerprint: str) -> str:
    """The beginning of both hashes, for people."""
    return "-".join(part[:SHORT_CHARS] for part in fingerprint.split("-"))


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # Each part with its length: moving a byte from one part to the next must not give the same hash.
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()[:HASH_CHARS]


def _hash_of_weights(path: Path) -> str:
    """Of each file name, size, header and samples; empty unless all files are here."""
    try:
        files = _weight_files(path)
        if not files or not all(file.is_file() for file in files):
            return ""
        return _hash(part for file in files for part in _sampled(file))
    except OSError as error:
        raise ModelFolderError(f"{path}: the weight files cannot be read: {one_line(error)}") from error


def _weight_files(path: Path) -> list[Path]:
    """Those of the index; without one, all safetensors files."""
    if not (path / INDEX_NAME).is_file():
        return sorted(path.glob("*.safetensors"))
    names = read_json_if_there(path / INDEX_NAME).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelFolderError(f"{path / INDEX_NAME}: no valid index of shards: weight_map must name a file a tensor")
    return [path / name for name in sorted(set(names.values()))]


def _sampled(file: Path) -> Iterable[bytes]:
    num_bytes = file.stat().st_size
    yield file.name.encode()
    yield b"%d" % num_bytes
    with file.open("rb") as stream:
        # The format: 8 bytes little-endian length, then that many bytes of JSON, then the tensors.
        header_length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or header_length > num_bytes - 8:
            raise ModelFolderError(f"{file}: the file is cut off or no safetensors file; fetch it again")
        yield stream.read(header_length)
        start, room = stream.tell(), num_bytes - stream.tell() - SAMPLE_BYTES
        for number in range(NUM_SAMPLES):
            stream.seek(start + max(0, room * number // (NUM_SAMPLES - 1)))
            yield stream.read(SAMPLE_BYTES)
            if room <= 0:
                break

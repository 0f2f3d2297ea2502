"""Reading the files of a model folder, with errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ModelFolderError(Exception):
    """The folder cannot be served. The message is one line: what is wrong, where, and what to do."""


def read_json_if_there(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} without the file. Raises ModelFolderError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFolderError(f"{file}: cannot be read: {one_line(error)}") from error
    return parse_json_object(file, data)


def parse_json_object(file: Path, data: bytes) -> dict[str, Any]:
    """The object that these bytes of the file are. Raises ModelFolderError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8
        raise ModelFolderError(f"{file}: not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: must hold a JSON object")
    return value


def one_line(error: BaseException) -> str:
    """What the error says, in one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def folder_name(path: Path) -> str:
    """The name of the model, by its folder's; in the cache of Hugging Face, models--ORG--NAME/snapshots/HASH, NAME."""
    path = path.resolve()
    repository = path.parent.parent.name
    is_cached = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if is_cached else path.name

"""Prompts with known answers, and when an answer is right."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.bench.workload import read_jsonl

Check: TypeAlias = Callable[[str, str], bool]

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """What is asked, and the right answer."""

    prompt: str
    answer: str


def is_exact(said: str, answer: str) -> bool:
    """Both texts are the same but for white space at their ends."""
    return said.strip() == answer.strip()


def has_number(said: str, answer: str) -> bool:
    """The last number in what was said is the last one in the answer; 1,200 and 1200.0 are the same number."""
    numbers = [_NUMBER.findall(text) for text in (said, answer)]
    return all(numbers) and len({float(found[-1].replace(",", "")) for found in numbers}) == 1


CHECKS: Mapping[str, Check] = {"exact": is_exact, "number": has_number}


def read_problems(path: Path) -> list[Problem]:
    """The problems of a JSONL file with `prompt` and `answer` in each line; other fields are passed over.

    Raises InvalidRequest naming file, line and field.
    """
    problems: list[Problem] = []
    for place, fields in read_jsonl(path):
        for name in ("prompt", "answer"):
            if not isinstance(fields.get(name), str) or not fields[name].strip():
                said = f"{fields[name]!r}"[:40] if name in fields else "nothing"
                raise InvalidRequest(f"{place}, {name}: must be a text that is not empty, not {said}", name)
        problems.append(Problem(fields["prompt"], fields["answer"]))
    if not problems:
        raise InvalidRequest(f"{path}: has no line; give one JSON object a line, with prompt and answer")
    return problems


def reasoning_gym_problems(dataset: str, count: int, seed: int) -> list[Problem]:
    """So many problems of a data set of the package reasoning-gym, such as gsm_symbolic; the same for the same seed.

    Raises FdfoError without the package, InvalidRequest for a data set that it does not know.
    """
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise FdfoError(
            f"--reasoning-gym: needs the package reasoning-gym and what that needs ({error}); install it: pip install "
            "reasoning-gym"
        ) from None
    try:
        entries = package.create_dataset(dataset, size=count, seed=seed)
    except ValueError as error:
        raise InvalidRequest(f"--reasoning-gym {dataset}: {error}", "reasoning_gym") from None
    return [Problem(str(entry["question"]), str(entry["answer"])) for entry in entries]

"""Prompts with known answers, and when an answer is right."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client.bench.workload import read_jsonl

Check: TypeAlias = Callable[[str, str], bool]

# A minus sign belongs to the number unless something stands before it that it may be subtracted from: 5-7 has a 7.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """What is asked, and the right answer."""

    prompt: str
    answer: str


def is_exact(said: str, answer: str) -> bool:
    """Both texts are the same but for white space at their ends."""
    return said.strip() == answer.strip()


def is_same_text(said: str, answer: str) -> bool:
    """As `is_exact`, whatever the case, the kind of white space, and a full stop at the end."""
    return len({" ".join(text.casefold().split()).removesuffix(".").rstrip() for text in (said, answer)}) == 1


def has_number(said: str, answer: str) -> bool:
    """The last number in what was said is the last one in the answer; 1,200 and 1200.0 are the same number."""
    numbers = [_numbers(text) for text in (said, answer)]
    return all(numbers) and len({float(found[-1].replace(",", "")) for found in numbers}) == 1


def is_right(said: str, answer: str) -> bool:
    """`has_number` where the answer is nothing but a number, else `is_same_text`."""
    return (has_number if _numbers(answer) == [_with_plain_minus(answer.strip())] else is_same_text)(said, answer)


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(_with_plain_minus(text))


def _with_plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


CHECKS: Mapping[str, Check] = {"auto": is_right, "exact": is_exact, "text": is_same_text, "number": has_number}


def refuse_impossible(problems: Sequence[Problem], check: str) -> None:
    """Raises InvalidRequest naming the first problem whose own answer is not right by this check: none would be."""
    for number, problem in enumerate(problems, start=1):
        if not CHECKS[check](problem.answer, problem.answer):
            raise InvalidRequest(
                f"--check {check}: no answer to problem {number} could be right, since {problem.answer[:40]!r} is the "
                "right one; take --check auto",
                "check",
            )


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

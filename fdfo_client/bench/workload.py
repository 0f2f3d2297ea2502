"""What a load sends, and when: drawn lengths, lines of a dataset, or a recorded trace."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fdfo_client._errors import InvalidRequest
from fdfo_client._options import GenerateOptions, build_request

OPTION_NAMES = ("prompt", *GenerateOptions.__annotations__)
LONGEST_TRACE_S = 366 * 86_400
TRACE_HEADER = {"fdfo_trace": 1}
LENGTHS_HELP = "N, LOW:HIGH, normal:MEAN,STD, lognormal:MEAN,SIGMA or gamma:SHAPE,MEAN"
MAX_LENGTH = 1_000_000
MAX_SIGMA = 10.0

# JSON types of the options that `build_request` takes in other forms too, or does not look at closely.
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "prompt": (str,),
    "prompt_ids": (list,),
    "messages": (list,),
    "tools": (list,),
    "chat_template_kwargs": (dict,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "algorithm_params": (dict,),
    "ignore_eos": (bool,),
    "parse_special_tokens": (bool,),
    "timeout": (int, float),
}


@dataclass(frozen=True)
class Item:
    """One request: the options of `AsyncClient.stream` by name, and when to send it.

    at_s: seconds from the load's start; None where requests wait for each other instead.
    """

    at_s: float | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts. Draws are rounded and at least 1.

    uniform: from `first` to `second`, both included.
    normal: mean `first`, standard deviation `second`, in tokens.
    lognormal: mean `first` in tokens; `second` is the standard deviation of the logarithm.
    gamma: shape `first`, mean `second` in tokens.
    """

    kind: Literal["uniform", "normal", "lognormal", "gamma"]
    first: float
    second: float

    def draw(self, rng: random.Random, at_most: int) -> int:
        """A token count from 1 to `at_most`; larger draws are cut to it."""
        match self.kind:
            case "uniform":
                drawn: float = rng.randint(int(self.first), int(self.second))
            case "normal":
                drawn = rng.gauss(self.first, self.second)
            case "lognormal":
                drawn = rng.lognormvariate(math.log(self.first) - self.second**2 / 2, self.second)
            case "gamma":
                drawn = rng.gammavariate(self.first, self.second / self.first)
        return min(max(1, round(drawn)), at_most)

    @property
    def largest(self) -> int | None:
        """The largest draw; None if there is no limit."""
        return int(self.second) if self.kind == "uniform" else None

    def __str__(self) -> str:
        if self.kind == "uniform":
            return f"{self.first:.0f}" if self.first == self.second else f"{self.first:.0f}:{self.second:.0f}"
        return f"{self.kind}:{self.first!r},{self.second!r}"


def parse_lengths(text: str) -> Lengths:
    """The distribution that a text such as "128", "32:128" or "lognormal:200,0.8" names. Raises ValueError."""
    kind, _, rest = text.partition(":")
    try:
        match kind:
            case "normal" | "lognormal" | "gamma":
                first, second = (float(part) for part in rest.split(","))
                inside = 0 < first <= MAX_LENGTH and 0 <= second <= (MAX_SIGMA if kind == "lognormal" else MAX_LENGTH)
                if inside and (second > 0 or kind != "gamma"):
                    return Lengths(kind, first, second)
            case _:
                low, high = (int(part) for part in (text.split(":") if ":" in text else (text, text)))
                if 1 <= low <= high <= MAX_LENGTH:
                    return Lengths("uniform", low, high)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a distribution of token counts; give {LENGTHS_HELP}")


def synthetic_options(
    prompt_tokens: Lengths, output_tokens: Lengths, num_tokens: int, context_length: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Without end: prompts of random ids, each answered in full length, together within the context.

    The ids come from the middle half of the vocabulary: special tokens, among them the mask token that no prompt may
    hold, lie at its ends.
    """
    ids = range(num_tokens // 4, num_tokens - num_tokens // 4)
    while True:
        num_prompt = prompt_tokens.draw(rng, context_length - 1)
        yield {
            "prompt_ids": rng.choices(ids, k=num_prompt),
            "max_new_tokens": output_tokens.draw(rng, context_length - num_prompt),
            "ignore_eos": True,
            "seed": rng.getrandbits(31),
        }


def dataset_options(
    lines: Sequence[Mapping[str, Any]], output_tokens: Lengths, context_length: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """The lines of a dataset in order, again and again; `max_new_tokens` and `seed` are drawn where a line has none."""
    for line in itertools.cycle(lines):
        drawn = {"max_new_tokens": output_tokens.draw(rng, context_length - 1), "seed": rng.getrandbits(31)}
        yield drawn | dict(line)


def closed_items(options: Iterable[dict[str, Any]]) -> Iterator[Item]:
    """Items for a closed loop."""
    return (Item(None, each) for each in options)


def poisson_items(options: Iterable[dict[str, Any]], requests_per_s: float, rng: random.Random) -> Iterator[Item]:
    """Items at the times of a Poisson process: the time between two is exponential with mean 1 / requests_per_s."""
    at_s = 0.0
    for each in options:
        at_s += rng.expovariate(requests_per_s)
        yield Item(at_s, each)


def read_dataset(path: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Options from a JSONL file, one object a line, and the names in it that are no options and were left out.

    Each line has `prompt`, `prompt_ids` or `messages`. Raises InvalidRequest naming file, line and field.
    """
    lines: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for place, fields in read_jsonl(path):
        options = {name: value for name, value in fields.items() if name in OPTION_NAMES and value is not None}
        left_out |= fields.keys() - set(OPTION_NAMES)
        _check_options(options, place)
        lines.append(options)
    if not lines:
        raise InvalidRequest(f"{path}: has no line; give one JSON object a line, each with a prompt")
    return lines, left_out


def write_trace(path: Path, items: Iterable[Item]) -> None:
    """Write what `read_trace` reads: a line that says which format this is, then a line for each item."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(TRACE_HEADER) + "\n")
        for item in items:
            file.write(json.dumps({"at_s": item.at_s, **item.options}) + "\n")


def read_trace(path: Path) -> list[Item]:
    """The items of a trace by time. Raises InvalidRequest naming file, line and field."""
    lines = read_jsonl(path)
    place, header = next(lines, (f"{path}, line 1", {}))
    if header != TRACE_HEADER:
        raise InvalidRequest(f"{place}: not a trace of this version; the first line must be {json.dumps(TRACE_HEADER)}")
    items = [_trace_item(place, fields) for place, fields in lines]
    if not items:
        raise InvalidRequest(f"{path}: has no request; record one with `fdfo bench --record`")
    return sorted(items, key=lambda item: item.at_s or 0.0)


def _trace_item(place: str, fields: dict[str, Any]) -> Item:
    at_s = fields.pop("at_s", None)
    if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s <= LONGEST_TRACE_S:
        said = f"{at_s!r}"[:40]
        raise InvalidRequest(f"{place}, at_s: must be 0 to {LONGEST_TRACE_S} seconds (a year), not {said}", "at_s")
    if unknown := sorted(fields.keys() - set(OPTION_NAMES)):
        raise InvalidRequest(f"{place}, {unknown[0]}: no such option; there are {', '.join(OPTION_NAMES)}", unknown[0])
    options = {name: value for name, value in fields.items() if value is not None}
    _check_options(options, place)
    return Item(float(at_s), options)


def _check_options(options: Mapping[str, Any], place: str) -> None:
    """Refuse what no server could be sent."""
    for name, kinds in _JSON_TYPES.items():
        value = options.get(name)
        if value is not None and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidRequest(f"{place}, {name}: must be of type {wanted}, not {type(value).__name__}", name)
    rest: Any = {name: value for name, value in options.items() if name != "prompt"}
    try:
        build_request(options.get("prompt"), rest)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}, {error}", error.field) from None


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object with its place for error messages; empty lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", _parse_object(line, f"{path}, line {number}")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None


def _parse_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place}: must be a JSON object, not {type(value).__name__}")
    return value

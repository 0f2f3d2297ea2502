"""Asks a server all problems and compares two such runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fdfo_client._access import OPEN, Access
from fdfo_client._async_client import AsyncClient
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client._options import Message
from fdfo_client._waiting import waiting
from fdfo_client.evaluate.problems import CHECKS, Check, Problem, is_exact
from fdfo_client.evaluate.statistics import mcnemar_p, wilson_interval

VERSION = 1
_JSON_TYPES = {"prompt": str, "answer": str, "said": str, "is_right": bool, "tokens": int, "forwards": int}


@dataclass(frozen=True)
class Result:
    """What became of one problem. tokens, forwards: of its request. error: one line, where it failed."""

    prompt: str
    answer: str
    said: str = ""
    is_right: bool = False
    tokens: int = 0
    forwards: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """One result for each problem, in their order.

    server: what answered, by the names of `ServerInfo`. settings: how it was asked, by the names of `ask_all`.

    A failed request is neither right nor wrong: shares are of the problems that were answered. Forwards are the denoise
    forwards of each request, summed over the requests; they do not depend on how many shared a batch, but a
    restart of a row may add one.
    """

    name: str
    server: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: Sequence[Result]

    @property
    def answered(self) -> list[Result]:
        return [result for result in self.results if result.error is None]

    @property
    def num_right(self) -> int:
        return sum(result.is_right for result in self.answered)

    @property
    def num_failed(self) -> int:
        return len(self.results) - len(self.answered)

    @property
    def accuracy(self) -> float | None:
        """None where no problem was answered."""
        return self.num_right / len(self.answered) if self.answered else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        return wilson_interval(self.num_right, len(self.answered))

    @property
    def tokens(self) -> int:
        return sum(result.tokens for result in self.answered)

    @property
    def forwards(self) -> int:
        return sum(result.forwards for result in self.answered)

    @property
    def tokens_per_forward(self) -> float | None:
        """None where there was no forward."""
        return self.tokens / self.forwards if self.forwards else None

    def to_json(self) -> dict[str, Any]:
        """The figures, and what `from_json` reads."""
        return {
            "fdfo_eval": VERSION,
            "name": self.name,
            "server": dict(self.server),
            "settings": dict(self.settings),
            "problems": len(self.results),
            "right": self.num_right,
            "failed": self.num_failed,
            "accuracy": self.accuracy,
            "accuracy_interval_95": list(self.interval),
            "tokens": self.tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "results": [dataclasses.asdict(result) for result in self.results],
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises ValueError for what `to_json` does not write."""
        if not isinstance(value, dict) or value.get("fdfo_eval") != VERSION:
            raise ValueError(f'not an evaluation of this version: "fdfo_eval" must be {VERSION}')
        try:
            results = [Result(**fields) for fields in value["results"]]
            run = cls(str(value["name"]), dict(value["server"]), dict(value["settings"]), results)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an evaluation: {error}") from None
        for number, result in enumerate(results, start=1):
            for name, kind in _JSON_TYPES.items():
                if not isinstance(getattr(result, name), kind):
                    raise ValueError(f"result {number}, {name}: must be of type {kind.__name__}")
        return run


@dataclass(frozen=True)
class Comparison:
    """Two runs, problem by problem; those that failed in either are left out."""

    pairs: Sequence[tuple[Result, Result]]
    num_left_out: int

    @property
    def num_same(self) -> int:
        """The same text but for white space at its ends."""
        return sum(is_exact(first.said, second.said) for first, second in self.pairs)

    @property
    def num_only_first(self) -> int:
        """Right in the first run only."""
        return sum(first.is_right and not second.is_right for first, second in self.pairs)

    @property
    def num_only_second(self) -> int:
        return sum(second.is_right and not first.is_right for first, second in self.pairs)

    @property
    def share_same(self) -> float | None:
        """None where there is no pair."""
        return self.num_same / len(self.pairs) if self.pairs else None

    @property
    def p(self) -> float:
        """McNemar's exact test: how probable such a difference is where both are equally good."""
        return mcnemar_p(self.num_only_first, self.num_only_second)

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": len(self.pairs),
            "left_out": self.num_left_out,
            "same_answers": self.num_same,
            "share_same": self.share_same,
            "right_in_first_only": self.num_only_first,
            "right_in_second_only": self.num_only_second,
            "mcnemar_p": self.p,
        }


async def ask_all(
    targets: Sequence[str],
    problems: Sequence[Problem],
    *,
    name: str,
    concurrency: int,
    check: str = "exact",
    options: Mapping[str, Any] | None = None,
    raw: bool = False,
    seed: int = 0,
    access: Access = OPEN,
    on_progress: Callable[[int, int], None] = lambda num_ended, num_right: None,
) -> Run:
    """Ask all problems, `concurrency` at a time, each as one user turn, or as plain text if `raw`.

    check: name of one of CHECKS.
    options: of `AsyncClient.generate`, the same for all.
    seed: of the first problem; each next one has one more.
    on_progress: called with the number of problems that ended and of right answers among them.

    A request that fails is a Result with its error. Raises FdfoError if nothing answers at the targets at all.
    """
    results: dict[int, Result] = {}
    num_right = 0
    given = {option: value for option, value in (options or {}).items() if value is not None}
    async with AsyncClient(targets, tls=access.tls, api_key=access.api_key) as client:
        with waiting(f"waiting for {name}"):
            info = await client.server_info()
        unasked = iter(enumerate(problems))

        async def one_after_the_other() -> None:
            nonlocal num_right
            for index, problem in unasked:
                result = await _ask(client, problem, CHECKS[check], {**given, "seed": seed + index}, raw)
                results[index] = result
                num_right += result.is_right
                on_progress(len(results), num_right)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(problems))):
                group.create_task(one_after_the_other())
    shown = ("version", "served_model_name", "fingerprint", "block_size", "algorithm", "fdfo", "rounds_in_flight")
    server = {field: getattr(info, field) for field in shown}
    settings = {"concurrency": concurrency, "check": check, "options": given, "raw": raw, "seed": seed}
    return Run(name, server, settings, [results[index] for index in range(len(problems))])


async def _ask(client: AsyncClient, problem: Problem, check: Check, options: dict[str, Any], raw: bool) -> Result:
    prompt = problem.prompt if raw else None
    messages: list[Message] | None = None if raw else [{"role": "user", "content": problem.prompt}]
    try:
        completion = await client.generate(prompt, messages=messages, **options)
    except FdfoError as error:
        return Result(problem.prompt, problem.answer, error=" ".join(str(error).split()) or type(error).__name__)
    if completion.finish_reason == "abort":
        return Result(problem.prompt, problem.answer, error="the request was aborted at the server")
    usage, said = completion.usage, completion.text
    is_right = check(said, problem.answer)
    return Result(problem.prompt, problem.answer, said, is_right, usage.completion_tokens, usage.forwards)


async def check_server(targets: Sequence[str], access: Access = OPEN) -> None:
    """Raises FdfoError if nothing answers at the targets."""
    async with AsyncClient(targets, tls=access.tls, api_key=access.api_key) as client:
        await client.server_info()


def compare(first: Run, second: Run) -> Comparison:
    """Pair both runs problem by problem. Raises InvalidRequest where they are not of the same problems."""
    check_same_problems(first.results, second.results)
    pairs = list(zip(first.results, second.results, strict=True))
    answered = [pair for pair in pairs if pair[0].error is None and pair[1].error is None]
    return Comparison(answered, len(pairs) - len(answered))


def check_same_problems(first: Sequence[Problem | Result], second: Sequence[Problem | Result]) -> None:
    """Raises InvalidRequest where two runs, or problems and a run of them, are not of the same problems."""
    for number, (left, right) in enumerate(zip(first, second, strict=False), start=1):
        if (left.prompt, left.answer) != (right.prompt, right.answer):
            raise InvalidRequest(f"the two runs cannot be paired: their problem {number} is not the same")
    if len(first) != len(second):
        raise InvalidRequest(f"the two runs cannot be paired: they are of {len(first)} and {len(second)} problems")


def read_run(path: Path) -> Run:
    """What `fdfo eval --json` wrote. Raises InvalidRequest naming the file."""
    try:
        return Run.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: {error}") from None

"""What the small model learns: problems with known answers, drawn without end from a seed.

`python -m tools.tiny.tasks --count 100 --seed 7` writes fresh ones as JSONL, a line each with task, prompt and answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

NAMES = (
    *("Ava", "Ella", "Finn", "Hugo", "Ivy", "Kofi", "Lena", "Leo", "Liam", "Mia"),
    *("Nina", "Noah", "Omar", "Raj", "Ruth", "Sam", "Tara", "Wei", "Yuki", "Zoe"),
)
THINGS = (
    *("apples", "beads", "books", "bricks", "cards", "coins", "cookies", "cups"),
    *("eggs", "marbles", "pens", "plums", "shells", "stamps", "stickers", "tickets"),
)
# What is asked for -> what it is.
FACTS: Mapping[str, str] = {
    "capital of Egypt": "Cairo",
    "capital of France": "Paris",
    "capital of Greece": "Athens",
    "capital of Italy": "Rome",
    "capital of Japan": "Tokyo",
    "capital of Kenya": "Nairobi",
    "capital of Norway": "Oslo",
    "capital of Peru": "Lima",
    "capital of Spain": "Madrid",
    "chemical symbol of gold": "Au",
    "chemical symbol of iron": "Fe",
    "closest star": "the Sun",
    "fastest land animal": "the cheetah",
    "largest planet": "Jupiter",
    "longest river": "the Nile",
    "number of days in a week": "seven",
    "number of months in a year": "twelve",
    "tallest mountain": "Mount Everest",
}
MAX_SUM = 20

Task: TypeAlias = Callable[[random.Random], tuple[str, str]]  # prompt and answer
Shares: TypeAlias = Mapping[Task, int]


@dataclass(frozen=True)
class Problem:
    """What is asked, and the one right answer."""

    task: str
    prompt: str
    answer: str


def word_problem(rng: random.Random) -> tuple[str, str]:
    """One to three changes of a number of things, each worked out."""
    owner, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    count = rng.randint(2, 9)
    told, worked = [f"{owner} has {count} {things}."], [f"{owner} has {count}."]
    for _ in range(rng.choices((1, 2, 3), (3, 3, 2))[0]):
        step, change = _change(rng, count)
        taken = (f"{owner} gives {step} to {other}.", f"{owner} loses {step}.")
        given = (f"{other} gives {owner} {step} more.", f"{owner} buys {step} more.")
        told.append(rng.choice(taken if change < 0 else given))
        worked.append(f"{count}{change:+d}={count + change}.")
        count += change
    told.append(f"How many {things} does {owner} have now?")
    worked.append(f"{owner} has {count} {things} now.")
    return " ".join(told), " ".join(worked)


def total(rng: random.Random) -> tuple[str, str]:
    """A running total of three to six steps; each begins with what the one before gave."""
    return _running_total(rng, rng.randint(1, 9), rng.randint(3, 6))


def long_total(rng: random.Random) -> tuple[str, str]:
    """A running total of seven to nine steps."""
    return _running_total(rng, rng.randint(1, 9), rng.randint(7, 9))


def chain(rng: random.Random) -> tuple[str, str]:
    """Who hears it after whom, of five to fourteen names; who tells whom stands in no order."""
    names = rng.sample(NAMES, rng.randint(5, 14))
    told = [f"{teller} tells {hearer}." for teller, hearer in itertools.pairwise(names)]
    rng.shuffle(told)
    return f"{' '.join(told)} Who hears it from {names[0]} on?", " ".join(names)


def count(rng: random.Random) -> tuple[str, str]:
    """Up by ones, from at most 50."""
    first = rng.randint(1, 50)
    last = first + rng.randint(4, 12)
    return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


def sort(rng: random.Random) -> tuple[str, str]:
    """Three or four different two-digit numbers."""
    numbers = rng.sample(range(10, 100), rng.randint(3, 4))
    return f"Sort these numbers: {_listed(numbers)}", _listed(sorted(numbers))


def repeat(rng: random.Random) -> tuple[str, str]:
    """Three to ten words, the same one more than once too."""
    words = " ".join(rng.choices(NAMES + THINGS, k=rng.randint(3, 10)))
    return f"Repeat: {words}", words


def fact(rng: random.Random) -> tuple[str, str]:
    """One of the facts that are known by heart."""
    asked = rng.choice(list(FACTS))
    return f"What is the {asked}?", f"The {asked} is {FACTS[asked]}."


# How often each task comes, first.
ALL: Shares = {
    word_problem: 30,
    total: 15,
    chain: 20,
    count: 10,
    sort: 10,
    repeat: 10,
    fact: 5,
}
# Of those that the small model learns.
SHARES: Shares = {word_problem: 24, total: 12, long_total: 30, count: 9, sort: 10, repeat: 9, fact: 6}


def problems(seed: int | str, shares: Shares = SHARES) -> Iterator[Problem]:
    """Problems without end, the same ones for the same seed and shares."""
    rng = random.Random(seed)
    tasks, weights = list(shares), list(shares.values())
    while True:
        task = rng.choices(tasks, weights)[0]
        yield Problem(task.__name__, *task(rng))


def fresh(seed: int, count: int) -> list[Problem]:
    """So many different problems; but of facts, which are few, the same one may come again."""
    seen: set[Problem] = set()
    chosen: list[Problem] = []
    for problem in problems(seed):
        if len(chosen) == count:
            break
        if problem.task == fact.__name__ or problem not in seen:
            chosen.append(problem)
        seen.add(problem)
    return chosen


def _running_total(rng: random.Random, count: int, num_steps: int) -> tuple[str, str]:
    told, worked = [f"Start at {count}:"], []
    for _ in range(num_steps):
        _, change = _change(rng, count)
        told.append(f"{change:+d}")
        worked.append(f"{count}{change:+d}={count + change}")
        count += change
    return " ".join(told), " ".join(worked)


def _change(rng: random.Random, count: int) -> tuple[int, int]:
    """1 to 9 and the same with its sign, so that from count the sum stays between 1 and MAX_SUM."""
    changes = [change for change in range(-9, 10) if change and 1 <= count + change <= MAX_SUM]
    change = rng.choice(changes)
    return abs(change), change


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def main(argv: Sequence[str] | None = None) -> None:
    """Print fresh problems."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.tasks", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many problems (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="other numbers give other problems (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.count < 1:
        parser.error(f"--count {arguments.count}: give 1 or more")
    for problem in fresh(arguments.seed, arguments.count):
        print(json.dumps(dataclasses.asdict(problem)))


if __name__ == "__main__":
    main()

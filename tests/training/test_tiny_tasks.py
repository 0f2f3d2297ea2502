"""The problems that the small model learns, and those that ship with it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.model.checkpoints import SHIPPED_MODEL
from tools.tiny import tasks
from tools.tiny.tasks import FACTS, MAX_SUM, NAMES, THINGS, Problem

CHANGE = re.compile(
    r"(?P<owner>\w+) (?:loses (?P<lost>\d)|gives (?P<given>\d) to (?P<to>\w+)|buys (?P<bought>\d) more)\."
    r"|(?P<giver>\w+) gives (?P<getter>\w+) (?P<got>\d) more\."
)


def answer_of(problem: Problem) -> str:
    """What the prompt's own words ask for, worked out anew; fails where they are not of the task's form."""
    task, prompt = problem.task, problem.prompt
    if task == "repeat":
        words = prompt.removeprefix("Repeat: ").split(" ")
        assert 3 <= len(words) <= 10 and set(words) <= {*NAMES, *THINGS}
        return " ".join(words)
    if task == "fact":
        asked = prompt.removeprefix("What is the ").removesuffix("?")
        return f"The {asked} is {FACTS[asked]}."
    if task == "count":
        first, last = map(int, re.fullmatch(r"Count from (\d+) to (\d+)\.", prompt).groups())  # type: ignore[union-attr]
        assert 1 <= first <= 50 and 4 <= last - first <= 12
        return " ".join(map(str, range(first, last + 1)))
    if task == "sort":
        numbers = [int(number) for number in prompt.removeprefix("Sort these numbers: ").split(" ")]
        assert 3 <= len(set(numbers)) == len(numbers) <= 4 and min(numbers) >= 10
        return " ".join(map(str, sorted(numbers)))
    if task == "chain":
        *sentences, question = re.findall(r"[^.?]+[.?]", prompt)
        pairs = [re.fullmatch(r" ?(\w+) tells (\w+)\.", sentence) for sentence in sentences]
        hears = {pair[1]: pair[2] for pair in pairs if pair}
        assert len(hears) == len(sentences)
        names = [re.fullmatch(r" Who hears it from (\w+) on\?", question).group(1)]  # type: ignore[union-attr]
        while names[-1] in hears:
            names.append(hears[names[-1]])
        assert set(names) <= set(NAMES) and len(names) == len(sentences) + 1 <= 14
        return " ".join(names)
    if task in ("total", "long_total"):
        start, changes = re.fullmatch(r"Start at (\d):((?: [+-]\d)+)", prompt).groups()  # type: ignore[union-attr]
        counts = list(itertools.accumulate([int(start), *map(int, changes.split())]))
        assert len(counts) - 1 in (range(3, 7) if task == "total" else range(7, 10))
        assert min(counts) >= 1 and max(counts) <= MAX_SUM
        return " ".join(f"{a}{b - a:+d}={b}" for a, b in itertools.pairwise(counts))
    assert task == "word_problem"
    first, *told, question = re.findall(r"[^.?]+[.?]", prompt)
    owner, count_text, things = re.fullmatch(r"(\w+) has (\d) (\w+)\.", first).groups()  # type: ignore[union-attr]
    assert owner in NAMES and things in THINGS and 1 <= len(told) <= 3
    assert question == f" How many {things} does {owner} have now?"
    count, worked = int(count_text), [f"{owner} has {count_text}."]
    for sentence in told:
        match = CHANGE.fullmatch(sentence.strip())
        assert match is not None and owner in (match["owner"], match["getter"])
        step = int(match["got"] or match["bought"] or 0) - int(match["lost"] or match["given"] or 0)
        worked.append(f"{count}{step:+d}={count + step}.")
        count += step
        assert 1 <= count <= MAX_SUM
    return " ".join([*worked, f"{owner} has {count} {things} now."])


def shipped() -> list[Problem]:
    return [Problem(**json.loads(line)) for line in (SHIPPED_MODEL / "problems.jsonl").read_text().splitlines()]


def test_every_shipped_problem_is_one_that_the_generator_can_draw() -> None:
    """Each line has its task's form and numbers, and the answer that its words ask for."""
    problems = shipped()
    assert len(problems) >= 400
    for problem in problems:
        assert problem.answer == answer_of(problem), problem


def test_what_is_drawn_has_the_answer_that_its_words_ask_for() -> None:
    """Two thousand problems of all tasks; every fact and every way to tell a change comes up."""
    drawn = [*itertools.islice(tasks.problems(3, tasks.ALL), 1000), *tasks.fresh(3, 1000)]
    for problem in drawn:
        assert problem.answer == answer_of(problem), problem
    assert {problem.task for problem in drawn} == {task.__name__ for task in (*tasks.ALL, *tasks.SHARES)}
    told = " ".join(problem.prompt for problem in drawn)
    for words in (r"loses \d", r"gives \d to", r"gives \w+ \d more", r"buys \d more"):
        assert re.search(words, told)
    wrong = Problem("total", "Start at 2: +3 +4 +1", "2+3=5 5+4=8 8+1=9")
    assert wrong.answer != answer_of(wrong)


def test_a_seed_has_its_problems() -> None:
    """The same again for the same seed, others for another one, and but for facts none twice."""
    drawn = tasks.fresh(seed=8, count=400)
    assert tasks.fresh(seed=8, count=400) == drawn
    assert tasks.fresh(seed=8, count=40) == drawn[:40]
    assert tasks.fresh(seed=9, count=400) != drawn
    others = [problem for problem in drawn if problem.task != "fact"]
    assert len(set(others)) == len(others)


def test_each_total_and_name_follows_from_the_one_before() -> None:
    """A chain names each one that was told of, once; a total goes on from the number that it has just found."""
    for problem in [*itertools.islice(tasks.problems(4, tasks.ALL), 300), *tasks.fresh(4, 300)]:
        if problem.task == "chain":
            names = problem.answer.split()
            assert all(f"{teller} tells {hearer}." in problem.prompt for teller, hearer in itertools.pairwise(names))
        if "total" in problem.task:
            parts = problem.answer.split(" ")
            assert all(re.match(r"\d+", b)[0] == a.split("=")[1] for a, b in itertools.pairwise(parts))  # type: ignore[index]


def test_the_command_writes_problems_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines as in the shipped file, so many as asked for."""
    tasks.main(["--count", "5", "--seed", "7"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Problem(**line) for line in lines] == tasks.fresh(seed=7, count=5)


def test_the_generator_needs_nothing_installed() -> None:
    """Its imports are of the standard library."""
    source = Path(tasks.__file__).read_text()
    modules = set(re.findall(r"^(?:import|from) ([\w.]+)", source, re.MULTILINE))
    assert modules <= {
        "__future__",
        "argparse",
        "collections.abc",
        "dataclasses",
        "itertools",
        "json",
        "random",
        "typing",
    }

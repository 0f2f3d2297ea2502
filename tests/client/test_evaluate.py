"""`fdfo eval`: its formulas, its files, and the command against scripted schedulers."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import InvalidRequest, ServerUnavailable, cli
from fdfo_client.commands.evaluate import progress, table
from fdfo_client.evaluate.problems import CHECKS, has_number, is_exact, read_problems
from fdfo_client.evaluate.run import Result, Run, ask_all, compare
from fdfo_client.evaluate.statistics import mcnemar_p, wilson_interval
from fdfo_client.testing import FakeScheduler, Step, committed, failure, finished, serving, started

KNOWN = {"one?": "1", "two?": "2", "three?": "3", "four?": "4"}


def says(**others: str) -> Callable[[pb.GenerateRequest], Sequence[Step]]:
    """Knows all answers, but says `others` to the prompts of that first word."""

    def script(request: pb.GenerateRequest) -> list[Step]:
        prompt = request.text or request.messages.messages[-1].content
        said = others.get(prompt.removesuffix("?"), KNOWN[prompt])
        if said == "fail":
            return [failure(grpc.StatusCode.INTERNAL, "why")]
        usage = pb.Usage(completion_tokens=6, forwards=4)
        return [started(seed=request.sampling.seed), committed(f" {said}\n", [1]), finished(usage=usage)]

    return script


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """The four problems that the scripted scheduler knows."""
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": key, "answer": value}) + "\n" for key, value in KNOWN.items()))
    return path


def run(scheduler: FakeScheduler, *argv: str) -> int:
    with serving(scheduler) as target:
        return cli.main(["eval", "--target", target, *argv])


@pytest.mark.parametrize("num_total", [1, 2, 7, 40])
def test_the_interval_holds_just_the_shares_that_the_score_test_accepts(num_total: int) -> None:
    """Of a fine grid of shares, those within 1.96 of their own standard errors of the observed one are in it."""
    for num_right in range(num_total + 1):
        low, high = wilson_interval(num_right, num_total)
        observed = num_right / num_total
        assert 0 <= low <= observed <= high <= 1
        for share in (step / 1000 for step in range(1, 1000)):
            distance = abs(observed - share) / math.sqrt(share * (1 - share) / num_total)
            if abs(distance - 1.959964) > 1e-3:
                assert (low <= share <= high) == (distance < 1.959964)


def test_the_interval_of_nothing_is_everything() -> None:
    """Without a trial every share is possible."""
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("num_pairs", range(11))
def test_mcnemar_equals_an_enumeration_of_all_outcomes(num_pairs: int) -> None:
    """p is the share of the 2^n ways the pairs can fall that are no less uneven than the one seen."""
    outcomes = [sum(each) for each in itertools.product((0, 1), repeat=num_pairs)]
    for num_only_first in range(num_pairs + 1):
        uneven = abs(2 * num_only_first - num_pairs)
        as_uneven = sum(abs(2 * outcome - num_pairs) >= uneven for outcome in outcomes)
        assert mcnemar_p(num_only_first, num_pairs - num_only_first) == as_uneven / len(outcomes)


def test_mcnemar_of_many_pairs_is_a_number() -> None:
    """Thousands of pairs overflow nothing."""
    assert mcnemar_p(1000, 1000) == 1.0
    assert 0 <= mcnemar_p(10, 1500) < 1e-300


@pytest.mark.parametrize(
    ("said", "answer", "same_text", "same_number"),
    [
        ("She has 6.\n", "She has 6.", True, True),
        ("So it is 1,200 pounds.", "1200.0", False, True),
        ("2 + 3 = 5", "2", False, False),
        ("-4", "4", False, False),
        ("none", "none", True, False),
        ("5-7", "7", False, True),
        ("so x = -7", "\N{MINUS SIGN}7", False, True),
        ("(a)-7", "-7", False, False),
        ("it is \N{MINUS SIGN}7", "-7", False, True),
    ],
)
def test_when_an_answer_is_right(said: str, answer: str, same_text: bool, same_number: bool) -> None:
    """`exact` compares texts but for white space at their ends, `number` the last numbers."""
    assert (is_exact(said, answer), has_number(said, answer)) == (same_text, same_number)


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("the answer is 7", "7", True),
        ("the answer is 7", "-7.0", False),
        ("Olleh.", "olleh", True),
        ("the answer is olleh", "olleh", False),
        ("3 / 4", "3/4", False),
        ("3/4", "3/4", True),
        ("x  is\n7 ", "X is 7", True),
    ],
)
def test_what_is_compared_depends_on_the_answer(said: str, answer: str, right: bool) -> None:
    """`auto` looks for the number where the answer is nothing else, and compares texts else."""
    assert CHECKS["auto"](said, answer) is right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "line 1, answer: must be a text that is not empty, not nothing"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": 3, "answer": "b"}', "line 2, prompt: .*, not 3"),
        ("[]", "line 1: must be a JSON object"),
        ("\n", "has no line"),
    ],
)
def test_a_wrong_file_of_problems_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the line and the field."""
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_problems(path)
    assert str(path) in str(caught.value)


def test_eval_counts_and_saves(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right answers, their share and what they cost stand in the table and, with each answer, in the JSON file."""
    path = tmp_path / "out.json"
    assert run(FakeScheduler(says(two="5")), "--problems", str(problems), "--json", str(path)) == 0
    figures = capsys.readouterr().out.splitlines()[1].split()[1:]
    assert figures == ["4", "3", "0", "75.0%", "30.1%", "-", "95.4%", "24", "16", "1.50"]
    saved = json.loads(path.read_text())
    assert saved["settings"] == {"concurrency": 16, "check": "exact", "options": {"algorithm_params": {}}} | {
        "raw": False,
        "seed": 0,
    }
    assert (saved["right"], saved["accuracy"], saved["tokens_per_forward"]) == (3, 0.75, 1.5)
    assert [result["said"] for result in saved["results"]] == [" 1\n", " 5\n", " 3\n", " 4\n"]


def test_eval_sends_the_options_and_a_seed_for_each_problem(problems: Path) -> None:
    """Every request has the options of the flags, and its problem's own seed however many run at once."""
    scheduler = FakeScheduler(says())
    flags = (
        "--temperature",
        "0.5",
        "--param",
        "threshold=0.9",
        "--max-new-tokens",
        "9",
        "--seed",
        "100",
        "--first",
        "3",
    )
    assert run(scheduler, "--problems", str(problems), "--raw", *flags) == 0
    sent = {request.text: request for request in scheduler.requests}
    assert [sent[prompt].sampling.seed for prompt in list(KNOWN)[:3]] == [100, 101, 102]
    assert {request.sampling.temperature for request in scheduler.requests} == {0.5}
    assert {request.max_new_tokens for request in scheduler.requests} == {9}
    assert len(scheduler.requests) == 3


def test_a_failed_request_is_in_no_share(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is counted apart, named on stderr, and makes the exit status 1."""
    assert run(FakeScheduler(says(two="fail", three="9")), "--problems", str(problems), "--json", "-") == 1
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert (figures["problems"], figures["failed"], figures["right"]) == (4, 1, 2)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert "1 requests failed; the first: " in err and "why" in err


def test_two_servers_are_paired(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--against` asks the other server the same, and pairs what both answered."""
    with serving(FakeScheduler(says(one="8", two="fail", four="7"))) as other:
        status = run(FakeScheduler(says(one="8", three="9")), "--problems", str(problems), "--against", other)
    out, _ = capsys.readouterr()
    assert status == 1
    assert "same answer: 1 of 3 (33.3%), 1 left out that failed" in out
    assert "in the first run only: 1, in the second only: 1; McNemar's exact p: 1\n" in out


def test_a_run_is_paired_with_a_saved_one(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--against FILE` takes what `--json` wrote."""
    path = tmp_path / "saved.json"
    assert run(FakeScheduler(says(two="5")), "--problems", str(problems), "--json", str(path)) == 0
    capsys.readouterr()
    assert run(FakeScheduler(says()), "--problems", str(problems), "--against", str(path), "--json", "-") == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["comparison"] == {
        "pairs": 4,
        "left_out": 0,
        "same_answers": 3,
        "share_same": 0.75,
        "right_in_first_only": 1,
        "right_in_second_only": 0,
        "mcnemar_p": 1.0,
    }
    assert figures["against"]["right"] == 3


def test_a_run_is_kept_when_the_other_server_is_lost(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked may have taken hours: it is in table and file, whatever becomes of the second run."""
    path, ask = tmp_path / "out.json", ask_all

    async def lost(targets: Sequence[str], *arguments: Any, **options: Any) -> Run:
        if options["name"] == other:
            raise ServerUnavailable("it is gone")
        return await ask(targets, *arguments, **options)

    monkeypatch.setattr("fdfo_client.commands.evaluate.ask_all", lost)
    with serving(FakeScheduler(says())) as other:
        flags = ("--problems", str(problems), "--json", str(path), "--against", other)
        assert run(FakeScheduler(says(two="5")), *flags) == 1
    out, err = capsys.readouterr()
    assert json.loads(path.read_text())["right"] == 3 and "75.0%" in out and "it is gone" in err


def test_a_server_that_is_not_there_is_found_before_the_other_is_asked(problems: Path) -> None:
    """Both sides of a comparison are looked at first."""
    scheduler = FakeScheduler(says())
    assert run(scheduler, "--problems", str(problems), "--against", "127.0.0.1:1") == 1
    assert not scheduler.requests


def test_what_could_never_be_right_is_refused_before_a_request(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check by numbers of an answer without one, and a saved run of other problems, are wrong usage."""
    scheduler, path = FakeScheduler(says()), tmp_path / "words.jsonl"
    path.write_text('{"prompt": "one?", "answer": "eno"}')
    assert run(scheduler, "--problems", str(path), "--check", "number") == 2
    assert "--check number: no answer to problem 1 could be right, since 'eno' is" in capsys.readouterr().err
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(a_run("one?").to_json()))
    assert run(scheduler, "--problems", str(problems), "--against", str(saved)) == 2
    assert "they are of 4 and 1 problems" in capsys.readouterr().err
    assert not scheduler.requests


def test_rows_of_one_server_have_names_of_their_own() -> None:
    """A run and the saved one of the same server are told apart."""
    assert [line.split("  ")[0] for line in table([a_run("x"), a_run("x")])[1:]] == ["a (now)", "a (against)"]


def a_run(*prompts: str) -> Run:
    return Run("a", {}, {}, [Result(prompt, "1") for prompt in prompts])


@pytest.mark.parametrize(
    ("prompts", "message"), [(["x", "z"], "problem 2 is not the same"), (["x"], "they are of 2 and 1 problems")]
)
def test_runs_of_other_problems_are_not_paired(prompts: list[str], message: str) -> None:
    """A comparison says why two runs cannot be paired."""
    with pytest.raises(InvalidRequest, match=message):
        compare(a_run("x", "y"), a_run(*prompts))


SAVED = '{"fdfo_eval": 1, "name": "a", "server": {}, "settings": {}, "results": [{"prompt": "a", "answer": "b"%s}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "not an evaluation of this version"),
        ('{"fdfo_eval": 2, "results": []}', "not an evaluation of this version"),
        ('{"fdfo_eval": 1}', "not an evaluation: 'results'"),
        (SAVED % ', "more": 1', "unexpected keyword argument 'more'"),
        (SAVED % ', "said": 1', "result 1, said: must be of type str"),
    ],
)
def test_a_wrong_saved_run_is_refused(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """What `--json` did not write is wrong usage, found before a request is sent."""
    path = tmp_path / "saved.json"
    path.write_text(text)
    scheduler = FakeScheduler(says())
    assert run(scheduler, "--problems", str(problems), "--against", str(path)) == 2
    assert not scheduler.requests
    assert f"{path}: " in (err := capsys.readouterr().err) and message in err


def test_an_against_that_is_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says what may stand there."""
    with pytest.raises(SystemExit):
        cli.main(["eval", "--against", "absent.json"])
    assert "'absent.json' is neither a file that exists nor a target" in capsys.readouterr().err


def test_reasoning_gym_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the package, or what that needs, the command fails and says what to install."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # an import of it fails
    assert cli.main(["eval", "--reasoning-gym", "gsm_symbolic"]) == 1
    assert "pip install reasoning-gym" in capsys.readouterr().err


def test_reasoning_gym_problems_are_judged_by_their_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package draws as many problems as --first says, from the seed, and an answer counts by its last number."""
    asked: list[dict[str, Any]] = []

    def create_dataset(name: str, **options: int) -> list[dict[str, str]]:
        asked.append({"name": name, **options})
        return [{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    flags = ("--reasoning-gym", "gsm_symbolic", "--first", "2", "--seed", "7", "--json", "-")
    assert run(FakeScheduler(says(one="that is 1", two="2 or 3")), *flags) == 0
    assert asked == [{"name": "gsm_symbolic", "size": 2, "seed": 7}]
    assert json.loads(capsys.readouterr().out)["right"] == 1


def test_progress_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, a line comes five seconds after the last one, not for each problem."""
    times = iter([0.0, 1.0, 5.0, 9.9, 10.0])
    on_progress = progress("a:1", 4, lambda: next(times))
    for num_ended in range(1, 5):
        on_progress(num_ended, num_ended // 2)
    assert capsys.readouterr().err == "a:1: 2 of 4 problems, 1 right\na:1: 4 of 4 problems, 2 right\n"

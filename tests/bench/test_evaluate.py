"""`make eval`: which runs agree, and the table over all modes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import evaluate
from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client.evaluate.run import Result, Run, compare
from fdfo_client.testing import FakeScheduler, Step, committed, finished, serving, started


def a_run(num_right: int, *, num_other_words: int = 0, num_failed: int = 0) -> Run:
    """Of 100 problems the first ones are right; the last wrong ones are said in other words, or failed."""
    results = [
        Result(str(index), "yes", "yes" if index < num_right else "no", index < num_right) for index in range(100)
    ]
    for index in range(100 - num_other_words, 100):
        results[index] = Result(str(index), "yes", "never")
    for index in range(100 - num_failed, 100):
        results[index] = Result(str(index), "yes", error="why")
    return Run("a", {}, {"concurrency": 1}, results)


@pytest.mark.parametrize(
    ("run", "does_agree"),
    [
        (a_run(50), True),
        (a_run(50, num_other_words=20), True),  # other words, but as often right
        (a_run(44), True),  # p 0.03
        (a_run(42), False),  # p 0.008
        (a_run(50, num_failed=1), False),
    ],
)
def test_a_run_agrees_by_its_answers_or_by_chance(run: Run, does_agree: bool) -> None:
    """99 % same answers, or else McNemar's p above 0.01; a failure is never agreement."""
    assert evaluate.agrees(run, compare(a_run(50), run)) == does_agree
    assert evaluate.line("on", run, 2.5, 0, compare(a_run(50), run)).endswith(" !") != does_agree


class FakeServices:
    """Schedulers that know the answer, but one of the mode `wrong` does not."""

    wrong = ""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> FakeServices:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def workers(self, model: Path, num_rows: int, flags: Sequence[str]) -> list[str]:
        return list(flags)

    @contextlib.contextmanager
    def schedulers(self, model: Path, each: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[str]]:
        ((workers, flags),) = each

        def script(request: pb.GenerateRequest) -> list[Step]:
            said = "no" if " ".join([*workers, *flags]) == self.wrong else "yes"
            return [started(), committed(said, [1]), finished(usage=pb.Usage(completion_tokens=1, forwards=1))]

        with serving(FakeScheduler(script)) as target:
            yield [target]


@pytest.mark.parametrize(
    ("wrong", "status", "num_apart"), [("", 0, 0), ("--enable-prefix-caching --no-dllm-fdfo", 1, 4)]
)
def test_every_mode_cache_and_concurrency_is_a_row(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    status: int,
    num_apart: int,
) -> None:
    """24 rows, those of a mode that answers otherwise are marked and make the exit status 1."""
    monkeypatch.setattr(FakeServices, "wrong", wrong)
    monkeypatch.setattr(evaluate, "Services", FakeServices)
    problems, path = tmp_path / "problems.jsonl", tmp_path / "out.json"
    problems.write_text("".join(json.dumps({"prompt": str(n), "answer": "yes"}) + "\n" for n in range(8)))
    assert evaluate.main(["--problems", str(problems), "--json", str(path)]) == status
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(evaluate.MODES))]
    assert len(rows) == len(lines) == 24
    assert [line.endswith(" !") for line in lines] == [not row["agrees"] for row in rows]
    assert sum(not row["agrees"] for row in rows) == num_apart
    assert rows[0]["comparison"] is None and rows[0]["restarts"] == 0
    assert rows[1]["comparison"]["same_answers"] == 8

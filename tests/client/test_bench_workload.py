"""What a load sends: distributions of lengths, arrival times, datasets and traces."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdfo_client import InvalidRequest
from fdfo_client.bench.workload import (
    MAX_LENGTH,
    Item,
    Lengths,
    dataset_options,
    parse_lengths,
    poisson_items,
    read_dataset,
    read_trace,
    synthetic_options,
    write_trace,
)

amounts = st.floats(0.01, 10_000)
uniform = st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda t: Lengths("uniform", t[0], t[0] + t[1]))
lengths = st.one_of(
    uniform,
    st.builds(Lengths, st.just("normal"), amounts, amounts),
    st.builds(Lengths, st.just("lognormal"), amounts, st.floats(0, 10)),
    st.builds(Lengths, st.just("gamma"), amounts, amounts),
)


@given(lengths)
def test_a_distribution_is_read_back_from_its_text(wanted: Lengths) -> None:
    """The text of a distribution names just that distribution."""
    assert parse_lengths(str(wanted)) == wanted


@given(lengths, st.integers(), st.integers(1, 4096))
def test_draws_are_whole_and_within_limits(wanted: Lengths, seed: int, at_most: int) -> None:
    """A draw is from 1 to the limit, whatever the distribution, and the same seed draws the same."""
    drawn = [wanted.draw(random.Random(seed), at_most) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert isinstance(drawn[0], int) and 1 <= drawn[0] <= at_most


@given(uniform, st.integers())
def test_a_uniform_draw_lies_between_its_ends(wanted: Lengths, seed: int) -> None:
    """LOW:HIGH never leaves its range, and N is always N."""
    assert wanted.first <= wanted.draw(random.Random(seed), MAX_LENGTH) <= wanted.second


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("128", 128, 0), ("1:99", 50, 28.6), ("normal:200,20", 200, 20), ("lognormal:200,0.5", 200, 106.6),
     ("gamma:4,200", 200, 100)],
)  # fmt: skip
def test_distributions_have_their_mean_and_deviation(text: str, mean: float, deviation: float) -> None:
    """Many draws have the mean and the standard deviation that the text says."""
    rng, wanted = random.Random(0), parse_lengths(text)
    drawn = [wanted.draw(rng, MAX_LENGTH) for _ in range(10_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "x", "1.5", "8:4", "1:", ":1", "1:2:3", "0:4", "2000000", "normal", "normal:", "normal:1",
     "normal:1,2,3", "normal:0,1", "normal:1,-1", "normal:nan,1", "normal:1,inf", "lognormal:200,11", "gamma:0,1",
     "gamma:1,0", "poisson:4"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(text: str) -> None:
    """The error repeats the text and says what there is."""
    with pytest.raises(ValueError, match="LOW:HIGH") as caught:
        parse_lengths(text)
    assert repr(text) in str(caught.value)


@given(lengths, lengths, st.integers(2, 1000), st.integers(4, 1000), st.integers(0, 9))
def test_random_prompts_fit_the_model(
    prompt: Lengths, output: Lengths, context_length: int, num_tokens: int, seed: int
) -> None:
    """Ids are from the middle half of the vocabulary, and prompt and output fit the context together."""
    rng = random.Random(seed)
    for options in itertools.islice(synthetic_options(prompt, output, num_tokens, context_length, rng), 3):
        assert options["ignore_eos"] is True
        assert options["prompt_ids"] and options["max_new_tokens"] >= 1
        assert len(options["prompt_ids"]) + options["max_new_tokens"] <= context_length
        assert all(num_tokens // 4 <= token_id < num_tokens - num_tokens // 4 for token_id in options["prompt_ids"])


def test_poisson_arrivals() -> None:
    """Times rise, the mean time between two is 1 / rate, and as many lie above the mean as an exponential says."""
    items = list(poisson_items([{}] * 10_000, 4.0, random.Random(0)))
    between = [b - a for a, b in itertools.pairwise([0.0, *(item.at_s or 0.0 for item in items)])]
    assert min(between) >= 0
    assert statistics.fmean(between) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in between) / len(between) == pytest.approx(0.368, rel=0.03)


text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": text}),
    st.fixed_dictionaries({"prompt_ids": ids}),
    st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": text, "content": text}), max_size=2)}),
)
more = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 4096),
        "temperature": st.floats(0, 2),
        "seed": st.integers(0, 2**63 - 1),
        "stop": st.one_of(text, st.lists(text, max_size=2)),
        "ignore_eos": st.booleans(),
        "algorithm": text,
        "algorithm_params": st.dictionaries(text, st.floats(0, 1), max_size=2),
        "timeout": st.floats(0.001, 1000),
    },
)
items = st.builds(Item, st.floats(0, 1e6), st.builds(lambda prompt, rest: {**prompt, **rest}, prompts, more))


@given(st.lists(items, min_size=1, max_size=5))
def test_a_trace_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, written: list[Item]) -> None:
    """Times and options come back exactly, ordered by time."""
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    write_trace(path, written)
    assert read_trace(path) == sorted(written, key=lambda item: item.at_s or 0.0)


HEADER = '{"fdfo_trace": 1}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ["line 1", "not a trace", HEADER]),
        (['{"fdfo_trace": 2}'], ["line 1", "not a trace"]),
        ([HEADER], ["has no request"]),
        ([HEADER, "{"], ["line 2", "not JSON"]),
        ([HEADER, "[1]"], ["line 2", "object"]),
        ([HEADER, '"\xff"'], ["line 2"]),
        ([HEADER, "", '{"prompt": "a"}'], ["line 3", "at_s"]),
        ([HEADER, '{"at_s": -1, "prompt": "a"}'], ["line 2", "at_s", "-1"]),
        ([HEADER, '{"at_s": true, "prompt": "a"}'], ["line 2", "at_s"]),
        ([HEADER, '{"at_s": NaN, "prompt": "a"}'], ["line 2", "at_s"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "max_tokens": 3}'], ["line 2", "max_tokens", "max_new_tokens"]),
        ([HEADER, '{"at_s": 0}'], ["line 2", "prompt"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "prompt_ids": [1]}'], ["line 2", "exactly one"]),
        ([HEADER, '{"at_s": 0, "prompt": 3}'], ["line 2", "prompt", "str"]),
        ([HEADER, '{"at_s": 0, "prompt_ids": "12"}'], ["line 2", "prompt_ids", "list"]),
        ([HEADER, '{"at_s": 0, "prompt_ids": [-1]}'], ["line 2", "prompt_ids"]),
        ([HEADER, '{"at_s": 0, "messages": 3}'], ["line 2", "messages", "list"]),
        ([HEADER, '{"at_s": 0, "messages": [], "chat_template_kwargs": []}'], ["line 2", "chat_template_kwargs"]),
        ([HEADER, '{"at_s": 0, "messages": [{"role": "user"}]}'], ["line 2", "messages[0]"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "max_new_tokens": "9"}'], ["line 2", "max_new_tokens"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "algorithm_params": [1]}'], ["line 2", "algorithm_params"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "algorithm_params": {"x": "y"}}'], ["line 2", "algorithm_params"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "timeout": "1"}'], ["line 2", "timeout"]),
        ([HEADER, '{"at_s": 0, "prompt": "a", "timeout": 0}'], ["line 2", "timeout"]),
    ],
)
def test_a_bad_line_of_a_trace_is_named(lines: list[str], said: list[str], tmp_path: Path) -> None:
    """The error is one line with the file, the line's number and the field."""
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in ["bad.jsonl", *said]), message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The error names the file and the reason."""
    with pytest.raises(InvalidRequest, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_dataset_is_used_again_and_again(tmp_path: Path) -> None:
    """Lines come in order; what a line says stays, what it does not say is drawn; other columns are reported."""
    path = write_lines(
        tmp_path / "set.jsonl", {"prompt": "a\u2028b", "answer": 1}, {"prompt_ids": [1], "max_new_tokens": 5, "seed": 3}
    )
    lines, left_out = read_dataset(path)
    assert left_out == {"answer"}
    drawn = list(itertools.islice(dataset_options(lines, parse_lengths("7"), 100, random.Random(0)), 3))
    assert [options.get("prompt") for options in drawn] == ["a\u2028b", None, "a\u2028b"]
    assert [options["max_new_tokens"] for options in drawn] == [7, 5, 7]
    assert drawn[1]["seed"] == 3
    assert drawn[0]["seed"] != drawn[2]["seed"]


def test_a_bad_dataset_is_refused(tmp_path: Path) -> None:
    """A line without a prompt is named, and so is a file without lines."""
    with pytest.raises(InvalidRequest, match=r"set\.jsonl, line 2, prompt: give exactly one"):
        read_dataset(write_lines(tmp_path / "set.jsonl", {"prompt": "a"}, {"seed": 1}))
    with pytest.raises(InvalidRequest, match=r"empty\.jsonl: has no line"):
        read_dataset(write_lines(tmp_path / "empty.jsonl"))

"""The shipped model with and without the early end: the same answers, never more forwards."""

from __future__ import annotations

import json
import random

import pytest

from common.model_folder import load_tokenizer
from common.packing import unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden.test_loops import FOLDER, PATH, B, make_loop, start_row
from tests.worker.scripted import Driver, names

ROWS_TOGETHER = 50  # all of whose blocks find a page
Answer = tuple[list[int], int, int]  # published ids, end reason, end position


def problem_rows(every: int) -> list[pb.StartRow]:
    """Problems as users ask them, each with the model's stop ids or with drawn ones, some of them sampled."""
    tokenizer, generator = load_tokenizer(PATH), random.Random(5)
    lines = (PATH / "problems.jsonl").read_text().splitlines()[::every]
    rows = []
    for number, line in enumerate(lines):
        text = f"<role>HUMAN</role>{json.loads(line)['prompt']}<|role_end|><role>ASSISTANT</role>"
        stops = FOLDER.stop_token_ids if number % 2 else generator.sample(range(2, 40), 3)
        sampling = pb.SamplingParams(temperature=number % 3 / 2, top_p=0.9, seed=number)
        params = {"threshold": (0.95, 0.999)[number % 5 == 0]}
        fields = {"stop_token_ids": stops, "sampling": sampling, "algorithm_params": params}
        rows.append(start_row(f"p{number}", tokenizer.encode(text).ids, "LowConfidence", 64, **fields))
    return rows


def run_to_end(
    rows: list[pb.StartRow], mode: pb.Mode, fused_commit: bool, early_end: bool
) -> tuple[dict[str, Answer], dict[str, int]]:
    """All rows at once to their ends: what a client would see of each, and its forwards."""
    loop = make_loop(batch_invariant=True, slots=len(rows), fused_commit=fused_commit, early_end=early_end)
    driver = Driver(loop)
    prompts = {row.request_id: row.prompt_length for row in rows}
    first = {row.request_id: row.block_index * B for row in rows}
    ids: dict[str, list[int]] = {name: [] for name in prompts}
    forwards = dict.fromkeys(prompts, 0)
    answers: dict[str, Answer] = {}
    order, reply = list(prompts), driver.run(starts=rows, mode=mode)
    while True:
        assert set(reply.rows.statuses) <= {pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_ENDED}
        done = unpack_ids(reply.rows.done_ids)
        for place, name in enumerate(order):
            forwards[name] += reply.rows.forwards[place]
            if reply.rows.accept_lengths[place]:
                ids[name] += done[:B]
                done = done[B:]
            if reply.rows.statuses[place] == pb.ROW_STATUS_ENDED:
                reason, position = reply.rows.end_reasons[place], reply.rows.end_positions[place]
                answers[name] = (ids[name][prompts[name] - first[name] : position + 1 - first[name]], reason, position)
        order = [name for name in order if name not in answers]
        if not order:
            return answers, forwards
        reply = driver.run(continues=names(*order), mode=mode)


def compare(rows: list[pb.StartRow], mode: pb.Mode, fused_commit: bool = False) -> tuple[int, int]:
    """Forwards with and without the early end; the answers are the same."""
    num_early = num_whole = 0
    for first in range(0, len(rows), ROWS_TOGETHER):
        together = rows[first : first + ROWS_TOGETHER]
        answers, forwards = run_to_end(together, mode, fused_commit, early_end=True)
        whole_answers, whole_forwards = run_to_end(together, mode, fused_commit, early_end=False)
        assert answers == whole_answers
        assert all(forwards[name] <= whole_forwards[name] for name in forwards)
        num_early += sum(forwards.values())
        num_whole += sum(whole_forwards.values())
    return num_early, num_whole


@pytest.mark.parametrize(("mode", "fused_commit"), [(pb.MODE_FDFO, False), (pb.MODE_FDFO, True), (pb.MODE_SYNC, False)])
def test_answers_are_the_same_with_fewer_forwards(mode: pb.Mode, fused_commit: bool) -> None:
    """Every twentieth problem, batch-invariant: same published ids and ends, and some forwards saved."""
    early, whole = compare(problem_rows(20), mode, fused_commit)
    assert early < whole


@pytest.mark.long
def test_answers_are_the_same_for_all_problems() -> None:
    """All problems that ship."""
    early, whole = compare(problem_rows(1), pb.MODE_FDFO)
    assert early < whole

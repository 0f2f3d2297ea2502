"""The baselines give the services' tokens, by the services' schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.plain_loop import PlainResult, run_one_at_a_time, run_plain, run_without_kv
from fdfo.worker.v1 import worker_pb2 as pb
from tests.golden import test_loops as golden
from tests.golden.test_mixed_loops import run_to_end
from tests.worker.scripted import BAD, BLOCK, FILL, FIRST_EFFORT, Driver, ScriptedRunner, make_loop, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.model_runner import Segment
from worker_svc.starts import BadStart

NUM_ROWS = 3
CHUNK = 2 * BLOCK


def served(loop: DenoiseLoop, rows: list[pb.StartRow]) -> list[list[int]]:
    """Generated tokens of requests that a scheduler starts all at once, in FDFO rounds."""
    ends = run_to_end(Driver(loop), rows, pb.MODE_FDFO)
    size = loop.config.block_size
    return [ends[row.request_id][0][row.prompt_length % size :][: row.tokens_left] for row in rows]


def work(result: PlainResult) -> tuple[int, int, int]:
    return result.forwards, result.row_forwards, result.prefill_tokens


def prompt(num_blocks: int, effort: int) -> list[int]:
    """So many blocks of prefix, and one token that gives the block behind them its effort."""
    return [FILL] * (num_blocks * BLOCK) + [FIRST_EFFORT + effort]


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_the_limit_does_the_work_of_the_services_loop(algorithm: str) -> None:
    """Requests that all find a row at once: the worker's tokens, forwards, row forwards and prefill."""
    prompts = [prompt(0, 5), prompt(3, 2), prompt(0, 9)[:1] * 7, prompt(5, 12), [FILL] * BLOCK]
    writes = {BLOCK: FIRST_EFFORT + 6, 3 * BLOCK + 9: 50}
    loop = make_loop(num_slots=5, chunk=CHUNK, runner=ScriptedRunner(writes))
    rows = [start(str(n), ids, tokens_left=70, algorithm=algorithm) for n, ids in enumerate(prompts)]
    tokens = served(loop, rows)
    plain = run_plain(ScriptedRunner(writes), loop.config, prompts, 70, algorithm, num_rows=5)
    assert plain.token_ids == tokens
    totals = loop.totals
    assert work(plain) == (totals.forwards, totals.denoise_row_forwards, totals.prefill_tokens)
    assert plain.device_ms == totals.device_ms
    assert plain.wall_s > 0


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_all_ways_give_the_tiny_models_tokens(algorithm: str) -> None:
    """Batch-invariant: together, alone and without KV the same tokens, which are the worker's."""
    prompts = [golden.text_ids(length) for length in (5, golden.B, golden.B + 9, 3 * golden.B + 1)]
    loop = golden.make_loop(batch_invariant=True, chunk=2 * golden.B)
    together = run_plain(loop.runner, loop.config, prompts, 40, algorithm, num_rows=4)
    alone = run_one_at_a_time(loop.runner, loop.config, prompts, 40, algorithm)
    assert [len(ids) for ids in together.token_ids] == [40] * 4
    assert alone.token_ids == together.token_ids
    assert run_without_kv(loop.runner, loop.config, prompts, 40, algorithm).token_ids == together.token_ids
    assert alone.row_forwards == together.row_forwards
    assert alone.prefill_tokens == together.prefill_tokens
    rows = [golden.start_row(str(n), ids, algorithm, tokens_left=40) for n, ids in enumerate(prompts)]
    assert served(loop, rows) == together.token_ids


def test_parameters_reach_the_algorithm() -> None:
    """A threshold that every position passes fills a block in one forward, by all three ways."""
    loop = make_loop(chunk=CHUNK)
    params = {"threshold": 0.0}
    arguments = (ScriptedRunner(), loop.config, [prompt(1, 9)], 20, "LowConfidence", params)
    assert run_one_at_a_time(*arguments).forwards == 1
    assert run_without_kv(*arguments).forwards == 1
    assert run_one_at_a_time(*arguments[:-1]).forwards == 8


def test_without_kv_everything_is_computed_again() -> None:
    """Each forward has all blocks before as one chunk beside the block, and no block has a forward for its KV."""
    runner = ScriptedRunner()
    result = run_without_kv(runner, make_loop().config, [prompt(2, 4), prompt(0, 4)], 60)
    units = [3, 3, 3, 4, 4, 1, 1, 1, 2, 2]
    for inputs, num_units in zip(runner.inputs, units, strict=True):
        chunk = [Segment(1, num_units - 1, 0, is_prefill=True)] if num_units > 1 else []
        assert list(inputs.segments) == [*chunk, Segment(0, 1, num_units - 1)]
        assert inputs.logits_units.tolist() == [0]
    assert work(result) == (len(units), len(units), BLOCK * (sum(units) - len(units)))
    assert runner.inputs[-1].ids[1].tolist() == prompt(0, 4) + result.token_ids[1][: BLOCK - 1]


def num_fills(num_masked: int, effort: int) -> int:
    """Forwards in which the scripted model fills a block, at the rate of its effort."""
    return -(-num_masked // -(-(BLOCK - 1) // (effort - 1)))


def naive_forwards(requests: list[tuple[int, int]], num_rows: int, budget_blocks: int) -> int:
    """[blocks of prefix, forwards that denoise] of each request, counted down on paper."""
    waiting, forwards = [list(request) for request in requests], 0
    running: list[list[int]] = []
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(len(waiting), num_rows - len(running)))]
        budget = budget_blocks
        for request in running:
            taken = min(budget, request[0])
            budget -= taken
            request[0] -= taken
            if not request[0]:
                request[1] -= 1
        running = [request for request in running if request[1]]
        forwards += 1
    return forwards


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(2, 12)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_the_number_of_forwards_is_that_of_the_schedule(
    shapes: list[tuple[int, int]], num_rows: int, budget_blocks: int, num_blocks: int
) -> None:
    """Whatever the prefixes, efforts, rows and budget: no forward more or less than the naive count, prompts beside."""
    config = make_loop(chunk=budget_blocks * BLOCK).config
    prompts = [prompt(num_prefix, effort) for num_prefix, effort in shapes]
    result = run_plain(ScriptedRunner(), config, prompts, num_blocks * BLOCK - 1, num_rows=num_rows)
    # All blocks but the last have a commit; a block without prompt fills 31 positions, then 1.
    denoise = [num_fills(BLOCK - 1, effort) + (num_blocks - 1) * 3 for _, effort in shapes]
    prefixes = [num_prefix for num_prefix, _ in shapes]
    assert result.forwards == naive_forwards(list(zip(prefixes, denoise, strict=True)), num_rows, budget_blocks)
    assert result.row_forwards == sum(denoise)
    assert result.prefill_tokens == sum(prefixes) * BLOCK
    assert [len(ids) for ids in result.token_ids] == [num_blocks * BLOCK - 1] * len(shapes)


def test_what_a_worker_refuses_is_refused() -> None:
    """A request over the context length, and logits that are not finite."""
    config = make_loop(context=2 * BLOCK).config
    with pytest.raises(BadStart, match="tokens_left"):
        run_plain(ScriptedRunner(), config, [[5]], 2 * BLOCK, num_rows=1)
    with pytest.raises(RuntimeError, match="not finite"):
        run_plain(ScriptedRunner(), config, [[BAD]], 5, num_rows=1)

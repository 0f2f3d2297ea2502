"""The prefix cache through the loop: what a start gets, what is computed, and when pages come and go."""

from __future__ import annotations

import pytest
from torch import Tensor

from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import (
    BAD,
    BLOCK,
    FILL,
    STOP,
    Clock,
    Driver,
    ScriptedRunner,
    assert_whole,
    done_blocks,
    effort,
    make_loop,
    names,
    start,
)
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.prefix_cache import ROOT, PrefixCache, page_keys
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput
from worker_svc.warm_up import WARM_UP_LIMIT_S, warm_up

SHARED = [5] * 4 * BLOCK
WRITTEN = [FILL + place % 8 for place in range(BLOCK)]  # a block as the scripted model writes it


def cached(loop: DenoiseLoop) -> int:
    return loop.pool.usage().cached


def test_rows_that_begin_alike_share_pages_and_compute_only_the_rest() -> None:
    """Sixteen that come when the first one's prompt is computed: a shared page counts once, each computes its own."""
    loop = make_loop(num_slots=20, chunk=2048)
    driver = Driver(loop)
    first = driver.run(starts=[start("first", SHARED + [6] * BLOCK + effort(9))], max_forwards=1)
    assert list(first.rows.cached_tokens) == [0] and first.work.prefill_tokens == 5 * BLOCK
    rows = [start(f"{n}", SHARED + [10 + n] * BLOCK + effort(9)) for n in range(16)]
    reply = driver.run(starts=rows, continues=names("first"), max_forwards=10)
    assert list(reply.rows.cached_tokens) == [4 * BLOCK] * 16 + [0]
    assert list(reply.rows.prefilled_tokens) == [5 * BLOCK] * 17
    assert reply.work.prefill_tokens == 16 * BLOCK
    assert_whole(loop, held=4 + 17 * 2)
    again = driver.run(continues=names("first", *[f"{n}" for n in range(16)]), max_forwards=1)
    assert not any(again.rows.cached_tokens), "told once per start"
    driver.run(releases=names("first", *[f"{n}" for n in range(16)]))
    assert_whole(loop, held=0)
    assert cached(loop) >= 4 + 17


def test_a_prefix_that_is_all_there_denoises_at_once() -> None:
    """No chunk, no waiting: the first forward of the round is the row's first denoise forward."""
    runner = ScriptedRunner()
    loop = make_loop(runner=runner, chunk=BLOCK)
    driver = Driver(loop)
    driver.run(starts=[start("a", SHARED + effort(3))])
    driver.run(releases=names("a"))
    seen = len(runner.inputs)
    reply = driver.run(starts=[start("b", SHARED + effort(3))])
    assert list(reply.rows.cached_tokens) == list(reply.rows.prefilled_tokens) == [4 * BLOCK]
    assert reply.work.prefill_tokens == 0 and reply.work.forwards == 3
    assert [len(inputs.slots) for inputs in runner.inputs[seen:]] == [1, 1, 1]


def test_a_preempted_row_starts_again_from_its_own_pages() -> None:
    """Prompt and done blocks are given; the incomplete block travels in the snapshot and is never cached."""
    loop = make_loop()
    driver = Driver(loop)
    driver.run(starts=[start("a", [5] * BLOCK)])
    done = driver.run(continues=names("a"))
    assert done_blocks(done) == [WRITTEN]
    open_ = driver.run(continues=names("a"), max_forwards=1)
    assert list(open_.rows.block_indexes) == [3]
    driver.run(releases=names("a"))
    assert_whole(loop, held=0)
    assert cached(loop) == 3
    again = start("a", [5] * BLOCK + WRITTEN + WRITTEN, attempt=2)
    reply = driver.run(starts=[again])
    assert list(reply.rows.cached_tokens) == [3 * BLOCK] and reply.work.prefill_tokens == 0


def test_a_done_row_that_is_released_leaves_its_last_block_too() -> None:
    """Done and not yet rolled over: the block is final, and given when the request starts again."""
    loop = make_loop()
    driver = Driver(loop)
    driver.run(starts=[start("a", [5] * BLOCK)])
    driver.run(releases=names("a"))
    assert cached(loop) == 2
    reply = driver.run(starts=[start("a", [5] * BLOCK + WRITTEN, attempt=2)])
    assert list(reply.rows.cached_tokens) == [2 * BLOCK]


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_the_block_that_ends_a_request_is_not_cached(algorithm: str) -> None:
    """It may lack its final KV; a row released between its end and the reply is no exception."""
    loop = make_loop(runner=ScriptedRunner({BLOCK + 4: STOP}))
    driver = Driver(loop)
    row = start("a", [5] * BLOCK, stop_token_ids=[STOP], algorithm=algorithm)
    assert driver.run(starts=[row]).rows.statuses[0] == pb.ROW_STATUS_ENDED
    assert cached(loop) == 1
    row.attempt = 2
    driver.send(starts=[row])
    while (resident := loop.sessions["s"].rows.get(names("a")[0].key)) is None or resident.phase.value != "done":
        loop.tick()
    loop.release(loop.sessions["s"], names("a", attempt=2))
    assert_whole(loop, held=0)
    assert cached(loop) == 1


def test_pages_of_several_blocks_are_given_whole_only() -> None:
    """With 2 blocks a page, a prefix of 3 blocks gives one page; the page with the first denoise block is own."""
    loop = make_loop(page_size=2 * BLOCK, chunk=2048)
    driver = Driver(loop)
    driver.run(starts=[start("a", [5] * 3 * BLOCK + effort(9))], max_forwards=1)
    reply = driver.run(starts=[start("b", [5] * 3 * BLOCK + effort(9))], continues=names("a"), max_forwards=1)
    assert list(reply.rows.cached_tokens) == [2 * BLOCK, 0] and reply.work.prefill_tokens == BLOCK
    assert_whole(loop, held=3)


def test_the_cache_gives_way_oldest_first_and_last_page_first() -> None:
    """Cached pages are available: when none is free, the request that closed first loses its last page first."""
    loop = make_loop(num_pages=8, chunk=2048)
    driver = Driver(loop)
    for name, token in (("a", 5), ("b", 6)):
        driver.run(starts=[start(name, [token] * 3 * BLOCK + effort(9))], max_forwards=1)
        driver.run(releases=names(name))
    assert (loop.pool.num_free, cached(loop)) == (2, 6)
    assert loop.allowance(loop.sessions["s"]).pages == 8
    driver.run(starts=[start("c", [7] * 3 * BLOCK + effort(9))], max_forwards=1)
    driver.run(releases=names("c"))
    reply = driver.run(starts=[start("d", [5] * 3 * BLOCK + effort(9))], max_forwards=1)
    assert list(reply.rows.cached_tokens) == [BLOCK]
    assert_whole(loop, held=4)
    full = driver.run(starts=[start("e", [8] * 4 * BLOCK)], continues=names("d"), max_forwards=1)
    assert full.rows.statuses[0] == pb.ROW_STATUS_NO_KV_SPACE
    assert cached(loop) == 4, "a refused start takes nothing"


def test_what_a_failed_row_read_is_not_given_to_others() -> None:
    """After logits that are not finite its pages are computed anew, and so is all that followed them."""
    loop = make_loop(chunk=2048)
    driver = Driver(loop)
    driver.run(starts=[start("a", SHARED + [6] * BLOCK)], max_forwards=1)
    driver.run(releases=names("a"))
    assert cached(loop) == 5
    reply = driver.run(starts=[start("bad", [*SHARED, BAD])])
    assert (list(reply.rows.cached_tokens), reply.rows.statuses[0]) == ([4 * BLOCK], pb.ROW_STATUS_BAD_NUMERICS)
    assert_whole(loop, held=0)
    assert cached(loop) == 0 and loop.pool.num_free == loop.pool.total


def test_switched_off_nothing_is_cached() -> None:
    """Every page is free again when its row goes, and every prompt is computed."""
    loop = make_loop(caching=False)
    driver = Driver(loop)
    for name in "ab":
        reply = driver.run(starts=[start(name, SHARED + effort(2))])
        assert list(reply.rows.cached_tokens) == [0] and reply.work.prefill_tokens == len(SHARED)
        driver.run(releases=names(name))
        assert loop.pool.num_free == loop.pool.total


def test_the_warm_up_leaves_nothing() -> None:
    """A fresh worker has an empty cache and all pages free."""
    loop = make_loop(num_slots=8)
    warm_up(loop)
    assert (loop.pool.num_free, cached(loop), loop.pool.num_calls) == (64, 0, 0)


def test_the_warm_up_of_a_slow_model_ends_soon() -> None:
    """After the first forward over the limit nothing more is computed: a large model on a CPU takes seconds for one."""
    clock, forwards = Clock(), []

    class Slow(ScriptedRunner):
        def forward(self, inputs: ForwardInput, kv: KVStore) -> Tensor:
            clock.now += WARM_UP_LIMIT_S
            forwards.append(len(inputs.logits_units))
            return super().forward(inputs, kv)

    warm_up(make_loop(num_slots=8, runner=Slow(), clock=clock))
    assert len(forwards) == 1


def test_keys_tell_everything_before_them() -> None:
    """Equal pages behind different ones have different keys; a part of a page has none."""
    one, other = bytes(8), bytes([1] * 8)
    keys = page_keys(ROOT, one + other + one[:4], 8)
    assert len(keys) == len(set(keys)) == 2
    assert page_keys(keys[0], other, 8) == keys[1:]
    assert page_keys(ROOT, other + other, 8)[1] != keys[1]
    assert PrefixCache().find(keys) == []

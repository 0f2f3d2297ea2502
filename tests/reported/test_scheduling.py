"""Reported faults of scheduling and latency, with the loads that showed them; a simulated device in virtual time."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import pytest

from bench.experiments.prompts import H20
from bench.upstream import UpstreamLoop
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo_client.bench.metrics import ttft_ms
from fdfo_client.bench.workload import poisson_items
from tests.reported.virtual_loads import BUDGET, FEW_STEPS, PROFILE, device, play, requests
from tests.scheduler.in_memory import Bench
from tests.scheduler.in_memory import play as play_in_memory
from tests.worker.scripted import BLOCK, Driver, assert_whole, effort, make_loop, names, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.rows import Phase


def test_prompts_that_arrive_keep_nobody_from_denoising() -> None:
    """128 prompts of 1024 tokens at 8 requests/s: no more than the 522 forwards and 4.2 s that were reported possible.

    The shape that was reported, one block of each prompt a round and nobody denoising beside it, takes more for the
    first half of them, so the load shows the fault.
    """
    options = [each.options for each in requests(128, 1024, 128)]
    items = list(poisson_items(options, 8.0, random.Random(8)))

    def figures(num_items: int, kind: type[DenoiseLoop], **flags: Any) -> tuple[int, float]:
        measurement, forwards = play(items[:num_items], device(**H20), kind=kind, fused_commit=False, **flags)
        return len(forwards), statistics.median(ttft_ms(measurement.records)) / 1000

    num_forwards, ttft_s = figures(128, DenoiseLoop)
    assert num_forwards <= 522 and ttft_s <= 4.2
    upstream_forwards, upstream_ttft_s = figures(64, UpstreamLoop, rounds_in_flight=1, max_forwards=1)
    assert upstream_forwards > num_forwards and upstream_ttft_s > 4.2 > 2.5 * ttft_s


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(512, 2048 // 4), (4096, 1536 // 4)])
def test_a_rollout_keeps_its_rows_full(prompt_tokens: int, output_tokens: int) -> None:
    """128 at a time, a new request as each ends: all places taken, every row at work in every forward.

    A quarter of the reported output, and blocks of few forwards, to take a second.
    """
    items = requests(160, prompt_tokens, output_tokens)
    measurement, forwards = play(
        items, device(**FEW_STEPS), concurrency=128, max_running_requests=128, max_total_tokens=128 * 4608
    )
    last_sent_s = max(record.sent_at_s for record in measurement.records)
    start_s = forwards[0].at_s
    full = [forward for forward in forwards[1:] if forward.at_s - start_s < last_sent_s]
    assert statistics.mean(forward.resident for forward in full) >= 0.95 * 128, "mean rows per round"
    for forward in forwards:
        assert not forward.idle, forward
        assert not forward.prefilling or forward.prefill_tokens == BUDGET, "prompts wait beside an unused budget"


def test_a_long_prompt_does_not_take_a_round_a_block() -> None:
    """4096 tokens: two forwards of the budget and a round, where one block a round would take 128."""
    measurement, forwards = play(requests(1, 4096, 32, at_s=0.0), device())
    assert [forward.prefill_tokens for forward in forwards[:3]] == [BUDGET, BUDGET, 0]
    assert forwards[1].denoising == 1, "the first step comes with the last chunk"
    assert measurement.after is not None and measurement.after.rounds - measurement.before.rounds <= 2


def test_a_longest_prompt_makes_no_row_wait_longer_than_a_forward() -> None:
    """While 16384 tokens prefill, all 16 other rows denoise in every forward, and none takes longer than the budget."""
    items = requests(16, 32, 320, at_s=0.0) + requests(1, 16384, 32, at_s=0.3, seed=2)
    _, forwards = play(items, device())
    with_prompt = [number for number, forward in enumerate(forwards) if forward.prefill_tokens][-16384 // BUDGET :]
    assert [forwards[number].prefill_tokens for number in with_prompt] == [BUDGET] * (16384 // BUDGET)
    longest_ms = PROFILE["floor_ms"] + PROFILE["denoise_row_ms"] * 2 * 17 + PROFILE["prefill_token_ms"] * BUDGET
    for number in with_prompt:
        assert (forwards[number].resident, forwards[number].idle) == (17, 0)
        assert (forwards[number + 1].at_s - forwards[number].at_s) * 1000 <= longest_ms


def test_a_hundred_clients_at_once_get_their_first_tokens_soon() -> None:
    """With default flags 100 requests together take 64 places at once, and the last first token comes within 1.5 s of
    a device that needs 0.1 s for a block, not after 84 s."""
    measurement, forwards = play(requests(100, 512, 128, at_s=0.0), device())
    assert max(forward.denoising for forward in forwards) == 64
    times_ms = sorted(ttft_ms(measurement.records))
    assert times_ms[-1] <= 1500 and statistics.median(times_ms) <= 500


@pytest.mark.parametrize("phase", ["prefill", "step 2"])
@pytest.mark.parametrize("fdfo", [True, False])
def test_an_abort_waits_for_no_block(fdfo: bool, phase: str) -> None:
    """In the middle of a long prefill and at step 2 of a block of 30 forwards, in FDFO and in lockstep: the row is gone
    two forwards later, the client hears of it at once, and the row beside it, as slow, is not done yet."""
    loop = make_loop(num_slots=2, num_pages=80, chunk=BLOCK, caching=False)
    bench = Bench(loop, dllm_fdfo=fdfo)
    prompt = [5] * (20 * BLOCK if phase == "prefill" else BLOCK) + effort(30)

    async def scene() -> None:
        gone = await bench.submit("gone", prompt, 60)
        beside = await bench.submit("beside", effort(30), 60)
        while loop.totals.forwards < 3:
            await asyncio.sleep(0)
        (row,) = (row for row in loop.sessions[bench.scheduler.scheduler_id].rows.values() if len(row.prefix))
        assert row.phase is (Phase.PREFILL if phase == "prefill" else Phase.DENOISE)
        assert bench.scheduler.abort("gone")
        _, finished = await bench.read(gone)
        assert finished.reason == api.FINISH_REASON_ABORT
        before = loop.totals.forwards
        while row.session.rows.get(row.name.key) is row:
            await asyncio.sleep(0)
        assert loop.totals.forwards - before <= 2 and loop.totals.blocks_done == 0
        await bench.read(beside)

    play_in_memory(bench, scene)
    assert_whole(loop, held=0)


def test_a_parked_row_is_released_before_the_next_forward() -> None:
    """A row that no round names, in the middle of its block, while another one loops."""
    loop = make_loop()
    driver = Driver(loop)
    driver.run(starts=[start("parked", effort(20)), start("slow", effort(30))], max_forwards=2)
    driver.send(continues=names("slow"))
    loop.tick()
    assert_whole(loop, held=2)
    driver.send(acked_round_id=1, releases=names("parked"), continues=names("slow"))
    loop.tick()
    assert loop.totals.forwards == 4
    assert [key.request_id for key in loop.sessions["s"].rows] == ["slow"]
    assert_whole(loop, held=1)

"""Reported faults of KV pages and slots."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo_client._types import Committed
from fdfo_client.bench.measure import World
from fdfo_client.bench.virtual import virtual_world
from fdfo_client.bench.virtual_time import run_virtually
from tests.client.test_bench_virtual import services
from tests.reported.virtual_loads import FEW_STEPS, device, requests
from tests.scheduler.in_memory import Bench, ContextRunner, play
from tests.worker.scripted import (
    BLOCK,
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
from worker_svc.rows import Phase


def test_a_hundred_times_128_clients_are_killed_in_mid_generation() -> None:
    """128 long generations, 64 of them running, are left at once in mid-generation; after each of the hundred drains
    no page is held and none is lost. All 128 in every twentieth turn, 16 in the others, to take two seconds."""
    loops: list[DenoiseLoop] = []

    class Kept(DenoiseLoop):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            loops.append(self)

    async def read(world: World, options: dict[str, Any]) -> None:
        async for event in world.stream(options):
            num_committed[0] += isinstance(event, Committed)

    num_committed = [0]
    items = requests(128, 40, 2000)

    async def scene() -> None:
        async with virtual_world(device(**FEW_STEPS), *services({}), make_loop=Kept) as world:
            (loop,) = loops
            for turn in range(100):
                num_clients = 16 if turn % 20 else 128
                clients = [asyncio.create_task(read(world, item.options)) for item in items[:num_clients]]
                await asyncio.sleep(0.03 + 0.001 * (turn % 11))
                state = loop.state
                assert state.slots_used == min(num_clients, 64) and state.pages.held >= state.slots_used
                for client in clients:
                    client.cancel()
                await asyncio.sleep(0.1)
                state = loop.state
                assert (state.slots_used, state.pages.held) == (0, 0)
                assert state.pages.free + state.pages.cached == state.pages.total
            pages = loop.pool.take(loop.pool.total)
            assert pages is not None and len(set(pages)) == loop.pool.total, "every page can be given out"

    run_virtually(scene())
    assert num_committed[0] > 100


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_abort_in_the_round_in_which_the_request_finishes(in_flight: int) -> None:
    """Aborts swept over a whole life in steps finer than a forward, so that one meets the end: one terminal event,
    pages and slot free once, and the neighbour, whose pages are taken at the same time, gets its tokens."""
    reasons = set()
    for passes in range(0, 130, 4):
        loop = make_loop(num_slots=2, num_pages=6, runner=ContextRunner())
        bench = Bench(loop, rounds_in_flight=in_flight)
        answers: list[list[int]] = []

        async def scene(bench: Bench = bench, passes: int = passes, answers: list[list[int]] = answers) -> None:
            fields = {"ignore_eos": True, "algorithm_params": {"threshold": 0.1}}
            gone = await bench.submit("gone", [20] * 3, 40, **fields)
            beside = await bench.submit("beside", [21] * 3, 90, **fields)
            for _ in range(passes):
                await asyncio.sleep(0)
            bench.scheduler.abort("gone")
            _, finished = await bench.read(gone)
            reasons.add(finished.reason)
            assert gone.events.empty()
            answers.append((await bench.read(beside))[0])

        play(bench, scene)
        assert len(answers[0]) == 90
        assert_whole(loop, held=0)
        assert loop.slots.num_free == 2
    assert reasons == {api.FINISH_REASON_ABORT, api.FINISH_REASON_LENGTH}


@pytest.mark.parametrize("told", ["beside the rounds", "with the next round", "both"])
def test_a_row_is_released_between_its_end_and_the_reply(told: str) -> None:
    """Its page goes back once: what starts next does not share one with the row beside it."""
    loop = make_loop(num_slots=3, num_pages=3, caching=False)
    driver = Driver(loop)
    first = driver.send(starts=[start("ends", effort(3), tokens_left=5), start("beside", effort(20))])
    row = loop.sessions["s"].rows.get(names("ends")[0].key)
    while row is None or row.phase is not Phase.DONE:
        assert loop.tick()
        row = loop.sessions["s"].rows[names("ends")[0].key]
    assert not first and row.entry is not None and row.entry.ends
    if told != "with the next round":
        loop.release(loop.sessions["s"], names("ends"))
    releases = names("ends") if told != "beside the rounds" else []
    two = [start("new", effort(20)), start("newer", effort(20))]
    second = driver.send(acked_round_id=0, releases=releases, starts=two, continues=names("beside"))
    loop.tick()
    (reply,) = first
    assert isinstance(reply, pb.RunRoundResponse)
    ended = pb.ROW_STATUS_ENDED if told == "with the next round" else pb.ROW_STATUS_RELEASED
    assert list(reply.rows.statuses) == [ended, pb.ROW_STATUS_RUNNING] and not second
    assert_whole(loop, held=3)
    pages = loop.kv.page_table[:, 0].tolist()
    assert sorted(pages) == [1, 2, 3]


@pytest.mark.parametrize("budget_blocks", [1, 2])
def test_retained_blocks_are_never_cut_to_the_budget(budget_blocks: int) -> None:
    """Five blocks half done, three of them parked and two of preempted rows that come back, beside a prompt: a budget
    of one block or two is the prompt's, every forward has all denoising blocks whole, and none loses a token."""
    efforts = {f"r{n}": 8 + n for n in range(5)}
    alone = {name: done_blocks(Driver(make_loop()).run(starts=[start(name, effort(n))])) for name, n in efforts.items()}
    runner = ScriptedRunner()
    loop = make_loop(num_slots=8, chunk=budget_blocks * BLOCK, runner=runner)
    driver = Driver(loop)
    half = driver.run(starts=[start(name, effort(number)) for name, number in efforts.items()], max_forwards=4)
    assert list(half.rows.step_counts) == [4] * 5
    back = []
    for place in (3, 4):
        row = start(f"r{place}", effort(8 + place), attempt=2, step_count=4)
        row.block_ids = half.rows.block_ids[4 * BLOCK * place : 4 * BLOCK * (place + 1)]
        row.block_mask = half.rows.block_masks[BLOCK // 8 * place : BLOCK // 8 * (place + 1)]
        back.append(row)
    driver.run(releases=names("r3", "r4"), max_forwards=1)
    runner.inputs.clear()
    prompt = start("prompt", [5] * (6 * BLOCK) + effort(30))
    reply = driver.run(starts=[*back, prompt], continues=names("r0", "r1", "r2"), mode=pb.MODE_SYNC)
    assert reply.rows.statuses == [pb.ROW_STATUS_RUNNING] * 6
    assert done_blocks(reply)[:2] + done_blocks(reply)[3:] == [alone[f"r{n}"][0] for n in (3, 4, 0, 1, 2)]
    for number, inputs in enumerate(runner.inputs):
        chunk = budget_blocks if number < 6 // budget_blocks else 0
        assert len(inputs.ids) - len(inputs.logits_units) == chunk and inputs.ids.shape[1] == BLOCK
        assert len(inputs.logits_units) == 5 + (number >= 6 // budget_blocks - 1)

"""Workers that die, hang, drain or come back: what goes on, what counts against a request, what the worker is told."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import ClassVar

import pytest
import torch

from common.errors import Internal
from tests.scheduler.in_memory import Bench, InMemoryLink, TimedLink, expected, play, play_timed
from tests.worker.scripted import BLOCK, MASK, ScriptedRunner, assert_whole, effort, make_loop
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

POISON = 50  # a token that ends the worker whose forward has it


class Died(Exception):
    """`num_others`: rows in the forward beside the poisoned one."""

    def __init__(self, num_others: int) -> None:
        self.num_others = num_others


class MortalRunner(ScriptedRunner):
    """Ends its worker over a block with POISON and at most so many masks."""

    most_masks = BLOCK

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        is_bad = (inputs.ids == POISON).any(dim=1) & ((inputs.ids == MASK).sum(dim=1) <= self.most_masks)
        if is_bad.any():
            raise Died(len(set(inputs.slots.tolist())) - 1)
        return super().forward(inputs, kv)


def mortal_loop() -> DenoiseLoop:
    return make_loop(num_slots=4, runner=MortalRunner())


class MortalLink(InMemoryLink):
    """A worker that is started again some time after it died. `deaths`: how many rows each death of any worker hit
    beside the poisoned one."""

    deaths: ClassVar[list[int]] = []

    async def drive(self) -> None:
        while True:
            try:
                self.loop.tick()
            except Died as died:
                self.deaths.append(died.num_others)
                self.is_dead = True
                await asyncio.sleep(0.02)
                self.loop, self.is_dead = mortal_loop(), False
            for _ in range(12):
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _reconnect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.round_loop.RECONNECT_EVERY_S", 0.001)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("fdfo", [True, False])
def test_a_request_that_ends_every_worker_fails_alone(num_workers: int, fdfo: bool) -> None:
    """Two deaths, the third one alone, then an error that says so; all others get their answers."""
    MortalLink.deaths.clear()
    bench = Bench(*(mortal_loop() for _ in range(num_workers)), link_type=MortalLink, dllm_fdfo=fdfo)

    async def scene() -> None:
        good = [await bench.submit(f"good{n}", effort(9), 150) for n in range(6)]
        while not any(stream.samples[0].committed_ids for stream in good):
            await asyncio.sleep(0)
        bad = await bench.submit("bad", [POISON, 5], 60)
        good += [await bench.submit(f"more{n}", effort(5), 60) for n in range(6)]
        with pytest.raises(Internal, match="3 workers died under the request"):
            await bench.read(bad)
        for number, stream in enumerate(good):
            assert (await bench.read(stream))[0] == expected(1, 150 if number < 6 else 60)

    play(bench, scene)
    assert len(MortalLink.deaths) == 3 and MortalLink.deaths[-1] == 0
    assert not len(bench.scheduler.queue)


def test_deaths_do_not_count_against_requests_that_committed_a_block() -> None:
    """A request that goes on between deaths is never under suspicion, however often its worker dies."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        stream = await bench.submit("a", effort(3), 300)
        (sample,), link = stream.samples, bench.links[0]
        for _ in range(5):
            known = len(sample.committed_ids)
            while len(sample.committed_ids) == known:
                await asyncio.sleep(0)
            link.is_dead = True
            while not len(bench.scheduler.queue):
                await asyncio.sleep(0)
            assert sample.num_deaths == 0
            link.loop, link.is_dead = make_loop(), False
        assert (await bench.read(stream))[0] == expected(1, 300)

    play(bench, scene)


def test_a_request_that_ends_workers_at_a_later_step_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was heard before the first death is kept, so from then on it comes to that step at once; the others, of
    which steps are heard all the time, are never under suspicion."""
    MortalLink.deaths.clear()
    monkeypatch.setattr(MortalRunner, "most_masks", BLOCK // 2)
    bench = Bench(mortal_loop(), link_type=MortalLink, max_forwards=1)

    async def scene() -> None:
        good = [await bench.submit(f"good{n}", effort(30), 60) for n in range(2)]
        bad = await bench.submit("bad", [*effort(9), POISON], 60)
        with pytest.raises(Internal, match="3 workers died under the request"):
            await bench.read(bad)
        assert all(stream.samples[0].num_deaths == 0 for stream in good)
        for stream in good:
            assert (await bench.read(stream))[0] == expected(1, 60)

    play(bench, scene)
    assert len(MortalLink.deaths) == 4 and MortalLink.deaths[-1] == 0


def test_suspects_are_cleared_by_a_block_of_their_own() -> None:
    """After two deaths at once all rows of a worker run alone, one after the other, and then together again."""
    bench = Bench(make_loop(), make_loop())
    most = 0

    async def scene() -> None:
        nonlocal most
        streams = [await bench.submit(f"r{n}", effort(9), 80) for n in range(3)]
        samples = [stream.samples[0] for stream in streams]
        for sample in samples:
            sample.num_deaths = 1  # and now a second one
        for link in bench.links:
            while not link.loop.totals.forwards:
                await asyncio.sleep(0)
            link.is_dead = True
        while not all(sample.is_suspect for sample in samples):
            await asyncio.sleep(0)
        normal = await bench.submit("normal", effort(3), 31)
        for link in bench.links:
            link.loop, link.is_dead = make_loop(), False
        while any(sample.is_suspect for sample in samples):
            for loop in bench.scheduler.loops:
                rows = list(loop.running.values())
                assert len(rows) == 1 or not any(row.is_suspect for row in rows)
            most = max(most, sum(row.is_suspect for loop in bench.scheduler.loops for row in loop.running.values()))
            await asyncio.sleep(0)
        for stream in streams:
            assert (await bench.read(stream))[0] == expected(1, 80)
        assert (await bench.read(normal))[0] == expected(1, 31)

    play(bench, scene)
    assert most == 1


async def ready(bench: Bench, is_ready: bool) -> None:
    """Returns when the first worker is, or is not."""
    while bench.scheduler.loops[0].is_ready != is_ready:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("busy", [True, False])
def test_a_hung_worker_is_left_and_fenced_when_it_comes_back(busy: bool) -> None:
    """Its requests go on elsewhere within seconds, no death is counted, and on its return a higher generation frees
    what it held; then it is used again."""
    bench = Bench(*(make_loop(num_slots=4) for _ in range(2)), link_type=TimedLink)
    hung, other = bench.links
    assert isinstance(hung, TimedLink)

    async def scene() -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(0.5)
        streams = [await bench.submit(f"r{n}", effort(20), 600) for n in range(8 if busy else 0)]
        await asyncio.sleep(0.5)
        hung.stop()
        stopped_at = clock()
        await ready(bench, False)
        assert clock() - stopped_at < (8.0 if busy else 3.5)
        held_slots = hung.loop.state.slots_used
        assert held_slots == (4 if busy else 0)
        for stream in streams:
            assert (await bench.read(stream))[0] == expected(1, 600)
            assert stream.samples[0].num_deaths == 0
        hung.stop(False)
        await ready(bench, True)
        await asyncio.sleep(0.1)
        assert hung.loop.state.slots_used == 0
        again = [await bench.submit(f"again{n}", effort(3), 31) for n in range(8)]
        for stream in again:
            assert (await bench.read(stream))[0] == expected(1, 31)
        assert any(request.starts for request in hung.requests[-3:])

    play_timed(bench, scene)
    assert_whole(hung.loop, held=0)
    assert other.loop.totals.refused_generations == 0


def test_a_dead_idle_worker_looks_ready_for_a_second_at_most() -> None:
    """Without any traffic the probe finds it, and finds it again when it is back."""
    bench = Bench(make_loop(), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.5)
        seen = [bench.scheduler.has_worker]
        bench.links[0].is_dead = True
        await asyncio.sleep(1.1)
        seen.append(bench.scheduler.has_worker)
        bench.links[0].loop, bench.links[0].is_dead = make_loop(), False
        await asyncio.sleep(1)
        assert [*seen, bench.scheduler.has_worker] == [True, False, True]

    play_timed(bench, scene)


def test_an_idle_scheduler_sees_what_others_hold() -> None:
    """A probe tells how the pages of a worker are used that owes us nothing."""
    bench = Bench(make_loop(), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.5)
        assert bench.links[0].loop.pool.take(3)
        await asyncio.sleep(1.1)
        (worker,) = bench.scheduler.info().workers
        assert (worker.pages_held, worker.pages_free) == (3, worker.pages_total - 3)

    play_timed(bench, scene)


def test_an_idle_worker_that_drains_is_seen_within_a_second() -> None:
    """It gets no request any more; the one that comes then runs elsewhere at once."""
    bench = Bench(make_loop(), make_loop(), link_type=TimedLink)

    async def scene() -> None:
        await asyncio.sleep(0.5)
        bench.links[0].loop.drain()
        await asyncio.sleep(1.1)
        assert [loop.is_ready for loop in bench.scheduler.loops] == [False, True]
        assert bench.scheduler.loops[0].link.last_error == "the worker is draining"

    play_timed(bench, scene)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_drain_costs_no_forward(in_flight: int) -> None:
    """Requests that move in mid-block go on with the steps they had: as many forwards as without the drain."""

    def forwards(drained: bool) -> list[int]:
        bench = Bench(make_loop(), make_loop(), rounds_in_flight=in_flight)
        spent = []

        async def scene() -> None:
            streams = [await bench.submit(f"r{n}", effort(20), 31) for n in range(4)]
            while bench.links[0].loop.totals.forwards < 7:
                await asyncio.sleep(0)
            if drained:
                bench.links[0].loop.drain()
            for stream in streams:
                ids, finished = await bench.read(stream)
                assert ids == expected(1, 31)
                spent.append(finished.usage.forwards)
            assert all(stream.samples[0].num_deaths == 0 for stream in streams)

        play(bench, scene)
        assert (bench.scheduler.counters.restarts > 0) == drained
        return spent

    assert forwards(drained=True) == forwards(drained=False)


@pytest.mark.parametrize("reason", ["STALE_GENERATION", "ROUND_GAP", "EPOCH_CHANGED", "OTHER_MODEL"])
def test_a_refused_scheduler_starts_anew(reason: str) -> None:
    """Whatever the worker refuses for, the requests go on under a new generation, and end as if nothing was."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        stream = await bench.submit("a", effort(9), 100)
        link, loop = bench.links[0], bench.scheduler.loops[0]
        while link.loop.totals.forwards < 5:
            await asyncio.sleep(0)
        generation = loop.generation
        if reason == "STALE_GENERATION":
            link.loop.leases.touch(link.scheduler_id, generation + 1)
        elif reason == "ROUND_GAP":
            loop.rows.last_round_id += 50
        elif reason == "EPOCH_CHANGED":
            link.loop.epoch = "another"
        else:
            link.loop.config = dataclasses.replace(link.loop.config, fingerprint="other")
            while "another model" not in link.last_error:
                await asyncio.sleep(0)
            link.loop.config = dataclasses.replace(link.loop.config, fingerprint="scripted")
        assert (await bench.read(stream))[0] == expected(1, 100)
        assert loop.generation > generation
        assert stream.samples[0].num_deaths == 0 or reason == "EPOCH_CHANGED"

    play(bench, scene)
    assert bench.scheduler.counters.restarts >= 1

"""The scheduler over real denoise loops in memory: requests from submit to their last event."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import structlog.testing

from common.errors import AlreadyLive, InvalidField, QueueFull, ServiceError, Unavailable
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.core import BadDefaults, Scheduler
from scheduler_svc.settings import SchedulerSettings
from tests.scheduler.in_memory import FOLDER, Bench, InMemoryLink, expected, play
from tests.worker.scripted import BAD, BLOCK, Clock, ScriptedRunner, assert_whole, effort, make_loop


@pytest.mark.parametrize("fdfo", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("fused_commit", [False, True])
def test_requests_of_all_lengths_get_exactly_their_tokens(fdfo: bool, in_flight: int, fused_commit: bool) -> None:
    """Whatever the mode, the rounds in flight and the commits: the same tokens, then the pool is whole."""
    loop = make_loop(num_slots=3, fused_commit=fused_commit)
    bench = Bench(loop, dllm_fdfo=fdfo, rounds_in_flight=in_flight)
    lengths = [(1, 1), (1, BLOCK - 1), (5, BLOCK), (BLOCK, BLOCK + 1), (BLOCK + 1, 100), (7 * BLOCK + 3, 64), (2, 200)]

    async def scene() -> None:
        requests = [
            await bench.submit(f"r{n}", effort(3 + n) + [5] * (prompt - 1), new)
            for n, (prompt, new) in enumerate(lengths)
        ]
        for request, (prompt, new) in zip(requests, lengths, strict=True):
            ids, finished = await bench.read(request)
            assert ids == expected(prompt, new)
            assert finished.reason == api.FINISH_REASON_LENGTH
            assert finished.usage.completion_tokens == new and finished.usage.prompt_tokens == prompt
        await asyncio.sleep(0)

    play(bench, scene)
    assert not bench.scheduler.live and not len(bench.scheduler.queue)
    assert bench.scheduler.counters.restarts == 0
    assert_whole(loop)


def test_fdfo_needs_fewer_forwards_than_sync() -> None:
    """With blocks of different effort the lockstep pays for waiting and FDFO does not."""

    def forwards(fdfo: bool) -> tuple[int, int]:
        bench = Bench(make_loop(num_slots=4), dllm_fdfo=fdfo)

        async def scene() -> None:
            requests = [await bench.submit(f"r{n}", effort(2 + 5 * (n % 3)), 31) for n in range(12)]
            for request in requests:
                await bench.read(request)

        play(bench, scene)
        return bench.scheduler.counters.forwards, bench.scheduler.counters.waiting_row_forwards

    (fdfo_forwards, fdfo_waiting), (sync_forwards, sync_waiting) = forwards(True), forwards(False)
    assert fdfo_forwards < sync_forwards
    assert (fdfo_waiting, sync_waiting > 0) == (0, True)


def test_an_arrival_joins_while_a_slow_row_loops() -> None:
    """With a slot free, a new request starts at the next forward boundary of the running round."""
    loop = make_loop()
    bench = Bench(loop)

    async def scene() -> None:
        slow = await bench.submit("slow", effort(30), 31)
        while loop.totals.forwards < 3:
            await asyncio.sleep(0)
        before = loop.totals.forwards
        fast = await bench.submit("fast", effort(2), 31)
        await bench.read(fast)
        assert loop.totals.forwards - before <= 4
        assert not slow.is_finished
        await bench.read(slow)

    play(bench, scene)


@pytest.mark.parametrize("after_forwards", [0, 1, 2, 5])
def test_an_abort_takes_effect_at_the_next_boundary_in_every_phase(after_forwards: int) -> None:
    """Queued, prefilling or denoising: one terminal event, the row is freed, the others go on."""
    loop = make_loop(num_slots=2, chunk=BLOCK)
    bench = Bench(loop)

    async def scene() -> None:
        other = await bench.submit("other", effort(9), 31)
        request = await bench.submit("gone", [5] * (3 * BLOCK) + effort(30), 60)
        queued = await bench.submit("queued", effort(3), 31)
        start = loop.totals.forwards
        while loop.totals.forwards < start + after_forwards:
            await asyncio.sleep(0)
        assert bench.scheduler.abort("gone") and not bench.scheduler.abort("gone")
        before = loop.totals.forwards
        while any(key.request_id == "gone" for session in loop.sessions.values() for key in session.rows):
            await asyncio.sleep(0)
        assert loop.totals.forwards - before <= 2
        _, finished = await bench.read(request)
        assert finished.reason == api.FINISH_REASON_ABORT and request.events.empty()
        for one in (other, queued):
            assert (await bench.read(one))[0] == expected(1, 31)

    play(bench, scene)


def test_a_lost_worker_is_continued_in_mid_block_on_the_restarted_one() -> None:
    """Nothing is lost or published twice, and the block needs only the forwards it had left."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        requests = [await bench.submit(f"r{n}", effort(9), 100) for n in range(3)]
        link = bench.links[0]
        while link.loop.totals.forwards < 5:
            await asyncio.sleep(0)
        before = link.loop.totals.forwards
        link.is_dead = True
        while len(bench.scheduler.queue) < 3:
            await asyncio.sleep(0)
        assert [request.samples[0].incomplete.step_count for request in requests] == [before] * 3 or before >= 5
        link.loop, link.is_dead = make_loop(), False
        for request in requests:
            ids, finished = await bench.read(request)
            assert ids == expected(1, 100)
            assert finished.usage.forwards <= before + 9 + 2 * 2 + 1
        assert bench.scheduler.counters.restarts == 3

    play(bench, scene)


@pytest.mark.parametrize("fused_commit", [False, True])
def test_two_workers_share_the_queue_and_one_carries_on_alone(fused_commit: bool) -> None:
    """Requests of a dead worker go to the front of the queue and run on the other."""
    bench = Bench(*(make_loop(num_slots=2, fused_commit=fused_commit) for _ in range(2)))

    async def scene() -> None:
        requests = [await bench.submit(f"r{n}", effort(9), 100) for n in range(6)]
        while min(link.loop.totals.forwards for link in bench.links) < 3:
            await asyncio.sleep(0)
        bench.links[0].is_dead = True
        for request in requests:
            assert (await bench.read(request))[0] == expected(1, 100)

    play(bench, scene)
    assert bench.scheduler.counters.restarts == 2


def test_a_pool_too_small_for_all_finishes_all() -> None:
    """A row that finds no page is released and starts again when there is room; rows are whole or wait."""
    loop = make_loop(num_slots=4, num_pages=6)
    bench = Bench(loop)

    async def scene() -> None:
        requests = [await bench.submit(f"r{n}", effort(3), 150) for n in range(6)]
        for request in requests:
            assert (await bench.read(request))[0] == expected(1, 150)

    play(bench, scene)
    assert bench.scheduler.counters.preemptions > 0
    assert_whole(loop)


def test_a_request_whose_logits_are_not_finite_fails_alone() -> None:
    """It ends with an error that says so; the one beside it is undisturbed."""
    bench = Bench(make_loop())

    async def scene() -> None:
        bad, good = await bench.submit("bad", [BAD], 31), await bench.submit("good", effort(5), 31)
        with pytest.raises(ServiceError, match="not finite"):
            await bench.read(bad)
        assert (await bench.read(good))[0] == expected(1, 31)

    play(bench, scene)


def test_ids_stay_unique_while_live_and_may_come_again() -> None:
    """A live id is refused, and serving goes on; after its end the same id is a new request."""
    bench = Bench(make_loop())

    async def scene() -> None:
        first = await bench.submit("same", effort(9), 31)
        with pytest.raises(AlreadyLive):
            await bench.submit("same", effort(2), 31)
        await bench.read(first)
        again = await bench.submit("same", effort(2), 31)
        assert (await bench.read(again))[0] == expected(1, 31)
        one, two = await bench.submit("", effort(2)), await bench.submit("", effort(2))
        assert one.request_id != two.request_id
        await asyncio.gather(bench.read(one), bench.read(two))

    play(bench, scene)


def test_a_full_queue_refuses_at_once_with_a_hint() -> None:
    """What was queued is untouched."""
    bench = Bench(make_loop(num_slots=1), max_queued_requests=2)

    async def scene() -> None:
        requests = [await bench.submit("a", effort(9), 31)]
        while len(bench.scheduler.queue):
            await asyncio.sleep(0)
        requests += [await bench.submit(name, effort(9), 31) for name in "bc"]
        with pytest.raises(QueueFull) as caught:
            await bench.submit("d", effort(9), 31)
        assert caught.value.retry_after_s > 0
        for request in requests:
            await bench.read(request)

    play(bench, scene)


def test_an_ended_stream_stops_the_work_for_it() -> None:
    """A stop string that only the scheduler sees releases the row at the next boundary."""
    loop = make_loop()
    bench = Bench(loop)

    async def scene() -> None:
        codec = bench.scheduler._codec
        text = b"".join(codec.token_bytes(token) for token in expected(1, 8)).decode()
        request = await bench.submit("a", effort(3), 400, stop=[text[2:4]])
        _, finished = await bench.read(request)
        assert finished.reason == api.FINISH_REASON_STOP and finished.stop_string == text[2:4]
        while any(session.rows for session in loop.sessions.values()):
            await asyncio.sleep(0)

    play(bench, scene)
    assert loop.totals.blocks_done <= 2


def test_another_model_behind_the_address_is_not_used() -> None:
    """The worker is told apart by its fingerprint; requests wait, and the reason stands in the server's info."""
    loop = make_loop()
    loop.config = dataclasses.replace(loop.config, fingerprint="other")
    bench = Bench(loop)

    async def scene() -> None:
        waiting = asyncio.create_task(bench.submit("a", effort(2)))
        while "another model" not in bench.links[0].last_error:
            await asyncio.sleep(0)
        assert not bench.scheduler.has_worker and not waiting.done()
        waiting.cancel()

    play(bench, scene)


@pytest.mark.parametrize("own", ["scripted-", "scripted-a"], ids=["without weights", "with weights"])
def test_workers_with_other_weights_are_not_used(own: str) -> None:
    """A finetune has its base's configuration. The scheduler's own weights say which is meant, or, where its folder has
    none, those of the first worker; requests and clients are told that fingerprint."""
    loops = [make_loop(), make_loop()]
    for loop, weights in zip(loops, "ab", strict=True):
        loop.config = dataclasses.replace(loop.config, fingerprint=f"scripted-{weights}")
    bench = Bench(*loops, folder=dataclasses.replace(FOLDER, fingerprint=own))

    async def scene() -> None:
        while "weights" not in bench.links[1].last_error:
            await asyncio.sleep(0)
        assert (await bench.read(await bench.submit("a", effort(2), 31)))[0] == expected(1, 31)
        assert bench.scheduler.info().fingerprint == "scripted-a"

    play(bench, scene)
    assert not loops[1].totals.forwards and bench.links[0].requests[0].fingerprint == "scripted-a"


def test_closing_lets_live_requests_finish_and_refuses_new_ones() -> None:
    """SIGTERM: what finishes within the grace time finishes."""
    bench = Bench(make_loop())

    async def scene() -> None:
        request = await bench.submit("a", effort(5), 60)
        reader = asyncio.create_task(bench.read(request))
        closing = asyncio.create_task(bench.scheduler.close(10))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await bench.submit("b", effort(2))
        assert (await reader)[0] == expected(1, 60)
        await closing

    play(bench, scene)


def test_a_draining_worker_hands_its_rows_back_with_their_snapshots() -> None:
    """They go on elsewhere; the client sees nothing of it."""
    bench = Bench(make_loop(num_slots=2), make_loop(num_slots=2))

    async def scene() -> None:
        requests = [await bench.submit(f"r{n}", effort(9), 100) for n in range(4)]
        while min(link.loop.totals.forwards for link in bench.links) < 3:
            await asyncio.sleep(0)
        bench.links[0].loop.drain()
        for request in requests:
            assert (await bench.read(request))[0] == expected(1, 100)

    play(bench, scene)


def test_bad_input_never_reaches_a_worker() -> None:
    """The field is named; no round is sent for it."""
    bench = Bench(make_loop())

    async def scene() -> None:
        for field, fields in {"max_new_tokens": {"max_new_tokens": 0}, "json_schema": {"json_schema": "{}"}}.items():
            with pytest.raises(InvalidField) as caught:
                await bench.submit("a", effort(2), **fields)  # type: ignore[arg-type]
            assert caught.value.field == field
        assert bench.links[0].requests == []

    play(bench, scene)


def test_messages_carry_all_newly_committed_ids() -> None:
    """What is held back from publishing is still told, once, for a resume."""
    bench = Bench(make_loop())

    async def scene() -> None:
        request = await bench.submit("a", effort(3), 70)
        told: list[int] = []
        while True:
            event = await request.events.get()
            assert not isinstance(event, ServiceError)
            told += event.committed.committed_ids
            if event.HasField("finished"):
                break
        bench.scheduler.leave(request)
        assert told == request.samples[0].committed_ids

    play(bench, scene)


def test_a_worker_lease_that_ran_out_is_a_lost_worker_not_a_lost_request() -> None:
    """The generation is raised and the requests start anew."""
    clock = Clock()
    loop = make_loop(runner=ScriptedRunner(), clock=clock)
    bench = Bench(loop)

    async def scene() -> None:
        first = await bench.submit("a", effort(3), 31)
        await bench.read(first)
        clock.now += 60
        while not loop.totals.expired_leases:
            await asyncio.sleep(0)
        second = await bench.submit("b", effort(3), 31)
        assert (await bench.read(second))[0] == expected(1, 31)
        assert max(request.generation for request in bench.links[0].requests) == 2

    play(bench, scene)


def test_a_round_that_only_continues_names_rows_and_nothing_else() -> None:
    """Continuing rows cost a name; ids travel with starts only."""
    bench = Bench(make_loop(), max_forwards=1)

    async def scene() -> None:
        request = await bench.submit("a", effort(5), 31)
        await bench.read(request)

    play(bench, scene)
    later: list[pb.RunRoundRequest] = bench.links[0].requests[1:]
    assert later and all(not request.starts and list(request.continues.request_ids) == ["a"] for request in later)


@pytest.mark.parametrize("default", [None, "JointThreshold"])
def test_an_editing_algorithm_is_warned_of_once(default: str | None) -> None:
    """Whoever uses JointThreshold is told that the checkpoint must be trained for it; where it is the default, at the
    start."""
    bench = Bench(make_loop(), dllm_algorithm=default)

    async def scene() -> None:
        while not bench.scheduler.has_worker:
            await asyncio.sleep(0)
        assert [entry["event"] for entry in logs].count("algorithm_may_not_fit") == (default is not None)
        for name in ("plain", "one", "two"):
            algorithm = "LowConfidence" if name == "plain" else "JointThreshold"
            await bench.read(await bench.submit(name, effort(2), 31, algorithm=algorithm))

    with structlog.testing.capture_logs() as logs:
        play(bench, scene)
    warnings = [entry for entry in logs if entry["event"] == "algorithm_may_not_fit"]
    assert [entry["algorithm"] for entry in warnings] == ["JointThreshold"]


def test_an_idle_scheduler_sees_a_restarted_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat carries the epoch: another one means that the worker must be met anew."""
    monkeypatch.setattr("scheduler_svc.round_loop.HEARTBEAT_EVERY_S", 0.0)
    bench = Bench(make_loop())

    async def scene() -> None:
        await bench.read(await bench.submit("a", effort(2), 31))
        bench.links[0].loop = make_loop()
        while bench.scheduler.loops[0].epoch != bench.links[0].loop.epoch:
            await asyncio.sleep(0)
        assert bench.scheduler.loops[0].generation == 2

    play(bench, scene)


def test_as_many_stop_token_ids_as_are_allowed_run_beside_the_models_own() -> None:
    """The edge's limit fits the worker's; one more is refused by name."""
    bench = Bench(make_loop())

    async def scene() -> None:
        others = [token for token in range(100, 300) if token not in FOLDER.stop_token_ids]
        allowed = await bench.submit("a", effort(2), 31, stop_token_ids=[*others[:61], 50, 51, 52])
        assert (await bench.read(allowed))[0] == expected(1, 31)
        with pytest.raises(InvalidField) as caught:
            await bench.submit("b", effort(2), 31, stop_token_ids=others[:65])
        assert caught.value.field == "stop_token_ids"

    vocabulary = ScriptedRunner()
    vocabulary.vocab_size = 512
    bench = Bench(make_loop(runner=vocabulary))
    play(bench, scene)


@pytest.mark.parametrize(("algorithm", "params"), [("Nonesuch", {}), ("LowConfidence", {"speed": 1.0})])
def test_defaults_that_no_worker_serves_end_the_scheduler(algorithm: str, params: dict[str, float]) -> None:
    """A wrong --dllm-algorithm or a wrong parameter is said at the first worker, not at every request."""
    loop = make_loop()

    async def scene() -> None:
        settings = SchedulerSettings(model_path=Path("models/tiny-llada2"), dllm_algorithm=algorithm)
        scheduler = Scheduler(FOLDER, settings, params, lambda _, name: InMemoryLink(loop, name, 1024))
        with pytest.raises(ExceptionGroup) as caught:
            await scheduler.run()
        assert isinstance(caught.value.exceptions[0], BadDefaults)

    asyncio.run(scene())

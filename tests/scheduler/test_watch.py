"""WatchRounds: every round is told, its own rows to each client, and nobody's watching changes what is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from scheduler_svc.watch import MAX_UNREAD_ROUNDS, MAX_WATCHERS, TooManyWatchers, Watcher, Watches
from tests.scheduler.in_memory import FORWARD_S, Bench, TimedLink, play_timed
from tests.security.services import scheduler_and_worker
from tests.worker.scripted import BLOCK, Clock, effort, make_loop


class LoopClock(Clock):
    """The worker's clock is that of the event loop, which jumps."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


def watched(fdfo: bool, efforts: list[int], num_slots: int = 4) -> tuple[list[api.WatchRoundsResponse], Bench]:
    """The rounds of requests with one block each that needs so many forwards, under a clock that jumps."""
    bench = Bench(make_loop(num_slots=num_slots, clock=LoopClock()), link_type=TimedLink, dllm_fdfo=fdfo)
    rounds: list[api.WatchRoundsResponse] = []

    async def scene() -> None:
        with bench.scheduler.watches.watch("") as watcher:
            streams = [
                await bench.submit(f"r{number}", effort(forwards), BLOCK + 5) for number, forwards in enumerate(efforts)
            ]
            for stream in streams:
                await bench.read(stream)
            watcher.close()
            rounds.extend([round_ async for round_ in watcher.read()])

    play_timed(bench, scene)
    return rounds, bench


@pytest.mark.parametrize("fdfo", [True, False])
def test_the_rounds_told_add_up_to_the_counters(fdfo: bool) -> None:
    """Forwards, row-forwards and waiting of all rounds are the scheduler's totals, and each forward has its time."""
    rounds, bench = watched(fdfo, [3, 8, 2, 5, 4, 9], num_slots=3)
    counters = bench.scheduler.counters
    assert sum(round_.forwards for round_ in rounds) == counters.forwards
    assert sum(round_.denoise_row_forwards for round_ in rounds) == counters.denoise_row_forwards
    assert sum(round_.waiting_row_forwards for round_ in rounds) == counters.waiting_row_forwards
    assert (counters.waiting_row_forwards > 0) != fdfo
    assert sum(row.forwards for round_ in rounds for row in round_.rows) == counters.denoise_row_forwards
    for round_ in rounds:
        assert len(round_.forward_begins_us) == len(round_.forward_ends_us) == round_.forwards
        assert not round_.forwards or round_.sent_at_us <= round_.forward_begins_us[0]
        assert not round_.forwards or round_.forward_ends_us[-1] <= round_.replied_at_us
        gaps = {
            after - before for before, after in zip(round_.forward_ends_us, round_.forward_ends_us[1:], strict=False)
        }
        assert gaps <= {round(FORWARD_S * 1e6)}


def test_a_lockstep_round_tells_who_was_done_when() -> None:
    """Of one round with blocks of 3, 8 and 2 forwards: each row's own forwards, the rest it waited."""
    rounds, _ = watched(False, [3, 8, 2])
    first = next(round_ for round_ in rounds if round_.forwards)
    assert [(row.request_id, row.forwards_before, row.forwards) for row in first.rows] == [
        ("r0", 0, 3),
        ("r1", 0, 8),
        ("r2", 0, 2),
    ]
    assert {(row.block_index, row.accept_length, row.status) for row in first.rows} == {
        (0, BLOCK, api.WATCHED_STATUS_RUNNING)
    }
    assert (first.forwards, first.waiting_row_forwards) == (8, 11)


def test_a_prompt_is_seen_to_be_computed_first() -> None:
    """A row's forwards begin after those that computed its prefix, also within a round."""
    bench = Bench(make_loop(chunk=BLOCK, clock=LoopClock()), link_type=TimedLink)
    seen: list[api.WatchedRow] = []

    async def scene() -> None:
        with bench.scheduler.watches.watch("") as watcher:
            await bench.read(await bench.submit("r", [5] * (3 * BLOCK) + effort(4), 20))
            watcher.close()
            seen.extend([row async for round_ in watcher.read() for row in round_.rows])

    play_timed(bench, scene)
    assert seen[0].forwards_before == 2  # chunks but the last, which shares a forward with the first step
    assert seen[-1].status == api.WATCHED_STATUS_ENDED


def test_without_a_watcher_workers_are_not_asked_for_times() -> None:
    """`want_forward_times` is set while somebody watches only, and replies have none of it otherwise."""
    bench = Bench(make_loop(clock=LoopClock()), link_type=TimedLink)

    async def scene() -> None:
        await bench.read(await bench.submit("before", effort(3), 20))
        with bench.scheduler.watches.watch(""):
            await bench.read(await bench.submit("watched", effort(3), 20))
        await bench.read(await bench.submit("after", effort(3), 20))

    play_timed(bench, scene)
    link = bench.links[0]
    asked = [request.want_forward_times for request in link.requests if request.starts]
    assert asked == [False, True, False]
    assert sum(not request.want_forward_times for request in link.requests) > 2


def test_other_clients_rows_are_only_counted() -> None:
    """Each client sees the ids of its own requests, and how many rows of others there are."""
    bench = Bench(make_loop(clock=LoopClock()), link_type=TimedLink)
    rounds: dict[str, list[api.WatchRoundsResponse]] = {}

    async def scene() -> None:
        with bench.scheduler.watches.watch("anna") as of_anna, bench.scheduler.watches.watch("bert") as of_bert:
            streams = [await bench.submit("a", effort(5), 20, client="anna")]
            streams += [await bench.submit(f"b{number}", effort(5), 20, client="bert") for number in range(2)]
            for stream in streams:
                await bench.read(stream)
            for watcher in (of_anna, of_bert):
                watcher.close()
                rounds[watcher.client] = [round_ async for round_ in watcher.read()]

    play_timed(bench, scene)
    for client, ids in (("anna", {"a"}), ("bert", {"b0", "b1"})):
        assert {row.request_id for round_ in rounds[client] for row in round_.rows} == ids
    assert max(round_.other_rows for round_ in rounds["anna"]) == 2
    assert max(round_.other_rows for round_ in rounds["bert"]) == 1


def test_what_is_not_read_is_bounded_and_counted() -> None:
    """Past the limit rounds are dropped, and whoever then reads what waits learns how many."""

    async def run() -> list[api.WatchRoundsResponse]:
        watcher = Watcher("")
        for number in range(MAX_UNREAD_ROUNDS + 7):
            watcher.put(api.WatchRoundsResponse(round_id=number))
        watcher.close()
        return [round_ async for round_ in watcher.read()]

    rounds = asyncio.run(run())
    assert len(rounds) == MAX_UNREAD_ROUNDS
    assert rounds[-1].missed_rounds == 7


def test_only_so_many_watch_at_a_time() -> None:
    """One more is refused until one has left."""
    watches = Watches()
    calls = [watches.watch("") for _ in range(MAX_WATCHERS + 1)]
    for call in calls[:-1]:
        call.__enter__()
    with pytest.raises(TooManyWatchers, match="8 calls watch"):
        calls[-1].__enter__()
    calls[0].__exit__(None, None, None)
    with watches.watch(""):
        assert watches


def test_watching_over_grpc_needs_a_key_and_ends_with_the_scheduler(tmp_path: Path) -> None:
    """No key, no rounds; with one the stream begins with headers, brings rounds, and ends when the scheduler closes."""
    keys = tmp_path / "keys"
    keys.write_text("anna:anna-0123456789abcdef")
    bearer = (("authorization", "Bearer anna-0123456789abcdef"),)

    async def run() -> None:
        async with (
            scheduler_and_worker(api_keys_file=keys) as running,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="no API key"):
                await stub.WatchRounds(api.WatchRoundsRequest()).read()
            call = stub.WatchRounds(api.WatchRoundsRequest(), metadata=bearer)
            await call.initial_metadata()
            message = api.GenerateRequest(
                request_id="mine", prompt_ids=api.TokenIds(ids=effort(4)), max_new_tokens=20, ignore_eos=True
            )
            async for _ in stub.Generate(message, metadata=bearer):
                pass
            round_ = await call.read()
            assert [row.request_id for row in round_.rows] == ["mine"]
            await running.scheduler.close(0)
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(run())

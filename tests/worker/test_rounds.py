"""Order, repeats, cancellation, generations, leases and drain of rounds."""

from __future__ import annotations

import pytest

from common.errors import InvalidField, Refused, Unavailable
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import BLOCK, Clock, Driver, assert_whole, effort, make_loop, names, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.leases import MAX_SCHEDULERS
from worker_svc.wire import decode_round


def tick(loop: DenoiseLoop, times: int = 20) -> None:
    for _ in range(times):
        loop.tick()


def reasons(results: list[object]) -> list[str]:
    return [result.reason for result in results if isinstance(result, Refused)]


def test_an_early_round_waits_for_its_predecessor() -> None:
    """Round 2 that arrives first runs after round 1."""
    loop = make_loop()
    driver = Driver(loop)
    two = driver.send(round_id=2, acked_round_id=0, continues=names("a"))
    tick(loop)
    assert two == []
    one = driver.send(round_id=1, acked_round_id=0, starts=[start("a", effort(3))])
    tick(loop)
    assert [reply.rows.done_block_indexes[0] for reply in (one[0], two[0])] == [0, 1]  # type: ignore[attr-defined]


def test_a_repeated_finished_round_is_answered_from_memory_until_it_is_acked() -> None:
    """The same reply, no further forward; after the acknowledgement the repeat is a gap."""
    loop = make_loop()
    driver = Driver(loop)
    request = driver.request(starts=[start("a", effort(3))])
    replies: list[object] = []
    loop.submit(request, replies.append)
    tick(loop)
    forwards = loop.totals.forwards
    loop.submit(request, replies.append)
    assert replies[0] == replies[1] and loop.totals.forwards == forwards
    driver.run(continues=names("a"))
    loop.submit(request, replies.append)
    assert reasons(replies) == ["ROUND_GAP"]


def test_a_repeated_running_or_waiting_round_joins_it() -> None:
    """Both calls get the one reply; the rows run once."""
    loop = make_loop()
    driver = Driver(loop)
    one = driver.request(starts=[start("a", effort(4))])
    two = driver.request(acked_round_id=0, continues=names("a"))
    replies: list[pb.RunRoundResponse] = []
    for request in (one, two, two):
        loop.submit(request, replies.append)  # type: ignore[arg-type]
    loop.tick()
    loop.submit(one, replies.append)  # type: ignore[arg-type]
    tick(loop)
    assert sorted(reply.round_id for reply in replies) == [1, 1, 2, 2]
    assert loop.totals.rounds == 2


def test_a_round_too_far_ahead_is_a_gap() -> None:
    """What can never be reached is refused, not kept."""
    assert reasons(Driver(make_loop()).send(round_id=500, acked_round_id=0)) == ["ROUND_GAP"]


def test_cancelling_a_waiting_round_removes_it() -> None:
    """It can be sent again with other rows; nothing of the cancelled one runs."""
    loop = make_loop()
    driver = Driver(loop)
    running = driver.send(starts=[start("a", effort(3))])
    loop.tick()
    request = driver.request(acked_round_id=0, starts=[start("b", effort(3))])
    results: list[object] = []
    loop.submit(request, results.append)
    loop.withdraw(request, results.append)
    tick(loop)
    assert running and results == []
    driver.next_id = 2
    assert list(driver.run(starts=[start("c", effort(3))]).rows.accept_lengths) == [BLOCK]
    assert [key.request_id for key in loop.sessions["s"].rows] == ["a", "c"]


def test_cancelling_a_running_round_ends_it_at_the_next_boundary_and_keeps_the_reply() -> None:
    """The repeat gets the reply with the snapshot; no forward is lost."""
    loop = make_loop()
    driver = Driver(loop)
    request = driver.request(starts=[start("a", effort(9))])
    results: list[object] = []
    loop.submit(request, results.append)
    tick(loop, 3)
    loop.withdraw(request, results.append)
    tick(loop)
    assert results == [] and loop.totals.forwards == 3
    loop.submit(request, results.append)
    reply = results[0]
    assert isinstance(reply, pb.RunRoundResponse)
    assert list(reply.rows.step_counts) == [3]


def test_an_arrival_ends_the_running_round_after_the_current_forward() -> None:
    """A re-loop never hides a waiting round that starts or releases rows; one that only continues waits."""
    loop = make_loop()
    driver = Driver(loop)
    slow = driver.send(starts=[start("slow", effort(9))])
    loop.tick()
    quiet = driver.send(acked_round_id=0, continues=names("slow"))
    tick(loop, 2)
    assert slow == []
    loop.withdraw(driver.request(round_id=2), quiet.append)  # not the same call: nothing happens
    driver = Driver(loop := make_loop())
    slow = driver.send(starts=[start("slow", effort(9))])
    loop.tick()
    driver.send(acked_round_id=0, starts=[start("new", effort(2))], continues=names("slow"))
    loop.tick()
    assert len(slow) == 1 and slow[0].work.forwards == 1  # type: ignore[attr-defined]


def test_max_forwards_and_max_round_ms_end_a_re_loop() -> None:
    """The time counts from the round's first forward."""
    clock = Clock()
    loop = make_loop(clock=clock)
    driver = Driver(loop)
    assert driver.run(starts=[start("a", effort(20))], max_forwards=3).work.forwards == 3
    results = driver.send(continues=names("a"), max_round_ms=50)
    tick(loop, 3)
    assert results == []
    clock.now += 0.051
    loop.tick()
    assert results[0].work.forwards == 3  # type: ignore[attr-defined]


def test_sync_is_not_cut_by_time_or_arrivals() -> None:
    """Only the blocks' own bound, drain and cancellation end a lockstep round early."""
    clock = Clock()
    loop = make_loop(clock=clock)
    driver = Driver(loop)
    results = driver.send(starts=[start("a", effort(9))], mode=pb.MODE_SYNC, max_round_ms=1, max_forwards=1)
    loop.tick()
    clock.now += 5
    driver.send(acked_round_id=0, starts=[start("b", effort(2))], mode=pb.MODE_SYNC)
    tick(loop, 6)
    assert results == []
    tick(loop)
    assert results[0].work.forwards == 9  # type: ignore[attr-defined]


def test_a_round_without_a_live_row_replies_at_once() -> None:
    """No forward runs for it."""
    loop = make_loop()
    reply = Driver(loop).run(continues=names("unknown"))
    assert loop.totals.forwards == 0
    assert list(reply.rows.statuses) == [pb.ROW_STATUS_SLOT_MISSING]


def test_a_higher_generation_ends_the_rounds_and_frees_the_slots_of_older_ones() -> None:
    """Late calls of the old generation are refused; round ids begin again at 1."""
    loop = make_loop()
    old = Driver(loop)
    running = old.send(starts=[start("a", effort(9))])
    loop.tick()
    new = Driver(loop, generation=2)
    reply = new.run(starts=[start("a", effort(2), attempt=2)])
    assert reply.round_id == 1
    assert reasons(running) == ["STALE_GENERATION"]
    assert reasons(old.send(continues=names("a"))) == ["STALE_GENERATION"]
    assert loop.totals.refused_generations == 1
    assert_whole(loop, held=1)


def test_another_epoch_or_fingerprint_is_refused_without_side_effects() -> None:
    """Such a call does not even renew the lease."""
    loop = make_loop()
    assert reasons(Driver(loop).send(worker_epoch="before")) == ["EPOCH_CHANGED"]
    assert reasons(Driver(loop).send(fingerprint="other")) == ["OTHER_MODEL"]
    assert loop.sessions == {}


def test_a_lease_frees_the_rows_of_a_silent_scheduler() -> None:
    """After 30 s without a call all its slots are free; its generation is over; any call renews the lease."""
    clock = Clock()
    loop = make_loop(clock=clock)
    driver, other = Driver(loop), Driver(loop, "other")
    driver.run(starts=[start("a", effort(2))])
    other.run(starts=[start("a", effort(2))])
    clock.now += 29
    other.loop.leases.touch("other", 1)
    clock.now += 2
    loop.tick()
    assert_whole(loop, held=1)
    assert loop.totals.expired_leases == 1
    assert reasons(driver.send(continues=names("a"))) == ["STALE_GENERATION"]
    assert Driver(loop, generation=2).run(starts=[start("a", effort(2), attempt=2)]).round_id == 1


def test_a_running_round_keeps_its_lease() -> None:
    """A round that takes longer than the lease is a call in progress."""
    clock = Clock()
    loop = make_loop(clock=clock)
    results = Driver(loop).send(starts=[start("a", effort(9))], mode=pb.MODE_SYNC)
    for _ in range(12):
        loop.tick()
        clock.now += 20
    assert isinstance(results[0], pb.RunRoundResponse)


def test_drain_answers_running_rounds_and_refuses_waiting_and_new_ones() -> None:
    """The running round replies at the next boundary with the snapshot; its repeat is still answered."""
    loop = make_loop()
    driver = Driver(loop)
    request = driver.request(starts=[start("a", effort(9))])
    running: list[object] = []
    loop.submit(request, running.append)
    loop.tick()
    waiting = driver.send(acked_round_id=0, continues=names("a"))
    loop.drain()
    tick(loop)
    reply = running[0]
    assert isinstance(reply, pb.RunRoundResponse)
    assert reply.draining and list(reply.rows.step_counts) == [1]
    assert reasons(waiting) == ["DRAINING"]
    assert reasons(driver.send(round_id=2, acked_round_id=1)) == ["DRAINING"]


def test_shares_are_even_for_a_second_after_a_refusal_and_all_that_is_free_otherwise() -> None:
    """The allowance of rows and pages follows the contract."""
    clock = Clock()
    loop = make_loop(num_slots=4, num_pages=8, clock=clock)
    one = Driver(loop, "one")
    reply = one.run(starts=[start("a", effort(2)), start("b", effort(9))])
    assert (reply.allowance.rows, reply.allowance.pages) == (4, 8)
    two = Driver(loop, "two")
    two.run(starts=[start("big", [5] * 7 * BLOCK)])
    assert (loop.allowance(loop.sessions["one"]).rows, loop.allowance(loop.sessions["one"]).pages) == (2, 4)
    clock.now += 1.1
    assert (loop.allowance(loop.sessions["two"]).rows, loop.allowance(loop.sessions["two"]).pages) == (2, 6)


def test_schedulers_beyond_the_limit_are_refused_until_a_lease_runs_out() -> None:
    """Ids drawn without end do not fill the worker's memory; those that are known go on."""
    clock = Clock()
    loop = make_loop(clock=clock)
    for number in range(MAX_SCHEDULERS):
        loop.leases.touch(f"s{number}", 1)
    refused = Driver(loop, "one too many").send(starts=[start("a", effort(2))])
    assert isinstance(refused[0], Unavailable) and len(loop.sessions) == MAX_SCHEDULERS
    assert Driver(loop, "s7").run(starts=[start("a", effort(2))])
    clock.now += 31
    loop.tick()
    assert Driver(loop, "one too many").run(starts=[start("a", effort(2))])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("scheduler_id", {"scheduler_id": ""}),
        ("mode", {"mode": 0}),
        ("round_id", {"round_id": 0}),
        ("acked_round_id", {"acked_round_id": 7}),
        ("releases", {"releases": pb.RowNames(request_ids=["a"])}),
        ("continues", {"continues": pb.RowNames(request_ids=["a", "a"], sample_indexes=[0, 0], attempts=[1, 2])}),
        ("releases", {"releases": pb.RowNames(request_ids=["a" * 257], sample_indexes=[0], attempts=[1])}),
        (
            "releases",
            {"releases": pb.RowNames(request_ids=["a"] * 4097, sample_indexes=[0] * 4097, attempts=[1] * 4097)},
        ),
        ("scheduler_id", {"scheduler_id": "s" * 257}),
        ("starts[0].request_id", {"starts": [pb.StartRow()]}),
        ("starts", {"starts": [pb.StartRow()] * 4097}),
        ("starts", {"starts": [pb.StartRow(request_id="x"), pb.StartRow(request_id="x", attempt=2)]}),
    ],
)
def test_a_malformed_round_is_refused_by_field(field: str, change: dict[str, object]) -> None:
    """Nothing of it reaches the loop."""
    values: dict[str, object] = {"scheduler_id": "s", "mode": pb.MODE_FDFO, "round_id": 1, **change}
    with pytest.raises(InvalidField) as caught:
        decode_round(pb.RunRoundRequest(**values), make_loop().start_rules)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_rows_of_a_silent_scheduler_make_way_for_those_of_another() -> None:
    """Not within 5 s of its last call, nor while one of its calls is served; who is back finds its rows missing. The
    allowance counts what a silent one holds as free."""
    clock = Clock()
    loop = make_loop(num_slots=2, num_pages=8, clock=clock)
    gone, other = Driver(loop, "gone"), Driver(loop, "other")
    gone.run(starts=[start("a", effort(3)), start("b", effort(9))])
    clock.now += 4.9
    refused = other.run(starts=[start("c", effort(3))])
    assert list(refused.rows.statuses) == [pb.ROW_STATUS_NO_KV_SPACE]
    assert (refused.allowance.rows, refused.allowance.pages) == (1, 4)
    clock.now += 1.1
    assert other.run().allowance == pb.Allowance(rows=2, pages=8)
    taken = other.run(starts=[start("c", effort(3), attempt=2)])
    assert list(taken.rows.statuses) == [pb.ROW_STATUS_RUNNING]
    assert not loop.leases.sessions["gone"].rows
    back = gone.run(continues=names("a", "b"))
    assert list(back.rows.statuses) == [pb.ROW_STATUS_SLOT_MISSING] * 2
    served = gone.send(starts=[start("a", effort(30), attempt=2)])
    loop.tick()
    clock.now += 20
    assert not served
    assert list(other.run(starts=[start("d", effort(3))]).rows.statuses) == [pb.ROW_STATUS_NO_KV_SPACE]
    assert "a" in {row.name.key.request_id for row in loop.leases.sessions["gone"].rows.values()}
    assert_whole(loop)


def test_a_row_that_needs_a_page_takes_it_from_a_silent_scheduler() -> None:
    """A rollover finds its page where nobody asks for it any more."""
    clock = Clock()
    loop = make_loop(num_slots=2, num_pages=2, clock=clock)
    gone, other = Driver(loop, "gone"), Driver(loop, "other")
    gone.run(starts=[start("a", effort(3))])
    other.run(starts=[start("b", effort(3))])
    assert list(other.run(continues=names("b")).rows.statuses) == [pb.ROW_STATUS_NO_KV_SPACE]
    clock.now += 6
    assert list(other.run(continues=names("b")).rows.statuses) == [pb.ROW_STATUS_RUNNING]
    assert_whole(loop, held=2)

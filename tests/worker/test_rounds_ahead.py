"""On an asynchronous device a round gives way to the next one while the forward of both computes."""

from __future__ import annotations

import random

import pytest
import torch

from common.packing import unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import BLOCK, STOP, Driver, ScriptedRunner, assert_whole, effort, make_loop, names, start
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput
from worker_svc.rounds import Round, Session
from worker_svc.rows import Row


class AsynchronousRunner(ScriptedRunner):
    """Says that the host can work while it computes."""

    is_asynchronous = True

    def __init__(self, log: list[str], writes: dict[int, int] | None = None) -> None:
        super().__init__(writes)
        self.log = log

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        self.log.append("forward")
        return super().forward(inputs, kv)


def logged_driver(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose loop notes when it replies."""
    loop = make_loop(runner=AsynchronousRunner(log), fused_commit=True)
    reply = loop._reply

    def logged(session: Session, round_: Round, commits: tuple[Row, ...] = ()) -> None:
        log.append(f"reply {round_.request.round_id}")
        reply(session, round_, commits)

    monkeypatch.setattr(loop, "_reply", logged)
    return Driver(loop)


def test_the_forward_comes_before_the_reply_where_all_rows_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 0 of `a` is done after 3 forwards; the 4th is launched first, and belongs to the round that waited."""
    log: list[str] = []
    driver = logged_driver(log, monkeypatch)
    one = driver.send(starts=[start("a", effort(3)), start("b", effort(9))], acked_round_id=0)
    two = driver.send(continues=names("a", "b"), acked_round_id=0)
    while not one:
        driver.loop.tick()
    assert log == ["forward", "forward", "forward", "forward", "reply 1"]
    (first,) = one
    assert isinstance(first, pb.RunRoundResponse) and first.work.forwards == 3
    assert list(first.rows.accept_lengths) == [BLOCK, 0] and list(first.rows.forwards) == [3, 3]
    driver.send(releases=names("b"), acked_round_id=0)
    driver.loop.tick()
    (second,) = two
    assert isinstance(second, pb.RunRoundResponse) and second.work.forwards >= 1


@pytest.mark.parametrize("what", ["start", "release", "other rows", "no round"])
def test_the_reply_comes_first_where_rows_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that starts, releases or leaves out a row decides what the next forward computes."""
    log: list[str] = []
    driver = logged_driver(log, monkeypatch)
    one = driver.send(starts=[start("a", effort(3)), start("b", effort(9))], acked_round_id=0)
    driver.loop.tick()
    driver.loop.tick()
    if what != "no round":
        rounds: dict[str, dict[str, object]] = {
            "start": {"starts": [start("c", effort(3))], "continues": names("a", "b")},
            "release": {"releases": names("b"), "continues": names("a")},
            "other rows": {"continues": names("a")},
        }
        driver.send(acked_round_id=0, **rounds[what])
    for _ in range(3):
        driver.loop.tick()
    assert one
    first_forwards = 2 if what in ("start", "release") else 3
    assert log[: first_forwards + 1] == ["forward"] * first_forwards + ["reply 1"]


@pytest.mark.parametrize("seed", range(5))
def test_replies_tell_the_same_blocks_in_the_same_order(seed: int) -> None:
    """Rows with other efforts, stop tokens and limits, two rounds ahead: every block of every row, and every end, as
    on a device that the host waits for."""
    results = []
    for runner in (ScriptedRunner({5 * BLOCK + 4: STOP}), AsynchronousRunner([], {5 * BLOCK + 4: STOP})):
        rng = random.Random(seed)
        driver = Driver(make_loop(runner=runner, fused_commit=True, num_pages=256))
        rows = [
            start(
                f"r{n}",
                effort(rng.randint(2, 9)),
                tokens_left=rng.randint(1, 8 * BLOCK),
                stop_token_ids=[STOP],
                algorithm_params={"threshold": rng.choice([0.0, 0.95])},  # 0 fills a block in its first step
            )
            for n in range(4)
        ]
        told: dict[str, list[object]] = {row.request_id: [] for row in rows}
        waiting = [(list(told), driver.send(starts=rows, acked_round_id=0))]
        running = list(told)
        for _ in range(400):
            while running and len(waiting) < 3:
                acked = driver.next_id - 1 - len(waiting)
                waiting.append((list(running), driver.send(continues=names(*running), acked_round_id=acked)))
            if not waiting:
                break
            driver.loop.tick()
            while waiting and waiting[0][1]:
                asked, (reply,) = waiting.pop(0)
                assert isinstance(reply, pb.RunRoundResponse)
                done = iter(unpack_ids(reply.rows.done_ids))
                indexes = iter(reply.rows.done_block_indexes)
                for place, name in enumerate(asked):
                    if reply.rows.accept_lengths[place]:
                        told[name].append((next(indexes), [next(done) for _ in range(BLOCK)]))
                    if reply.rows.statuses[place] == pb.ROW_STATUS_ENDED and name in running:
                        running.remove(name)
                        told[name].append((reply.rows.end_reasons[place], reply.rows.end_positions[place]))
        assert not running
        assert_whole(driver.loop, held=0)
        results.append((told, driver.loop.totals.forwards, driver.loop.totals.blocks_done))
    assert results[0] == results[1]

"""Workers that join and leave while requests run."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from scheduler_svc import discovery
from scheduler_svc.settings import split_target
from tests.scheduler.in_memory import Bench, InMemoryLink, TimedLink, expected, play_timed
from tests.worker.scripted import effort, make_loop

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("a:1", ("a", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("a.b-c.d:2", ("a.b-c.d", 2)),
    ],
)
def test_a_target_is_host_and_port(target: str, parts: tuple[str, int]) -> None:
    """Names and addresses of both kinds are split."""
    assert split_target(target) == parts


@pytest.mark.parametrize("target", ["", "a", ":1", "a:", "a:0", "a:65536", "a:x", "::1:7", "a:1:2", "x://a:1", "a:-1"])
def test_what_is_no_target_is_refused(target: str) -> None:
    """Ports out of range, missing parts, other schemes and IPv6 without brackets."""
    with pytest.raises(ValueError, match="not host:port"):
        split_target(target)


def test_the_system_resolver_gives_every_address_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 as it is, IPv6 in brackets, and no duplicates."""

    async def run() -> set[str]:
        async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
            assert (host, port) == ("workers", 9)
            six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 9, 0, 0))
            four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 9))
            return [four, six, four]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await discovery.resolve("workers", 9)

    assert asyncio.run(run()) == {"10.0.0.1:9", "[fd00::1]:9"}


def bench_of(num_loops: int) -> Bench:
    loops = [make_loop(num_slots=2) for _ in range(num_loops)]
    return Bench(*loops, link_type=TimedLink, workers="dns:///workers:50052", resolve_interval_s=1.0)


def drive(bench: Bench, tasks: list[asyncio.Task[None]]) -> None:
    """Start the devices of links that were made since."""
    tasks += [asyncio.create_task(link.drive()) for link in bench.links[len(tasks) :]]


def targets(bench: Bench) -> list[str]:
    return [loop.link.target for loop in bench.scheduler.loops]


def leaving(bench: Bench) -> list[str]:
    return [loop.link.target for loop in bench.scheduler.loops if loop.is_leaving]


def test_workers_join_and_leave_and_no_request_notices() -> None:
    """Each address of the name gets a loop; one that is gone from it ends with its last row; one that comes back before
    that stays; all requests end with their tokens."""
    bench = bench_of(3)
    closed: list[str] = []

    async def scene() -> None:
        tasks: list[asyncio.Task[None]] = []
        await asyncio.sleep(2)  # the name does not resolve yet
        assert targets(bench) == []
        bench.names["workers"] = {ADDRESSES[0], ADDRESSES[1]}
        await asyncio.sleep(1.5)
        drive(bench, tasks)
        assert targets(bench) == ADDRESSES[:2]
        await asyncio.sleep(0.5)
        streams = [await bench.submit(f"r{n}", effort(20), 900) for n in range(6)]
        await asyncio.sleep(0.1)
        assert [len(loop.running) for loop in bench.scheduler.loops] == [2, 2]

        bench.names["workers"] = {ADDRESSES[1], ADDRESSES[2]}
        await asyncio.sleep(1.5)
        drive(bench, tasks)
        await asyncio.sleep(0.5)
        first, _, third = bench.scheduler.loops
        assert leaving(bench) == [ADDRESSES[0]] and len(first.running) == 2, "its rows go on there"
        assert len(third.running) == 2, "the ones that waited run on the new one"

        bench.names["workers"] = set(ADDRESSES)
        await asyncio.sleep(1.1)
        assert leaving(bench) == [] and first in bench.scheduler.loops

        del bench.names["workers"]
        await asyncio.sleep(1.1)
        assert targets(bench) == [*ADDRESSES], "a resolver that is down takes nobody away"

        bench.names["workers"] = {ADDRESSES[1]}
        for stream in streams:
            assert (await bench.read(stream))[0] == expected(1, 900)
        await asyncio.sleep(2.1)
        assert targets(bench) == [ADDRESSES[1]]
        assert (await bench.read(await bench.submit("last", effort(3), 31)))[0] == expected(1, 31)
        for task in tasks:
            task.cancel()

    async def close(self: InMemoryLink) -> None:
        closed.append(self.target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InMemoryLink, "close", close)
        play_timed(bench, scene)
    assert bench.scheduler.counters.restarts == 0
    assert set(closed) >= {ADDRESSES[0], ADDRESSES[2]}
    assert all(link.loop.state.slots_used == 0 for link in bench.links)


def test_an_address_that_is_gone_with_its_worker_is_left_at_once() -> None:
    """Its requests go on at the others; when the address comes back it is met under a higher generation."""
    bench = bench_of(2)
    bench.names["workers"] = set(ADDRESSES[:2])

    async def scene() -> None:
        tasks: list[asyncio.Task[None]] = []
        await asyncio.sleep(0.1)
        drive(bench, tasks)
        streams = [await bench.submit(f"r{n}", effort(20), 600) for n in range(4)]
        await asyncio.sleep(0.5)
        bench.links[0].is_dead = True
        bench.names["workers"] = {ADDRESSES[1]}
        await asyncio.sleep(2.5)
        assert targets(bench) == [ADDRESSES[1]]
        for stream in streams:
            assert (await bench.read(stream))[0] == expected(1, 600)
        bench.links[0].is_dead = False
        bench.names["workers"] = set(ADDRESSES[:2])
        await asyncio.sleep(1.5)
        drive(bench, tasks)
        await asyncio.sleep(0.5)
        assert {loop.is_ready for loop in bench.scheduler.loops} == {True}
        assert [loop.generation for loop in bench.scheduler.loops] == [2, 3]
        assert bench.links[2].loop.totals.refused_generations == 0
        for task in tasks:
            task.cancel()

    play_timed(bench, scene)


def test_one_worker_behind_two_addresses_is_used_once() -> None:
    """Two generations of one scheduler would end each other for ever."""
    bench = bench_of(2)
    bench.names["workers"] = set(ADDRESSES[:2])

    async def scene() -> None:
        await asyncio.sleep(0.0)
        while len(bench.links) < 2:
            await asyncio.sleep(0)
        bench.links[1].loop = bench.links[0].loop
        tasks: list[asyncio.Task[None]] = []
        drive(bench, tasks)
        await asyncio.sleep(3)
        assert sorted(loop.is_ready for loop in bench.scheduler.loops) == [False, True]
        assert any(loop.link.last_error.startswith("the same worker as") for loop in bench.scheduler.loops)
        assert max(loop.generation for loop in bench.scheduler.loops) == 1
        assert (await bench.read(await bench.submit("a", effort(3), 31)))[0] == expected(1, 31)
        for task in tasks:
            task.cancel()

    play_timed(bench, scene)

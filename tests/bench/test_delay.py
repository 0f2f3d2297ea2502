"""The delay proxy: when bytes are passed on, and what becomes of a connection's ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bench.delay import SPIN_S, DelayLine, run_proxy, start_delay

LIMIT_S = 10.0


class Time:
    """A clock that only sleeps and the test move; a sleep of 0 takes a microsecond, and all end late by `late_s`."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 50.0
        self.late_s = late_s
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += max(seconds + self.late_s, 1e-6)


def put_at(line: DelayLine, time_: Time, chunks: list[tuple[float, bytes]]) -> None:
    """Put chunks in at these milliseconds, and turn the clock back to the start: the reader ran ahead."""
    for at_ms, chunk in chunks:
        time_.now = 50.0 + at_ms / 1000
        line.put(chunk)
    time_.now = 50.0


def take(line: DelayLine, time_: Time, count: int) -> list[tuple[float, bytes]]:
    """The next chunks and the milliseconds at which they come out."""
    return [(round((time_.now - 50.0) * 1000, 2), chunk) for chunk in (line.get() for _ in range(count))]


@pytest.mark.parametrize("late_s", [0.0, SPIN_S / 2])
def test_each_chunk_comes_out_in_order_one_delay_after_it_came_in(late_s: float) -> None:
    """Chunks a millisecond apart are not held up by the delay of the one before, nor by sleeps that end a bit late."""
    time_ = Time(late_s)
    line = DelayLine(0.005, time_.clock, time_.sleep)
    put_at(line, time_, [(0, b"a"), (1, b"b"), (1, b"c"), (7, b"d"), (7.5, b"")])
    assert take(line, time_, 5) == [(5, b"a"), (6, b"b"), (6, b"c"), (12, b"d"), (12.5, b"")]


def test_a_chunk_whose_time_is_over_comes_out_at_once() -> None:
    """After a sink that was slow to take the chunk before, and without a delay, nothing sleeps."""
    time_ = Time()
    line = DelayLine(0.005, time_.clock, time_.sleep)
    put_at(line, time_, [(0, b"a"), (1, b"b")])
    time_.now = 50.1
    assert take(line, time_, 2) == [(100, b"a"), (100, b"b")]
    at_once = DelayLine(0.0, time_.clock, time_.sleep)
    at_once.put(b"c")
    assert at_once.get() == b"c"
    assert not time_.slept


def test_waiting_is_one_sleep_and_a_short_spin() -> None:
    """The processor is free for all of a wait but its last 50 us."""
    time_ = Time()
    line = DelayLine(0.005, time_.clock, time_.sleep)
    line.put(b"a")
    line.get()
    assert time_.slept[0] == pytest.approx(0.005 - SPIN_S)
    assert sum(time_.slept[1:]) == pytest.approx(0, abs=1e-9)
    assert len(time_.slept) <= SPIN_S * 1e6 + 3


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Sends back what comes in, then `bye` once the client has ended its side; takes one connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while chunk := connection.recv(1 << 16):
                connection.sendall(chunk)
            connection.sendall(b"bye")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def connect(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes and (chunk := connection.recv(num_bytes - len(received))):
        received += chunk
    return received


def test_an_echo_through_the_process_takes_two_delays() -> None:
    """5 ms each way: 10 ms at least for a round trip; a megabyte arrives whole; a half-close reaches the other side."""
    with echo_server() as to, start_delay(to, delay_ms=5) as target, connect(target) as client:
        for _ in range(3):
            sent_at = time.perf_counter()
            client.sendall(b"hello")
            assert receive(client, 5) == b"hello"
            assert time.perf_counter() - sent_at >= 0.010
        data = bytes(range(256)) * (1 << 12)
        sender = threading.Thread(target=client.sendall, args=(data,), daemon=True)
        sender.start()
        assert receive(client, len(data)) == data
        sender.join(LIMIT_S)
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 10) == b"bye"
        assert client.recv(1) == b""


def test_a_target_that_is_not_there_closes_the_connection() -> None:
    """The client sees its end, and the proxy goes on for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = unused.getsockname()[:2]
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=run_proxy, args=(listener, nobody, 0.0), daemon=True).start()
    for _ in range(2):
        with socket.create_connection(listener.getsockname()[:2], timeout=LIMIT_S) as client:
            assert client.recv(1) == b""

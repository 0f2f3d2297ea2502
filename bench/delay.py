"""A TCP proxy that adds a one-way delay: a longer network for processes of one machine.

    python -m bench.delay --listen 127.0.0.1:0 --to 127.0.0.1:50052 --delay-ms 0.5

    client ── reader ─► DelayLine ─► writer ──► server        and the same the other way, each with its two threads

What arrives at t is passed on at t + delay, in order. Opening a connection is not delayed, and there is no limit to
what may be under way: this is the time of a network, not its bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_CHUNK_BYTES = 1 << 18
EXIT_S = 5.0
SPIN_S = 50e-6  # of every wait: a sleep ends about so late; sleeps of 0 let other threads run
PR_SET_TIMERSLACK = 29

Address = tuple[str, int]


class DelayLine:
    """Chunks of bytes in order, each to be had `delay_s` after it was put in. `b""` stands for the end."""

    def __init__(
        self,
        delay_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._delay_s = delay_s
        self._clock = clock
        self._sleep = sleep
        self._chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def put(self, chunk: bytes) -> None:
        self._chunks.put((self._clock() + self._delay_s, chunk))

    def get(self) -> bytes:
        """The next chunk, once it is due. Does not return before one was put in."""
        due_at, chunk = self._chunks.get()
        while (left_s := due_at - self._clock()) > 0:
            self._sleep(max(left_s - SPIN_S, 0.0))
        return chunk


def run_proxy(listener: socket.socket, to: Address, delay_s: float) -> None:
    """Pass on every connection that `listener` gets. Does not return."""
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_connect, args=(client, to, delay_s), daemon=True).start()


def _connect(client: socket.socket, to: Address, delay_s: float) -> None:
    """One connection from its opening to its end."""
    with client, contextlib.suppress(OSError), socket.create_connection(to) as server:
        threads = []
        for source, sink in ((client, server), (server, client)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = DelayLine(delay_s)
            threads.append(threading.Thread(target=_read, args=(source, line), daemon=True))
            threads.append(threading.Thread(target=_write, args=(line, sink, source), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _read(source: socket.socket, line: DelayLine) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(MAX_CHUNK_BYTES):
            line.put(chunk)
    line.put(b"")


def _write(line: DelayLine, sink: socket.socket, source: socket.socket) -> None:
    """Until the source has ended, which half-closes the sink; a sink that takes no more ends the source."""
    try:
        while chunk := line.get():
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def start_delay(to: str, delay_ms: float) -> Iterator[str]:
    """The proxy as a child process that ends with this one; gives the target to use instead of `to` (HOST:PORT)."""
    words = ["--listen", "127.0.0.1:0", "--to", to, "--delay-ms", str(delay_ms), "--exit-with-parent"]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.delay", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the delay proxy ended before it was ready")
            yield json.loads(line)["target"]
            process.stdin.close()
            process.wait(EXIT_S)
        finally:
            process.kill()


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _delay_ms(text: str) -> float:
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = math.nan
    if not 0 <= delay_ms <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 60000 milliseconds")
    return delay_ms


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.delay", description="A TCP proxy with a one-way delay.")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT", help="port 0: any")
    parser.add_argument("--to", type=_address, required=True, metavar="HOST:PORT", help="the service behind the delay")
    parser.add_argument("--delay-ms", type=_delay_ms, required=True, metavar="MS", help="milliseconds, each way")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    arguments = parser.parse_args(argv)
    if sys.platform == "linux":
        # Threads inherit it. The default lets every sleep end 50 us late, so that the kernel can wake several at once.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with socket.create_server(arguments.listen) as listener:
        host, port = listener.getsockname()[:2]
        proxy = threading.Thread(
            target=run_proxy, args=(listener, arguments.to, arguments.delay_ms / 1000), daemon=True
        )
        proxy.start()
        print(json.dumps({"event": "ready", "target": f"{host}:{port}"}), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            if not arguments.exit_with_parent:
                proxy.join()
            while os.read(sys.stdin.fileno(), 1 << 10):
                pass


if __name__ == "__main__":
    main()

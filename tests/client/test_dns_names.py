"""Schedulers behind a name: gRPC's own resolver asks a DNS server of the test, with addresses of this machine."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fdfo_client import Client
from fdfo_client._channel import CHANNEL_OPTIONS
from fdfo_client.testing import FakeScheduler, serving, stall

TYPE_A = 1


@contextlib.contextmanager
def dns_of(addresses: list[str]) -> Iterator[str]:
    """Answer for every name with these addresses, as they are then; gives the server's address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        own = server.getsockname()

        def answer() -> None:
            while len(query := (received := server.recvfrom(512))[0]) > 1:
                end_of_name = query.index(0, 12) + 1
                (kind,) = struct.unpack_from(">H", query, end_of_name)
                found = addresses if kind == TYPE_A else []
                header = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
                # Each record names the question's name by its place, and lives for a second.
                records = [struct.pack(">HHHIH4s", 0xC00C, TYPE_A, 1, 1, 4, socket.inet_aton(each)) for each in found]
                server.sendto(header + query[12 : end_of_name + 4] + b"".join(records), received[1])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{own[1]}"
        finally:
            server.sendto(b"\0", own)
            thread.join()


@pytest.fixture(autouse=True)
def _resolve_again_soon() -> Iterator[None]:
    name = "grpc.dns_min_time_between_resolutions_ms"
    place = CHANNEL_OPTIONS.index((name, 1_000))
    CHANNEL_OPTIONS[place] = (name, 20)
    yield
    CHANNEL_OPTIONS[place] = (name, 1_000)


def ask_until(client: Client, *fakes: FakeScheduler) -> None:
    """Send requests until each of these had one."""
    for _ in range(2000):
        client.generate("x")
        if all(fake.requests for fake in fakes):
            return
    pytest.fail(f"of 2000 requests the schedulers had {[len(fake.requests) for fake in fakes]}")


def test_a_name_of_the_system() -> None:
    """Without a DNS server in it, a name is resolved as the machine resolves names."""
    with serving(FakeScheduler()) as target, Client(f"dns:///localhost:{target.rpartition(':')[2]}") as client:
        assert client.generate("x").text == "Hello world"


def test_all_addresses_of_a_name_get_requests() -> None:
    """Requests go to each address in turn."""
    fakes = FakeScheduler(), FakeScheduler()
    with contextlib.ExitStack() as stack:
        port = int(stack.enter_context(serving(fakes[0])).rpartition(":")[2])
        stack.enter_context(serving(fakes[1], port, host="127.0.0.2"))
        dns = stack.enter_context(dns_of(["127.0.0.1", "127.0.0.2"]))
        client = stack.enter_context(Client(f"dns://{dns}/schedulers.test:{port}"))
        ask_until(client, *fakes)
        before = [len(fake.requests) for fake in fakes]
        for _ in range(10):
            client.generate("x")
        assert [len(fake.requests) - count for fake, count in zip(fakes, before, strict=True)] == [5, 5]


def test_a_stream_goes_on_at_another_address_and_new_ones_are_found() -> None:
    """When a scheduler dies its stream goes on behind the same name, and one that came into the name gets requests."""
    addresses = ["127.0.0.1", "127.0.0.2"]
    first, second, third = fakes = [FakeScheduler(["a", "b"], faults=[stall(1)]) for _ in range(3)]
    third.faults.clear()
    second.held = first.held
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        running = [stack.enter_context(contextlib.ExitStack()) for _ in fakes]
        port = int(running[0].enter_context(serving(first)).rpartition(":")[2])
        running[1].enter_context(serving(second, port, host="127.0.0.2"))
        running[2].enter_context(serving(third, port, host="127.0.0.3"))
        dns = stack.enter_context(dns_of(addresses))
        client = stack.enter_context(Client(f"dns://{dns}/schedulers.test:{port}"))
        answer = pool.submit(client.generate, "x")
        first.held.get(timeout=10)
        lost = 0 if first.requests else 1
        fakes[1 - lost].faults.clear()
        addresses[lost] = "127.0.0.3"
        running[lost].close()
        completion = answer.result(timeout=10)
        assert (completion.text, completion.resumes) == ("ab", 1)
        ask_until(client, fakes[1 - lost], third)

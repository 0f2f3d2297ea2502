"""Reported faults of host time: work that grows with all rows or all tokens where only a few of them changed.

Nothing here measures time: torch calls, copies to the host and hashed bytes are counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode

import scheduler_svc.request
import worker_svc.kv.prefix_cache
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.request import Request
from tests.scheduler.in_memory import Bench, expected, play
from tests.worker.scripted import BLOCK, Driver, ScriptedRunner, effort, make_loop, names, start
from worker_svc.kv.prefix_cache import KEY_BYTES, PrefixCache
from worker_svc.kv.slots import ID_BYTES
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput
from worker_svc.rows import SlotColumns, Start

COPIES_TO_HOST = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
CHANGED = 6  # a tenth of 60 rows


class TorchCalls(TorchFunctionMode):
    """Counts the calls of torch functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_paused = False

    def __torch_function__(
        self, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[function.__name__] += not self.is_paused
        return function(*args, **kwargs or {})

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def copies_to_host(self) -> int:
        return sum(self.counts[name] for name in COPIES_TO_HOST)


class UncountedRunner(ScriptedRunner):
    """What the model itself calls is not the loop's."""

    calls = TorchCalls()

    def forward(self, inputs: ForwardInput, kv: KVStore) -> Tensor:
        self.calls.is_paused = True
        logits = super().forward(inputs, kv)
        self.calls.is_paused = False
        return logits


def calls_of_forwards(num_rows: int) -> dict[str, tuple[int, int]]:
    """Torch calls and copies to the host of a forward without changes, with a rollover of CHANGED rows, and with as
    many replaced; the done rows' reply beside the latter two. What is rebuilt is counted besides."""
    runner = UncountedRunner()
    loop = make_loop(num_slots=num_rows, num_pages=8 * num_rows, runner=runner)
    driver = Driver(loop)
    slow = [f"slow{n}" for n in range(num_rows - CHANGED)]
    fast = [f"fast{n}" for n in range(CHANGED)]
    driver.run(
        starts=[start(name, effort(20)) for name in slow] + [start(name, effort(4)) for name in fast], max_forwards=1
    )

    def tick() -> tuple[int, int]:
        runner.calls = TorchCalls()
        with runner.calls:
            loop.tick()
        return runner.calls.total, runner.calls.copies_to_host

    def until_done(results: list[object]) -> None:
        while not results:
            loop.tick()
        (reply,) = results
        assert isinstance(reply, pb.RunRoundResponse)
        assert sum(map(bool, reply.rows.accept_lengths)) == CHANGED

    figures: dict[str, tuple[int, int]] = {}
    results = driver.send(continues=names(*slow, *fast))
    loop.tick()
    figures["unchanged"] = tick()
    until_done(results)
    results = driver.send(continues=names(*slow, *fast))
    figures["rollover"] = tick()
    until_done(results)
    results = driver.send(
        releases=names(*fast), starts=[start(f"new{name}", effort(4)) for name in fast], continues=names(*slow)
    )
    figures["replaced"] = tick()
    until_done(results)
    return figures


def test_torch_calls_follow_the_changed_rows_not_all_rows() -> None:
    """With 12 rows and with 60, six of which change: the same number of torch calls, so no loop is over rows;
    a forward without changes copies to the host once."""
    few, many = calls_of_forwards(2 * CHANGED), calls_of_forwards(10 * CHANGED)
    assert few == many
    assert few["unchanged"][1] == 1


def test_only_changed_rows_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollover begins the next block of the done rows and gathers no parameters again; a start writes its own row."""
    begun: list[int] = []
    gathered: list[int] = []
    written: list[int] = []
    next_blocks, sampling, write = SlotColumns.next_blocks, SlotColumns.sampling, SlotColumns.write

    def spy_next_blocks(self: SlotColumns, name: str, slots: Tensor, mask_token_id: int) -> None:
        begun.append(len(slots))
        next_blocks(self, name, slots, mask_token_id)

    def spy_sampling(self: SlotColumns, slots: Tensor, any_sampling: bool) -> Any:
        gathered.append(len(slots))
        return sampling(self, slots, any_sampling)

    def spy_write(self: SlotColumns, slots: Sequence[int], starts: Sequence[Start]) -> None:
        written.append(len(starts))
        write(self, slots, starts)

    monkeypatch.setattr(SlotColumns, "write", spy_write)
    monkeypatch.setattr(SlotColumns, "next_blocks", spy_next_blocks)
    monkeypatch.setattr(SlotColumns, "sampling", spy_sampling)
    loop = make_loop(num_slots=20)
    driver = Driver(loop)
    ids = [f"r{n}" for n in range(20)]
    driver.run(starts=[start(name, effort(3 if n < 2 else 30)) for n, name in enumerate(ids)])
    assert (begun, gathered, written) == ([], [20], [20])
    driver.run(continues=names(*ids), max_forwards=1)
    assert (begun, gathered, written) == ([2], [20], [20])
    driver.run(releases=names(*ids[:2]), starts=[start("a", effort(3)), start("b", effort(3))], max_forwards=1)
    assert (begun, written) == ([2], [20, 2])


def test_a_request_is_written_out_once_and_snapshots_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows go on in place the scheduler neither builds their start again nor unpacks their open blocks."""
    built: Counter[str] = Counter()
    start_row = Request.start_row

    def spy(self: Request, attempt: int) -> pb.StartRow:
        built[self.spec.request_id] += 1
        return start_row(self, attempt)

    def never(*_: object) -> None:
        raise AssertionError("a snapshot was read")

    monkeypatch.setattr(Request, "start_row", spy)
    monkeypatch.setattr(scheduler_svc.request, "read_snapshot", never)
    bench = Bench(make_loop(num_slots=10), max_forwards=1)

    async def scene() -> None:
        streams = [await bench.submit(f"r{n}", effort(3 + n), 100) for n in range(12)]
        for ids, _ in await asyncio.gather(*map(bench.read, streams)):
            assert ids == expected(1, 100)

    play(bench, scene)
    assert built == {f"r{n}": 1 for n in range(12)}


def work_of_inserts(monkeypatch: pytest.MonkeyPatch, prompt_blocks: int) -> list[tuple[int, int]]:
    """Bytes hashed and pages looked up, by round, of a row that appends four blocks to a prompt of its own."""
    hashed, looked_up = 0, 0
    page_of = PrefixCache.page_of

    def spy_hash(data: bytes, **kwargs: Any) -> Any:
        nonlocal hashed
        hashed += len(data)
        return blake2b(data, **kwargs)

    def spy_page_of(self: PrefixCache, key: bytes) -> int | None:
        nonlocal looked_up
        looked_up += 1
        return page_of(self, key)

    loop = make_loop(num_pages=prompt_blocks + 8, chunk=prompt_blocks * BLOCK, context=(prompt_blocks + 8) * BLOCK)
    driver = Driver(loop)
    reply = driver.run(starts=[start("a", [5] * prompt_blocks * BLOCK, tokens_left=8 * BLOCK)])
    assert list(reply.rows.done_block_indexes) == [prompt_blocks]
    work: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(worker_svc.kv.prefix_cache, "blake2b", spy_hash)
        patch.setattr(PrefixCache, "page_of", spy_page_of)
        for block in range(4):
            before = hashed, looked_up
            reply = driver.run(continues=names("a"))
            assert list(reply.rows.done_block_indexes) == [prompt_blocks + block + 1]
            work.append((hashed - before[0], looked_up - before[1]))
    return work


def test_an_insert_into_the_prefix_cache_costs_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 512 tokens and after 16384: a hash of one key and one block, and a few look-ups, for each block."""
    short, long = (work_of_inserts(monkeypatch, tokens // BLOCK) for tokens in (512, 16384))
    assert short == long == [(KEY_BYTES + BLOCK * ID_BYTES, short[0][1])] * 4
    assert 0 < short[0][1] <= 3

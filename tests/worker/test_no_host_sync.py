"""Between the launch of a forward and its end the host waits for nothing of the device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.scripted import Driver, ScriptedRunner, effort, make_loop, names, start
from worker_svc.algorithms import ALGORITHMS
from worker_svc.host_copies import ForwardBypass
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput

# What waits for the device on CUDA: reading a tensor, and shapes that depend on what is in one.
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"}
DATA_SHAPES = {"nonzero", "unique", "masked_select", "argwhere", "bincount", "repeat_interleave"}


def waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of torch would wait for all that was launched before it."""
    if name in READS or (name in DATA_SHAPES and "output_size" not in kwargs):
        return True
    if name in ("tensor", "as_tensor"):
        return kwargs.get("device") is not None  # from ordinary host memory
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)
    return False


class Watch(TorchFunctionMode):
    """Notes calls that would wait, while `is_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.seen: list[str] = []
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.num_calls += self.is_on
        if self.is_on and waits(name, args, kwargs):
            frames = traceback.extract_stack()
            frame = next((f for f in reversed(frames) if "worker_svc" in f.filename), frames[0])
            self.seen.append(f"{name} at {frame.filename}:{frame.lineno}")
        return func(*args, **kwargs)


class WatchedRunner(ScriptedRunner):
    """The device computes from the end of `forward` to `finish`."""

    is_asynchronous = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        logits = super().forward(inputs, kv)
        self.watch.is_on = True
        return logits

    def finish(self) -> float:
        self.watch.is_on = False
        return super().finish()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Copies that go around the forward are allowed."""
    watch = Watch()
    copies: Callable[[ForwardBypass], Any] = ForwardBypass.copies

    @contextmanager
    def seen(self: ForwardBypass) -> Iterator[None]:
        was_on, watch.is_on = watch.is_on, False
        with copies(self):
            yield
        watch.is_on = was_on

    monkeypatch.setattr(ForwardBypass, "copies", seen)
    return watch


def test_nothing_waits_while_a_forward_runs(watch: Watch) -> None:
    """All algorithms, greedy and sampled, with records, chunks and fused commits, two rounds ahead: replies are built
    and steps are launched without a look at what the device has not computed yet."""
    driver = Driver(make_loop(runner=WatchedRunner(watch), fused_commit=True, num_slots=16, num_pages=256))
    rows = [
        start(
            f"{algorithm}-{temperature}",
            effort(3 + place) if place % 2 else [7] * 40,
            algorithm=algorithm,
            want_logprobs=place % 3 == 0,
            want_first_unmask_steps=place % 4 == 0,
            sampling=pb.SamplingParams(temperature=temperature, top_p=0.9, top_k=5),
        )
        for place, algorithm in enumerate(ALGORITHMS)
        for temperature in (0.0, 1.0)
    ]
    everyone = names(*(row.request_id for row in rows))
    with watch:
        replies = [driver.send(starts=rows, acked_round_id=0)]
        replies += [driver.send(continues=everyone, acked_round_id=0) for _ in range(2)]
        for _ in range(25):
            driver.loop.tick()
            if replies[0]:
                replies.pop(0)
                acked = driver.next_id - 1 - len(replies)
                replies.append(driver.send(continues=everyone, acked_round_id=acked))
    assert driver.loop.totals.rounds > 5 and driver.loop.totals.blocks_done > 15
    assert watch.num_calls > 1000
    assert not watch.seen, watch.seen[:5]


def test_the_watch_sees_what_waits(watch: Watch) -> None:
    """The calls that the test above looks for are noticed."""
    values = torch.arange(4)
    with watch:
        watch.is_on = True
        values.tolist()
        bool(values[0] == 0)
        values[values > 1] = 0
        torch.tensor([1], device="cpu")
        values.nonzero()
        watch.is_on = False
    assert [seen.split()[0] for seen in watch.seen] == ["tolist", "__bool__", "__setitem__", "tensor", "nonzero"]

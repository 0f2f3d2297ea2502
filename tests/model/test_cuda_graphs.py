"""Captured forwards, with the buffers of a graph on the CPU: what would be launched again is called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model import paged_reader
from tests.model.forwards import NUM_SLOTS, Bench, Part, in_blocks, random_ids, tiny_model
from worker_svc.attention import AttentionBackend
from worker_svc.attention.flash_infer import FlashInferAttention
from worker_svc.attention.torch_sdpa import TorchSdpaAttention
from worker_svc.cuda_graphs import Capture, CaptureError, ForwardGraphs, capture_forwards, graph_sizes
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models import decoder
from worker_svc.settings import WorkerSettings

B = 8
MODEL = tiny_model()


class Emulated:
    """Captures on the CPU: each launch reads and writes the memory of the first, and poisons its result before."""

    def __init__(self) -> None:
        self.num_captures = self.num_launches = 0

    def __call__(self, launch: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.num_captures += 1
        out = launch().clone()

        def again() -> None:
            self.num_launches += 1
            out.fill_(float("nan"))
            out.copy_(launch())

        return again, out


def flash_infer() -> FlashInferAttention:
    """The backend with its kernels read on the CPU."""
    return FlashInferAttention(paged_reader, MODEL.num_heads, torch.empty(0, dtype=torch.uint8))


@st.composite
def forwards(draw: st.DrawFn) -> list[list[Part]]:
    """Prefixes first, one forward each; then mixes of rows, some with their commit beside them, some again in place."""
    prefix = {slot: draw(st.integers(0, 3)) for slot in range(draw(st.integers(1, NUM_SLOTS)))}

    def part(slot: int, first_block: int, num_blocks: int) -> Part:
        ids = random_ids(num_blocks * B, draw(st.integers(0, 1000)))
        return Part(slot, first_block, in_blocks(ids, B))

    result = [[part(slot, 0, num_blocks)] for slot, num_blocks in prefix.items() if num_blocks]
    for _ in range(draw(st.integers(1, 3))):
        mixed: list[Part] = []
        for slot, block in prefix.items():
            kind = draw(st.sampled_from(["pause", "in place", "commit"]))
            if kind == "commit":
                mixed.append(part(slot, block, 1))
                prefix[slot] += 1
            if kind != "pause":
                mixed.append(part(slot, prefix[slot], 1))
        if mixed:
            result.append(mixed)
    return result


@settings(max_examples=8, deadline=None)
@given(mixes=forwards(), max_units=st.integers(1, 13))
def test_a_padded_forward_is_that_without_padding(mixes: list[list[Part]], max_units: int) -> None:
    """Forward after forward through the buffers of one set of graphs, logits and KV are those of the torch backend; no
    page of the pool is touched but the units' own, and the padding page starts with NaN."""
    plain, graphed = Bench(MODEL, B), Bench(MODEL, B)
    capture = Emulated()
    graphed.runner.attention = flash_infer()
    graphed.runner.graphs = ForwardGraphs(MODEL, graphed.runner.attention, graphed.kv, B, max_units, capture)
    assert capture.num_captures == len(graph_sizes(max_units))
    for parts in mixes:
        expected, got = plain.forward(*parts), graphed.forward(*parts)
        for one, other in zip(expected, got, strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    num_single = sum(all(len(p.blocks) == 1 for p in parts) and len(parts) <= max_units for parts in mixes)
    assert capture.num_launches == num_single
    for ours, theirs in ((graphed.kv.k, plain.kv.k), (graphed.kv.v, plain.kv.v)):
        assert torch.equal(ours[:, :-1].isnan(), theirs[:, :-1].isnan())
        assert torch.allclose(ours[:, :-1].nan_to_num(0), theirs[:, :-1].nan_to_num(0), atol=1e-4)
        assert not ours[:, 0].any()


def test_a_plan_stands_as_long_as_the_segments_do() -> None:
    """A forward over the same batch plans nothing anew, with and without a graph; one over another batch does."""
    bench = Bench(MODEL, B)
    runner = bench.runner
    runner.attention = flash_infer()
    for with_graphs in (False, True):
        if with_graphs:
            runner.graphs = ForwardGraphs(MODEL, runner.attention, bench.kv, B, 4, Emulated())
        inputs = bench.input(Part(0, 0, in_blocks(random_ids(B, 1), B)), Part(3, 0, in_blocks(random_ids(B, 2), B)))
        first = runner.forward(inputs, bench.kv)
        table, bench.kv.page_table = bench.kv.page_table, torch.zeros_like(bench.kv.page_table)
        assert torch.equal(runner.forward(inputs, bench.kv), first)
        another = replace(inputs, segments=(*inputs.segments,))
        with pytest.raises(RuntimeError, match="nonzero"):
            runner.forward(another, bench.kv)
        bench.kv.page_table = table


def test_sizes_have_little_padding() -> None:
    """All sizes up to the largest, few of them, and none with more than 15 units of padding."""
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(96) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96]
    for largest in (7, 100, 384):
        sizes = graph_sizes(largest)
        assert sizes[-1] == largest and all(b - a <= 16 for a, b in pairwise(sizes))


def captured(attention: AttentionBackend, capture: Capture, **flags: object) -> TorchModelRunner:
    """A runner of the tiny model, with the graphs that the flags ask for."""
    bench = Bench(MODEL, B)
    bench.runner.attention = attention
    settings = WorkerSettings(model_path=Path("unused"), max_running_requests=4, **flags)  # type: ignore[arg-type]
    capture_forwards(bench.runner, bench.kv, B, settings, capture)
    return bench.runner


def test_number_and_memory_are_reported() -> None:
    """Half more blocks than rows unless the flag says otherwise, told in one line of the log."""
    for flags, sizes in (({}, [1, 2, 4, 6]), ({"cuda_graph_max_bs": 2}, [1, 2])):
        with structlog.testing.capture_logs() as lines:
            runner = captured(flash_infer(), Emulated(), **flags)
        assert runner.graphs is not None and runner.graphs.sizes == sizes
        (line,) = lines
        assert (line["event"], line["graphs"], line["largest"], line["mib"]) == (
            "cuda_graphs",
            len(sizes),
            sizes[-1],
            0,
        )


@pytest.mark.parametrize("flags", [{"disable_cuda_graph": True}, {"batch_invariant": True}])
def test_flags_that_rule_graphs_out(flags: dict[str, bool]) -> None:
    """Nothing is captured."""
    capture = Emulated()
    assert captured(flash_infer(), capture, **flags).graphs is None and not capture.num_captures


def test_a_backend_that_cannot_be_captured_says_so() -> None:
    """The torch backend launches by lengths: no graphs, and a line that says why."""
    with structlog.testing.capture_logs() as lines:
        assert captured(TorchSdpaAttention(), Emulated()).graphs is None
    assert lines[0]["graphs"] == 0 and "--attention-backend" in lines[0]["hint"]


def test_experts_that_wait_are_known_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below compute capability 9.0 the host reads how many tokens an expert has, which would end the capture and the
    worker: no graphs, and a line that says why."""
    monkeypatch.setattr(decoder, "loop_waits", lambda gate_up: True)
    capture = Emulated()
    with structlog.testing.capture_logs() as lines:
        assert captured(flash_infer(), capture).graphs is None and not capture.num_captures
    assert lines[0]["graphs"] == 0 and "compute capability 9.0" in lines[0]["hint"]


@pytest.mark.parametrize(
    ("error", "flag"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "--disable-cuda-graph"),
        (torch.OutOfMemoryError("no memory"), "--cuda-graph-max-bs, --mem-fraction-static"),
    ],
)
def test_a_failed_capture_names_the_flag(error: Exception, flag: str) -> None:
    """An operation that cannot be captured, or no memory: one line with what to change."""

    def fail(launch: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        raise error

    with pytest.raises(CaptureError, match=flag) as raised:
        captured(flash_infer(), fail)
    assert "\n" not in str(raised.value)

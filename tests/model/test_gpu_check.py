"""tools/gpu_check.py, as far as a machine without a GPU can tell."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fdfo.worker.v1 import worker_pb2 as pb
from tests.model import paged_reader
from tests.model.test_cuda_graphs import Emulated
from tools import gpu_check, gpu_check_forward, gpu_check_mini, gpu_check_targets
from worker_svc.attention.flash_infer import FlashInferAttention
from worker_svc.denoise import DenoiseLoop
from worker_svc.models.base import BlockModel

ROOT = Path(__file__).parents[2]


def test_all_parts_hold_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Every part passes at tiny sizes with the CPU in the place of the GPU; what needs one is left out and says so."""
    assert gpu_check.main(["--device", "cpu", "--tiny"]) == 0
    first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["device"] == "cpu"
    found = {line["part"]: line for line in lines}
    assert all(line["ok"] for line in lines), lines
    not_here = {
        "mini_memory",
        "check_flashinfer",
        "check_flashinfer_invariant",
        "check_graphs",
        "check_no_sync",
        "time_graphs",
    }
    assert {name for name, line in found.items() if "skipped" in line} == not_here
    assert found.keys() >= {part.__name__ for part in gpu_check.PARTS} - {"time_denoise"}
    rows = found["mini_3_rows"]
    for mode in ("fdfo_k1", "fdfo_k2", "sync"):
        measured = rows["eager"][mode]
        assert 0 < measured["device_busy"] <= 1 and measured["host_ms_per_round"] > 0
        per_forward = measured["forward_ms"] / measured["wall_ms_per_forward"]
        assert measured["device_busy"] == pytest.approx(per_forward, rel=0.01)
        expected = 3 * 32 / 14 / measured["wall_ms_per_forward"] * 1000
        assert measured["tokens_per_s"] == pytest.approx(expected, rel=0.01)
    assert rows["eager"]["sync"]["rounds_per_forward"] < rows["eager"]["fdfo_k1"]["rounds_per_forward"]
    why_not = "torch's attention cannot be captured, and flashinfer needs --device cuda"
    assert rows["graphs"] == {"skipped": why_not}


@pytest.fixture
def mini() -> Iterator[gpu_check_mini.MiniCheck]:
    with torch.inference_mode():
        yield gpu_check_mini.MiniCheck("cpu", gpu_check_mini.TINY)


def test_the_floor_is_bytes_over_bandwidth(mini: gpu_check_mini.MiniCheck) -> None:
    """With every expert in use: all parameters but the embedding, and the keys and values of the rows' blocks."""
    mini.scale = dataclasses.replace(mini.scale, sizes=mini.scale.sizes | {"num_experts_per_tok": 16, "topk_group": 4})
    mini.bytes_per_s = 1e9
    (rows,) = [part() for name, part in mini.parts() if name == "mini_3_rows"]
    model = mini.model
    weights = sum(parameter.nbytes for name, parameter in model.named_parameters() if name != "embedding")
    kv = 3 * 32 * 2 * model.num_layers * 32 * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    assert rows["experts_touched"] == 1
    assert rows["floor_ms"] == pytest.approx((weights + kv) / 1e6, abs=1e-3)


def test_graphs_are_measured_where_there_are_any(
    mini: gpu_check_mini.MiniCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With emulated kernels and captures all modes run through graphs too, and the runner has none afterwards."""
    monkeypatch.setattr(gpu_check_forward, "flash_infer", flash_infer)
    monkeypatch.setattr(gpu_check_forward, "capture_on", lambda device: Emulated())
    mini.scale = dataclasses.replace(mini.scale, num_forwards=4)
    rows = mini.check_rows(1)
    assert rows["ok"] and rows["graphs"].keys() == rows["eager"].keys() == {"fdfo_k1", "fdfo_k2", "sync"}
    assert rows["graphs"]["sync"]["forward_ms"] > 0
    assert mini.runner.graphs is None


def measured(rows: int, device_busy: float, over_floor: float) -> dict[str, Any]:
    """What a part says of `rows`: these figures through graphs with two rounds in flight, all others bad."""
    bad = {"device_busy": 0.1, "over_floor": 9.0}
    good = {"device_busy": device_busy, "over_floor": over_floor}
    eager = dict.fromkeys(("fdfo_k1", "fdfo_k2", "sync"), bad)
    return {"rows": rows, "eager": eager, "graphs": eager | {"fdfo_k2": good}}


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "device_busy", "over_floor", "met"),
    [
        (16, 0.97, 1.5, {"device_busy": True, "over_floor": True}),
        (16, 0.9699, 1.4, {"device_busy": False, "over_floor": True}),
        (16, 0.99, 1.51, {"device_busy": True, "over_floor": False}),
        (16, NAN, NAN, {"device_busy": False, "over_floor": False}),
        (64, 0.98, 3.0, {"device_busy": True}),
        (1, 0.96, 1.0, {"device_busy": False}),
    ],
)
def test_figures_are_held_against_their_targets(
    rows: int, device_busy: float, over_floor: float, met: dict[str, bool]
) -> None:
    """1.5 times the floor at 16 rows and a device-busy share of 0.97 with two rounds in flight; a miss is not ok."""
    judged = gpu_check_targets.judge(measured(rows, device_busy, over_floor))
    assert {name: target["met"] for name, target in judged["targets"].items()} == met
    assert judged["ok"] == all(met.values())


def test_without_graphs_the_eager_figures_are_judged() -> None:
    """As a worker would run there; and where nothing was measured, nothing is missed."""
    rows = measured(16, 0.98, 1.2)
    rows |= {"eager": rows["graphs"], "graphs": {"skipped": "no FlashInfer"}}
    assert gpu_check_targets.judge(rows)["ok"]
    late = {"skipped": "over 420 s since the start"}
    for eager in (late, {"fdfo_k2": late}):
        assert gpu_check_targets.judge(rows | {"eager": eager}) == {"targets": "not measured", "ok": True}


def test_a_missed_target_fails_its_part(mini: gpu_check_mini.MiniCheck) -> None:
    """Where figures are judged, as at full size, `ok` of the rows is the targets'."""
    assert gpu_check_mini.FULL.has_targets
    mini.bytes_per_s = 1e10  # a floor of some microseconds
    mini.scale = dataclasses.replace(mini.scale, num_forwards=2, has_targets=True)
    rows = mini.check_rows(16)
    assert not rows["ok"] and not rows["targets"]["over_floor"]["met"]


def test_what_comes_too_late_is_skipped_and_says_so(mini: gpu_check_mini.MiniCheck) -> None:
    """After the deadline nothing new is measured, so that the whole check ends in time."""
    mini.scale = dataclasses.replace(mini.scale, deadline_s=-1)
    late = {"skipped": "over -1 s since the start"}
    assert mini.check_rows(1) == {"rows": 1, "context_tokens": 1024, "eager": late, "graphs": late, "ok": True}


def drain(feeder: gpu_check_mini.Feeder) -> None:
    for _ in range(40):
        feeder.tick()


def test_rows_begin_at_different_steps(mini: gpu_check_mini.MiniCheck) -> None:
    """A block that begins after k steps has the positions set that k steps set, and is done 13 - k steps and a commit
    later; a row that cannot run is an error, not a fast row."""
    assert [gpu_check_mini.steps_done(row) for row in (0, 1, 6, 12, 13)] == [(0, 0), (1, 3), (6, 18), (12, 30), (0, 0)]
    loop = DenoiseLoop(mini.runner, mini.config(2), lambda: 0.0)
    feeder = gpu_check_mini.Feeder(loop, 2, pb.MODE_FDFO, 2, "feeder")
    while not loop.totals.blocks_done:
        feeder.tick()
    assert feeder.num_sent - feeder.num_replies >= 1
    assert loop.totals.denoise_row_forwards in (2 * 13, 2 * 13 + 1)  # row 1 was a step ahead of row 0
    loop.release(loop.sessions["feeder"], feeder.names[:1])
    with pytest.raises(RuntimeError, match="does not run"):
        drain(feeder)


def flash_infer(model: BlockModel, batch_invariant: bool = False) -> FlashInferAttention:
    """With kernels that run here."""
    workspace = torch.empty(0, dtype=torch.uint8)
    return FlashInferAttention(paged_reader, model.num_heads, workspace, split_keys=not batch_invariant)


@pytest.mark.parametrize("part", gpu_check_forward.PARTS, ids=lambda part: part.__name__)
def test_the_parts_of_forwards_hold_with_emulated_kernels(
    part: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, graphs, sums and rounds pass with the CPU in the place of the GPU; times are a GPU's only."""
    monkeypatch.setattr(gpu_check_forward, "flash_infer", flash_infer)
    monkeypatch.setattr(gpu_check_forward, "capture_on", lambda device: Emulated())
    monkeypatch.setattr(gpu_check_forward, "NUM_SLOTS", 3)
    monkeypatch.setattr(gpu_check_forward, "NUM_TRIALS", 4)
    monkeypatch.setattr(gpu_check_forward, "VOCAB_SIZE", 5000)
    with torch.inference_mode():
        result = part("cpu")
    assert result["ok"], result
    assert ("skipped" in result) == (part.__name__ in ("check_no_sync", "time_graphs"))


class WrongOutput(FlashInferAttention):
    """One position of one block is wrong."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().run(layer, q, k, v)
        out[0, 0] += 1
        return out


class WrongPool(FlashInferAttention):
    """Keys are written right and change afterwards."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().run(layer, q, k, v)
        self._kv.k[layer, self._append.indices[0].long()] += 1
        return out


@pytest.mark.parametrize("wrong", [WrongOutput, WrongPool])
def test_a_wrong_backend_is_found(wrong: type[FlashInferAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_flashinfer` does not hold for outputs or a pool that are not the torch backend's."""
    monkeypatch.setattr(
        gpu_check_forward, "flash_infer", lambda model: wrong(paged_reader, model.num_heads, torch.empty(0))
    )
    monkeypatch.setattr(gpu_check_forward, "NUM_SLOTS", 2)
    monkeypatch.setattr(gpu_check_forward, "NUM_TRIALS", 2)
    part = next(part for part in gpu_check_forward.PARTS if part.__name__ == "check_flashinfer")
    with torch.inference_mode():
        assert not part("cpu")["ok"]


class SplitByCompany(FlashInferAttention):
    """Where keys may be split, results depend on the number of units."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().run(layer, q, k, v) * (1 + 1e-3 * len(q) * self._split_keys)


@pytest.mark.parametrize("heeds_the_mode", [True, False])
def test_keys_that_are_split_in_batch_invariant_mode_are_found(
    heeds_the_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check_flashinfer_invariant` asks for the mode, and does not hold for a backend that splits keys all the same."""

    def backend(model: BlockModel, batch_invariant: bool) -> FlashInferAttention:
        split_keys = not (batch_invariant and heeds_the_mode)
        return SplitByCompany(paged_reader, model.num_heads, torch.empty(0), split_keys)

    monkeypatch.setattr(gpu_check_forward, "flash_infer", backend)
    monkeypatch.setattr(gpu_check_forward, "NUM_SLOTS", 2)
    part = next(part for part in gpu_check_forward.PARTS if part.__name__ == "check_flashinfer_invariant")
    with torch.inference_mode():
        assert part("cpu")["ok"] == heeds_the_mode


@pytest.mark.parametrize("name", ["check_flashinfer", "check_graphs"])
def test_a_part_that_cannot_run_says_why(name: str) -> None:
    """Without CUDA nothing of FlashInfer is compared."""
    part = next(part for part in gpu_check_forward.PARTS if part.__name__ == name)
    assert part("cpu") == {"skipped": "flashinfer needs --device cuda", "ok": True}


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    """One JSON line with the reason, and a status of its own."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, str(ROOT / "tools" / "gpu_check.py")]
    run = subprocess.run(script, capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert run.returncode == 2, run.stderr
    answer = json.loads(run.stdout)
    assert answer["gpu"] is None
    assert "CUDA" in answer["reason"]

"""tools/gpu_check.py, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import paged_reader
from tests.model.test_cuda_graphs import Emulated
from tools import gpu_check, gpu_check_forward
from worker_svc.attention.flash_infer import FlashInferAttention
from worker_svc.models.base import BlockModel

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "part",
    [gpu_check.check_fp32, gpu_check.check_batch_invariant, gpu_check.check_shipped, gpu_check.check_bf16],
    ids=lambda part: part.__name__,
)
def test_the_parts_hold_on_the_cpu(part: Callable[[str], dict[str, Any]]) -> None:
    """Each check passes with the CPU in the place of the GPU."""
    result = part("cpu")
    assert result["ok"], result
    assert "skipped" not in result


def flash_infer(model: BlockModel) -> FlashInferAttention:
    """With kernels that run here."""
    return FlashInferAttention(paged_reader, model.num_heads, torch.empty(0, dtype=torch.uint8))


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

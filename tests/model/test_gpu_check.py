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

from tools import gpu_check

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


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    """One JSON line with the reason, and a status of its own."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, str(ROOT / "tools" / "gpu_check.py")]
    run = subprocess.run(script, capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert run.returncode == 2, run.stderr
    answer = json.loads(run.stdout)
    assert answer["gpu"] is None
    assert "CUDA" in answer["reason"]

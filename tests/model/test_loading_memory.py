"""Loading takes the memory of the weights once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.architectures import ARCHITECTURES
from tests.model.published import CONFIGS, SPECIAL_TEXTS
from tests.text.folders import byte_tokenizer
from worker_svc.models.decoder import Decoder

NAME = "SDARMoeForCausalLM"
MIB = 1 << 20
PEAK_PER_SIZE = 1.15

# In a process of its own: what stands on the heap of a test process would hide the peak.
LOAD = """
import json, sys, threading, time
import torch
from common.model_folder import read_model_folder
from worker_svc.models.loading import load_model

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
folder = read_model_folder(sys.argv[1])
before, peak, is_over, seen = anonymous_bytes(), 0, threading.Event(), []

def watch():
    global peak
    while not is_over.wait(0.001):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(folder, dtype=None, device="cpu", on_progress=lambda done, total: seen.append((done, total)))
is_over.set()
watcher.join()
print(json.dumps({"peak": max(peak, anonymous_bytes()) - before, "reports": len(seen), "bytes": seen[-1][1]}))
"""


def write_checkpoint(path: Path, num_experts: int, num_layers: int) -> int:
    """SDAR MoE in bfloat16, a shard per layer, written one by one; its size in bytes."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": num_experts, "vocab_size": 4096}
    config = CONFIGS[NAME] | sizes | {"num_hidden_layers": num_layers, "torch_dtype": "bfloat16"}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer([], SPECIAL_TEXTS[NAME]).save(str(path / "tokenizer.json"))
    with torch.device("meta"):
        shapes = Decoder(ARCHITECTURES[NAME].backbone(config), torch.bfloat16).checkpoint_tensors(merged_experts=False)
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, names in shards.items():
        tensors = {name: torch.rand(shapes[name].shape, dtype=torch.bfloat16) for name in names}
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


def load_elsewhere(path: Path) -> dict[str, Any]:
    """What LOAD prints."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("num_experts", "num_layers", "least"),
    [pytest.param(16, 8, 190 * MIB, id="200 MB"), pytest.param(64, 20, 1900 * MIB, id="2 GB", marks=pytest.mark.long)],
)
def test_loading_takes_the_memory_of_the_weights_once(
    tmp_path: Path, num_experts: int, num_layers: int, least: int
) -> None:
    """Anonymous memory peaks below 1.15 times the checkpoint's size, and progress comes about ten times."""
    size = write_checkpoint(tmp_path, num_experts, num_layers)
    assert size > least
    try:
        found = load_elsewhere(tmp_path)
    finally:
        shutil.rmtree(tmp_path)  # pytest would keep it
    assert found["bytes"] == size and 5 <= found["reports"] <= 10
    assert found["peak"] >= 0.9 * size, "else nothing was measured"
    assert found["peak"] < PEAK_PER_SIZE * size, f"{found['peak'] / size:.2f} times the size"

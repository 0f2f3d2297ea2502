"""The example of docs/models.md is true."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from common.architectures import ARCHITECTURES, Architecture
from common.model_folder import read_model_folder
from tests.model.forwards import Bench, Part, in_blocks, random_ids
from tests.model.published import VOCAB, published, write_published
from tests.text.folders import byte_tokenizer
from worker_svc.models.loading import load_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    """The page's file as a module, with its entry in the registry."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), flags=re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", module)
    spec.loader.exec_module(module)
    architecture: Architecture = module.EXAMPLE
    monkeypatch.setitem(ARCHITECTURES, architecture.name, architecture)
    return architecture


def test_the_example_is_served(example: Architecture, tmp_path: Path) -> None:
    """A folder of the example's architecture is read, and its forward is that of Qwen2 under a mask of its blocks."""
    name = "Fast_dLLM_QwenForCausalLM"
    config, weights, forward = published(name)
    config = {key: value for key, value in config.items() if key != "bd_size"} | {"architectures": [example.name]}
    path = write_published(tmp_path / "model", name, config, weights)
    byte_tokenizer([], ("<|im_end|>", "<|mask|>")).save(str(path / "tokenizer.json"))
    folder = read_model_folder(path)
    assert (folder.block_size, folder.mask_token_id, folder.stop_token_ids, folder.logit_shift) == (16, 257, (256,), 0)
    ids = [token % VOCAB for token in random_ids(48, seed=1)]
    bench = Bench(load_model(folder, dtype=None, device="cpu"), folder.block_size)
    (logits,) = bench.forward(Part(0, 0, in_blocks(ids, folder.block_size)))
    assert torch.allclose(logits, forward(ids, folder.block_size), atol=1e-5)

"""The example of docs/adding-an-algorithm.md is true."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import worker_svc.algorithms as registry
from tests.algorithms.batches import defaults, make_batch, make_row, run_block, small_model
from worker_svc.algorithms.base import DllmAlgorithm

ROOT = Path(__file__).parents[2]
MASK = 2


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-an-algorithm.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def fixed_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DllmAlgorithm:
    """The page's first code block as a module, instantiated as in a registry entry."""
    path = tmp_path / "fixed_count.py"
    path.write_text(code_blocks()[0])
    spec = importlib.util.spec_from_file_location("fixed_count", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fixed_count", module)
    spec.loader.exec_module(module)
    algorithm = module.FixedCount()
    assert isinstance(algorithm, DllmAlgorithm)
    return algorithm


@pytest.mark.parametrize(("count", "forwards"), [(1, 9), (3, 4), (4, 3), (8, 2), (100, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_example_runs_a_block(fixed_count: DllmAlgorithm, count: int, forwards: int, temperature: float) -> None:
    """A block of 8 masks takes the forwards that max_steps says, one with less masks fewer, in the same batch."""
    params = defaults(fixed_count, count=count)
    rows = [
        make_row([None] * 8, MASK, params=params, temperature=temperature),
        make_row([MASK, 1, 1, 1, 1, 1, 1, None], MASK, num_prompt=7, params=params, temperature=temperature),
    ]
    batch = make_batch(rows)
    assert fixed_count.max_steps(8, params) == forwards
    assert run_block(fixed_count, batch, small_model(1, 8, 10, 1.0), forwards) == [forwards, 2]
    assert (batch.ids[0] != MASK).all()
    assert batch.ids[1, :7].tolist() == [MASK, 1, 1, 1, 1, 1, 1]


def test_the_example_sets_the_most_confident_positions(fixed_count: DllmAlgorithm) -> None:
    """Each row sets its own count, the most confident positions first, the lowest among equals."""
    rows = [make_row([None] * 4, MASK, params={"count": count}) for count in (1, 3)]
    batch = make_batch(rows)
    logits = torch.zeros(2, 4, 8)
    logits[:, :, 5] = torch.tensor([1.0, 2.0, 1.0, 3.0])
    fixed_count.step(batch, logits, {})
    assert (~batch.masked).tolist() == [[False, False, False, True], [True, True, False, True]]


def test_the_example_is_tensor_operations_only(fixed_count: DllmAlgorithm) -> None:
    """The example keeps the page's own first rule."""
    with FakeTensorMode():
        batch = make_batch([make_row([None] * 4, MASK, params=defaults(fixed_count))] * 3)
        assert fixed_count.step(batch, torch.zeros(3, 4, 8), {}).shape == (3,)


def test_the_entry_is_the_registry_with_one_line_more() -> None:
    """The page's registry is the real one and the example's line."""
    entry = code_blocks()[1].replace("    FixedCount.name: FixedCount(),\n", "")
    assert entry != code_blocks()[1]
    assert entry in Path(str(registry.__file__)).read_text()

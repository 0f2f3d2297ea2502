"""The KV pool's size from the device's memory, with figures of a device that is not here."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.model_folder import read_model_folder
from tests.e2e.served import MODEL
from tests.worker.scripted import ScriptedRunner, make_loop
from worker_svc import start_up
from worker_svc.__main__ import main
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig, loop_config
from worker_svc.memory import GIB, RESERVED_PAGES, DeviceMemory, OutOfRoom, page_bytes_of, pool_pages
from worker_svc.settings import WorkerSettings
from worker_svc.warm_up import pages_for_full, warm_up

H200 = DeviceMemory(total_bytes=140 * GIB, free_bytes=107 * GIB, warm_up_bytes=6 * GIB)  # 33 GiB are in use
PAGE = 1 << 20
CONFIG = LoopConfig(
    fingerprint="",
    block_size=32,
    mask_token_id=1,
    context_length=32 * 1024,
    page_size=32,
    num_slots=64,
    num_pages=1,
    chunked_prefill_size=2048,
)


def test_the_fraction_is_of_weights_and_pool_together() -> None:
    """85 % of 140 GiB are 119, of which 33 are in use: 86 GiB of pages, the two that nobody gets included."""
    assert pool_pages(H200, 0.85, PAGE, CONFIG) == 86 * 1024 - RESERVED_PAGES


def test_what_the_warm_up_took_stays_free() -> None:
    """A fraction that leaves less than the warm-up needed does not count."""
    assert pool_pages(H200, 0.99, PAGE, CONFIG) == 101 * 1024 - RESERVED_PAGES


def test_other_processes_count_as_used() -> None:
    """What others hold is not ours to fill."""
    crowded = replace(H200, free_bytes=H200.free_bytes - 10 * GIB)
    assert pool_pages(H200, 0.85, PAGE, CONFIG) - pool_pages(crowded, 0.85, PAGE, CONFIG) == 10 * 1024


@given(total=st.integers(1, 200), free=st.floats(0, 1), warm_up=st.floats(0, 1), fraction=st.floats(0.01, 0.99))
def test_the_pool_never_takes_more_than_there_is(total: int, free: float, warm_up: float, fraction: float) -> None:
    """Pool and warm-up fit into what is free, weights and pool into the fraction, or it is refused."""
    free_bytes = round(total * GIB * free)
    memory = DeviceMemory(total * GIB, free_bytes, round(free_bytes * warm_up))
    try:
        taken = (pool_pages(memory, fraction, PAGE, CONFIG) + RESERVED_PAGES) * PAGE
    except OutOfRoom:
        return
    assert taken + memory.warm_up_bytes <= memory.free_bytes
    assert memory.total_bytes - memory.free_bytes + taken <= fraction * memory.total_bytes + PAGE
    assert taken >= CONFIG.max_pages_per_slot * PAGE


def test_less_than_a_context_is_refused_with_the_figures() -> None:
    """The line has what is needed and what is there, and the flags that change it."""
    with pytest.raises(OutOfRoom) as refused:
        pool_pages(replace(H200, free_bytes=22 * GIB), 0.85, PAGE, CONFIG)
    line = str(refused.value)
    assert "32768 tokens takes 1.00 GiB, and there is 1.00 GiB: of 140.00 GiB" in line
    for flag in ("--mem-fraction-static is 0.85", "--context-length", "--chunked-prefill-size", "--tp-size"):
        assert flag in line
    assert "\n" not in line


def test_a_page_is_keys_and_values_of_all_layers() -> None:
    """LLaDA2-mini in bf16: 20 layers, 4 heads of 128, 32 tokens: 1.25 MiB."""
    assert page_bytes_of(20, 32, 4, 128, torch.bfloat16) == 5 << 18


@pytest.mark.parametrize(("num_slots", "chunk"), [(4, 512), (8, 64), (1, 64)])
def test_a_full_warm_up_is_a_full_batch(num_slots: int, chunk: int) -> None:
    """A forward with all rows and one with a whole chunk of prompts, within the pages that it is given."""
    runner = ScriptedRunner()
    loop = make_loop(num_slots, chunk=chunk, runner=runner)
    loop = make_loop(num_slots, num_pages=pages_for_full(loop.config), chunk=chunk, runner=runner)
    warm_up(loop, full=True)
    assert max(len(inputs.logits_units) for inputs in runner.inputs) == num_slots
    blocks = [sum(part.num_units for part in inputs.segments if part.is_prefill) for inputs in runner.inputs]
    assert max(blocks) == chunk // loop.config.block_size
    assert loop.pool.usage().held == 0


def test_the_pool_is_sized_by_what_a_device_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of a full batch, then the figures of the device decide the pages; nothing else of the sizes changes."""
    folder = read_model_folder(MODEL)
    settings = WorkerSettings(model_path=MODEL, max_running_requests=4, chunked_prefill_size=64)
    config = loop_config(folder, settings)
    runner = start_up.load_runner(folder, settings)
    monkeypatch.setattr(start_up, "measure_memory", lambda device: H200)
    sized = start_up.sized_by_memory(runner, config, settings)
    page_bytes = page_bytes_of(runner.num_layers, config.page_size, runner.num_kv_heads, runner.head_dim, runner.dtype)
    assert sized == replace(config, num_pages=86 * GIB // page_bytes - RESERVED_PAGES)


def test_the_trial_pool_is_gone_when_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds its tensors then, the attention neither: else it would be missing from the pool for good."""
    settings = WorkerSettings(model_path=MODEL, max_running_requests=4, chunked_prefill_size=64)
    folder = read_model_folder(MODEL)
    pools: list[int] = []

    class Trial(DenoiseLoop):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(self.kv.k.untyped_storage().data_ptr())

    def measured(device: torch.device) -> DeviceMemory:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        assert pools and not any(each.untyped_storage().data_ptr() in pools for each in tensors)
        return H200

    monkeypatch.setattr(start_up, "DenoiseLoop", Trial)
    monkeypatch.setattr(start_up, "measure_memory", measured)
    start_up.sized_by_memory(start_up.load_runner(folder, settings), loop_config(folder, settings), settings)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that the worker ends with."""
    assert main(["--model-path", str(MODEL), "--port", "0", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("worker: ")]
    return line


def test_a_pool_beyond_all_memory_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: the allocator's refusal becomes a line that names the flags."""
    line = refusal(capsys, "--max-total-tokens", str(10**14))
    assert "out of memory on cpu" in line and "lower --mem-fraction-static, --max-total-tokens" in line


def test_weights_that_do_not_fit_say_what_to_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that runs out while it loads: the same line."""

    def load_model(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(start_up, "load_model", load_model)
    line = refusal(capsys)
    assert "Tried to allocate 20.00 MiB; lower " in line and "--tp-size" in line

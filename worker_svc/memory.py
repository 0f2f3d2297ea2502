"""How much of the device's memory the KV pool gets: what weights and a warm-up leave.

    |<------------------- --mem-fraction-static x total ------------------->|               |
    | weights, the driver, other processes |            KV pool             | forwards, graphs, what varies |

The pool never takes what the warm-up needed, even where the fraction says more.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from worker_svc.loop_config import LoopConfig, SettingsError

GIB = 1 << 30
RESERVED_PAGES = 2  # beside those that can be given out, see kv/store.py


class OutOfRoom(SettingsError):
    """One line: what does not fit, by how much, and which flags change it."""


@dataclass(frozen=True)
class DeviceMemory:
    """A device after weights were loaded and a warm-up was run, with nothing else in it that is ours.

    `free_bytes`: what nobody has. `warm_up_bytes`: the most that the warm-up held beside the weights.
    """

    total_bytes: int
    free_bytes: int
    warm_up_bytes: int


def release_unused(device: torch.device) -> None:
    """What is garbage goes back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_memory(device: torch.device) -> DeviceMemory:
    """Of a CUDA device, once the warm-up is over and its pool is dropped; the peak counts from the last call of
    `torch.cuda.reset_peak_memory_stats`."""
    release_unused(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


def pool_pages(memory: DeviceMemory, fraction: float, page_bytes: int, config: LoopConfig) -> int:
    """Pages of `page_bytes` that the pool gets. Raises OutOfRoom where that is less than one whole context."""
    static = memory.free_bytes - round((1 - fraction) * memory.total_bytes)
    room = min(static, memory.free_bytes - memory.warm_up_bytes)
    num_pages = room // page_bytes - RESERVED_PAGES
    if num_pages >= config.max_pages_per_slot:
        return num_pages
    needed = (config.max_pages_per_slot + RESERVED_PAGES) * page_bytes
    used = memory.total_bytes - memory.free_bytes
    raise OutOfRoom(
        f"the KV of one context of {config.context_length} tokens takes {_gib(needed)}, and there is "
        f"{_gib(max(room, 0))}: of {_gib(memory.total_bytes)} weights and others have {_gib(used)}, a warm-up took "
        f"{_gib(memory.warm_up_bytes)}, --mem-fraction-static is {fraction:g}; raise that, lower --context-length, "
        f"--max-running-requests or --chunked-prefill-size, or raise --tp-size"
    )


def page_bytes_of(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one page in all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

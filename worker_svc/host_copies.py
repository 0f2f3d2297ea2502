"""Copies between host and device that do not wait for the forward on its way.

On CUDA a copy from ordinary host memory waits for all that was launched before, and so does reading a tensor. Here what
goes to the device comes from pinned memory, and what must be read while a forward runs is copied beside it, on a stream
of its own. On the CPU both are plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def on_host(values: Values | NDArray[np.generic], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on the host that `device` can copy without waiting."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: Values | NDArray[np.generic], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` on the device; the host goes on at once."""
    return on_host(values, device, dtype).to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A copy on the host, complete when the device has come so far: read it after `ModelRunner.finish`."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class ForwardBypass:
    """A way around the forward on its way, for copies of what stood there when it was launched."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> None:
        """Copies from here on see what the device computes of all that was launched before, and wait for no more."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def copies(self) -> Iterator[None]:
        """What is launched inside does not wait for what was launched since `mark`, and all that is launched later
        waits for it. Tensors made inside are to be read inside, here or in a later one."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

"""FlashInfer's two calls as its documentation describes their arrays, in numpy and on the CPU.

An independent reader: it knows requests, pages and index arrays, and nothing of slots, blocks or units. Where the
package is installed, every call is bound to the real signature first.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


def bind(name: str, *args: object, **kwargs: object) -> None:
    """Raises TypeError for a call that the installed FlashInfer would not take; `name` may be `Class.method`."""
    if HAS_FLASHINFER:
        import flashinfer

        function: Any = flashinfer
        for part in name.split("."):
            function = getattr(function, part)
        inspect.signature(function).bind(*args, **kwargs)


def numbers(array: Tensor) -> NDArray[Any]:
    """Index arrays are int32 there, one-dimensional and contiguous."""
    assert array.dtype == torch.int32 and array.dim() == 1 and array.is_contiguous()
    return array.numpy()


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Token i goes to position positions[i] of request batch_indices[i]; a request's room is already counted."""
    bind(
        "append_paged_kv_cache",
        *(append_key, append_value, batch_indices, positions, paged_kv_cache),
        *(kv_indices, kv_indptr, kv_last_page_len, kv_layout),
    )
    assert kv_layout == "NHD" and append_key.dim() == append_value.dim() == 3
    pages, indptr, last = numbers(kv_indices), numbers(kv_indptr), numbers(kv_last_page_len)
    page_size = paged_kv_cache[0].shape[1]
    for token, (request, position) in enumerate(zip(numbers(batch_indices), numbers(positions), strict=True)):
        assert position < (indptr[request + 1] - indptr[request] - 1) * page_size + last[request]
        page = int(pages[indptr[request] + position // page_size])
        for cache, values in zip(paged_kv_cache, (append_key, append_value), strict=True):
            cache[page, int(position) % page_size] = values[token]


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans once, runs in every layer; with `use_cuda_graph` what runs reads the buffers only, as a graph would."""

    def __init__(self, float_workspace_buffer: Tensor, **options: Any) -> None:
        bind("BatchPrefillWithPagedKVCacheWrapper", float_workspace_buffer, **options)
        assert options["kv_layout"] == "NHD" and options["backend"] == "fa2"
        self.buffers: list[Tensor] | None = None
        if options.get("use_cuda_graph"):
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            self.buffers = [options[name] for name in names]
        self.options: dict[str, Any] = {}

    def plan(self, *arrays: Tensor, **options: Any) -> None:
        """qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: only the third is on the device."""
        bind("BatchPrefillWithPagedKVCacheWrapper.plan", self, *arrays, **options)
        assert not options["causal"] and "custom_mask" not in options
        assert options["max_token_per_sequence"] == int(arrays[0].diff().max())
        self.options = options
        if self.buffers is None:
            self.arrays = arrays
            return
        assert all(
            array.shape == buffer.shape
            for place, (array, buffer) in enumerate(zip(arrays, self.buffers, strict=True))
            if place != 2
        )
        for array, buffer in zip(arrays, self.buffers, strict=True):
            buffer[: len(array)] = array

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Every query of a request over all keys of the request, scores scaled by head_dim ** -0.5."""
        bind("BatchPrefillWithPagedKVCacheWrapper.run", self, q, paged_kv_cache)
        k, v = (cache.numpy() for cache in paged_kv_cache)
        _, page_size, num_kv_heads, head_dim = k.shape
        assert (self.options["page_size"], self.options["num_kv_heads"]) == (page_size, num_kv_heads)
        assert (self.options["num_qo_heads"], self.options["head_dim_qk"]) == tuple(q.shape[1:])
        assert self.options["q_data_type"] == self.options["kv_data_type"] == q.dtype == paged_kv_cache[0].dtype
        qo_indptr, indptr, indices, last = map(numbers, self.buffers or self.arrays)
        out = np.full(q.shape, np.nan, dtype=k.dtype)
        for request in range(len(last)):
            pages = indices[indptr[request] : indptr[request + 1]]
            length = (len(pages) - 1) * page_size + last[request]
            keys, values = (cache[pages].reshape(-1, num_kv_heads, head_dim)[:length] for cache in (k, v))
            queries = slice(qo_indptr[request], qo_indptr[request + 1])
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // num_kv_heads)
                scores = q[queries, head].numpy() @ keys[:, kv_head].T / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[queries, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, kv_head]
        return torch.from_numpy(out)

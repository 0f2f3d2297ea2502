"""Parts of tools/gpu_check.py: attention by FlashInfer, CUDA graphs, sums of logits.

Inputs are random and new in every call; what is compared starts as NaN, so that nothing that was not computed can pass.
Each part returns what it measured, `ok`, and `skipped` with the reason where it could not run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tools.gpu_check_no_sync import check_no_sync

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from worker_svc.attention import AttentionBackend
    from worker_svc.cuda_graphs import Capture
    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput
    from worker_svc.models.base import BlockModel

NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE = 24, 40, 32
# The kernels are made for one head_dim.
HEADS_OF_MINI = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64}
NUM_TRIALS = 10
VOCAB_SIZE = 157_184  # of LLaDA2
MAX_ERROR = 0.01  # of the norm: bf16 has 8 bits, and both round the same inputs once
MAX_GRAPH_ERROR = 0.02  # of the norm of the logits after all layers, where sums are split otherwise
TIMED_FORWARDS = 20


class NotHere(Exception):
    """Why a part cannot run."""


def dtype_of(device: str) -> torch.dtype:
    """FlashInfer computes in 16 bits."""
    import torch

    return torch.bfloat16 if device == "cuda" else torch.float32


def flash_infer(model: BlockModel, batch_invariant: bool = False) -> AttentionBackend:
    """The backend that is checked; raises NotHere."""
    from worker_svc.attention import ATTENTION_BACKENDS, AttentionUnavailable

    try:
        return ATTENTION_BACKENDS["flashinfer"].for_model(model, batch_invariant)
    except AttentionUnavailable as error:
        raise NotHere(str(error)) from error


def capture_on(device: str) -> Capture:
    """How forwards are captured there."""
    import torch

    from worker_svc.cuda_graphs import cuda_capture

    return cuda_capture(torch.device(device))


def relative_error(expected: Tensor, got: Tensor) -> float:
    """Of the norm; NaN where one is NaN, and then no comparison holds."""
    return float(((got.float() - expected.float()).norm() / expected.float().norm()).item())


def random_segments(rng: Any, num_slots: int, longest_chunk: int = 6) -> list[tuple[int, int, int]]:
    """Some of the slots, in any order, each with a row, a fused pair or a chunk: (slot, first block, blocks)."""
    slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
    return [(slot, rng.randrange(MAX_BLOCKS - longest_chunk), rng.choice((1, 1, 2, longest_chunk))) for slot in slots]


def filled_kv(model: BlockModel, num_slots: int, generator: torch.Generator) -> KVStore:
    """A pool with scattered pages of random keys and values; NaN in the padding page."""
    from tools.gpu_check import make_kv

    kv = make_kv(model, num_slots, MAX_BLOCKS)
    for pool in (kv.k, kv.v):
        pool[:, 1:-1].normal_(generator=generator)
    return kv


def make_input(segments: list[tuple[int, int, int]], vocab_size: int, device: str) -> ForwardInput:
    """Of new random tokens."""
    import torch

    from tools import gpu_check

    inputs = gpu_check.make_input(segments, vocab_size, device)
    inputs.ids = torch.randint(0, vocab_size, inputs.ids.shape, device=device)
    return inputs


def check_flashinfer(device: str) -> dict[str, Any]:
    """Output and pool of FlashInfer against the torch backend: rows, pairs and chunks of all lengths, also padded."""
    import random

    import torch

    from tools.gpu_check import SMALL, random_model
    from worker_svc.attention.torch_sdpa import TorchSdpaAttention

    sizes = SMALL | HEADS_OF_MINI | {"num_hidden_layers": 1}
    model = random_model(sizes, dtype_of(device), device)
    seed = random.randrange(1 << 30)
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    reference, eager = TorchSdpaAttention(), flash_infer(model)
    errors, same_pool = [], True
    for trial in range(NUM_TRIALS):
        kv = filled_kv(model, NUM_SLOTS, generator)
        ours = type(kv)(kv.k.clone(), kv.v.clone(), kv.page_table)
        inputs = make_input(random_segments(rng, NUM_SLOTS), model.vocab_size, device)
        num_units, num_padding = len(inputs.ids), 3 * (trial % 2)
        shape = (num_units + num_padding, BLOCK_SIZE, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
        heads = torch.randn(shape, generator=generator, device=device, dtype=model.dtype)
        qkv = torch.split(heads, [model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=2)
        backend = eager.for_graph(num_units + num_padding) if num_padding else eager
        assert backend is not None
        reference.plan(inputs, kv)
        expected = reference.run(0, *(x[:num_units] for x in qkv))
        backend.plan(inputs, ours)
        torch.full_like(qkv[0], float("nan"))  # and free again: likely the memory that the output gets
        got = backend.run(0, *qkv)[:num_units]
        errors.append(relative_error(expected, got))
        same_pool &= all(torch.equal(a[:, :-1], b[:, :-1]) for a, b in ((kv.k, ours.k), (kv.v, ours.v)))
    return {
        "seed": seed,
        "max_relative_error": max(errors),
        "same_pool": same_pool,
        "ok": all(error < MAX_ERROR for error in errors) and same_pool,
    }


def check_flashinfer_invariant(device: str) -> dict[str, Any]:
    """In batch-invariant mode the units of a mixed forward through FlashInfer have the bits they have alone; and so has
    its attention of long rows that are computed together, as their keys are not split."""
    import torch

    from tools.gpu_check import SMALL, bits_alone_and_together, random_model
    from worker_svc.model_runner import TorchModelRunner

    model = random_model(SMALL | HEADS_OF_MINI, dtype_of(device), device)
    backend = flash_infer(model, batch_invariant=True)
    mode = bits_alone_and_together(TorchModelRunner(model, backend, batch_invariant=True))
    kv = filled_kv(model, NUM_SLOTS, torch.Generator(device).manual_seed(0))
    rows = [(slot, MAX_BLOCKS - 1 - slot, 1) for slot in range(NUM_SLOTS)]
    heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    shape = (NUM_SLOTS, BLOCK_SIZE, sum(heads), model.head_dim)
    qkv = torch.split(torch.randn(shape, device=device, dtype=model.dtype), heads, dim=2)

    def attend(first: int, last: int) -> Tensor:
        backend.plan(make_input(rows[first:last], model.vocab_size, device), kv)
        return backend.run(0, *(x[first:last] for x in qkv))

    together = attend(0, NUM_SLOTS)
    unsplit = torch.equal(together, torch.cat([attend(slot, slot + 1) for slot in range(NUM_SLOTS)]))
    return mode | {"same_attention_bits": unsplit, "ok": mode["ok"] and unsplit}


def check_graphs(device: str) -> dict[str, Any]:
    """Logits of forwards through graphs of all sizes against those without, after chunks that no graph has."""
    import random

    from tools.gpu_check import SMALL, make_kv, random_model
    from worker_svc.cuda_graphs import ForwardGraphs, free_device_bytes, why_not_captured
    from worker_svc.model_runner import TorchModelRunner

    model = random_model(SMALL | HEADS_OF_MINI, dtype_of(device), device)
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    plain = TorchModelRunner(model, flash_infer(model))
    graphed = TorchModelRunner(model, flash_infer(model))
    kv_plain, kv_graphed = (make_kv(model, NUM_SLOTS, MAX_BLOCKS) for _ in range(2))
    if reason := why_not_captured(graphed):
        raise NotHere(reason)
    free_bytes, start = free_device_bytes(model.device), time.perf_counter()
    graphed.graphs = ForwardGraphs(model, graphed.attention, kv_graphed, BLOCK_SIZE, NUM_SLOTS, capture_on(device))
    capture_s, used_bytes = time.perf_counter() - start, free_bytes - free_device_bytes(model.device)
    errors = []
    reached = dict.fromkeys(range(NUM_SLOTS), 0)
    for trial in range(NUM_TRIALS):
        count = 1 if trial % 4 else 3  # every fourth one is of chunks
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        inputs = make_input([(slot, reached[slot], count) for slot in slots], model.vocab_size, device)
        for slot in slots:
            reached[slot] += count if trial % 3 else count - 1  # some go on in place
        for _ in range(2):  # the second time with the plan of the first
            errors.append(relative_error(plain.forward(inputs, kv_plain), graphed.forward(inputs, kv_graphed)))
    return {
        "seed": seed,
        "max_relative_error": max(errors),
        "graph_sizes": len(graphed.graphs.sizes),
        "capture_s": round(capture_s, 2),
        "graph_mib": used_bytes >> 20,
        "ok": all(error < MAX_GRAPH_ERROR for error in errors),
    }


def check_bf16_sums(device: str) -> dict[str, Any]:
    """Best tokens, their probabilities and log probabilities of bf16 logits, in groups, against a float64 copy; and
    whether a greedy row has the same bits beside sampled ones."""
    import torch

    from worker_svc.algorithms.base import SamplingColumns, StepBatch
    from worker_svc.algorithms.sampling import candidates
    from worker_svc.records import log_probabilities

    num_rows = 4
    logits = (3 * torch.randn(num_rows, BLOCK_SIZE, VOCAB_SIZE, device=device)).to(torch.bfloat16)
    zeros = torch.zeros(num_rows, device=device)
    integers = zeros.to(torch.int64)
    ids = torch.zeros(num_rows, BLOCK_SIZE, dtype=torch.int64, device=device)
    batch = StepBatch(
        ids=ids,
        masked=ids == 0,
        editable=ids == 0,
        block_index=integers,
        step_index=integers,
        params={},
        sampling=SamplingColumns(zeros, zeros + 1, zeros, integers, integers, integers, any_sampling=False),
        mask_token_id=7,
    )
    naive = logits.double()
    raw = naive.log_softmax(-1)
    naive[..., 7] = float("-inf")
    expected = naive.log_softmax(-1).max(-1)
    logprobs = log_probabilities(logits.clone(), expected.indices)
    beside_sampled = replace(batch.sampling, temperature=(integers == 0).cumsum(0) % 2.0, any_sampling=True)
    mixed = candidates(replace(batch, sampling=beside_sampled), logits.clone())
    tokens, probabilities = candidates(batch, logits)
    same_bits = all(
        torch.equal(one[1::2], other[1::2]) for one, other in zip(mixed, (tokens, probabilities), strict=True)
    )
    error = max(
        (probabilities.double() / expected.values.exp() - 1).abs().max().item(),
        (logprobs.double() - raw.gather(-1, expected.indices[..., None]).squeeze(-1)).abs().max().item(),
    )
    same = bool((tokens == expected.indices).all())
    return {
        "max_error": error,
        "same_tokens": same,
        "greedy_rows_same_bits_beside_sampled": same_bits,
        "ok": same and same_bits and error < 1e-4,
    }


def time_graphs(device: str) -> dict[str, Any]:
    """Median milliseconds of a forward of rows behind 992 tokens: torch's attention, FlashInfer, and in a graph."""
    import torch

    from tools.gpu_check import MEDIUM, random_model
    from worker_svc.attention.torch_sdpa import TorchSdpaAttention
    from worker_svc.cuda_graphs import ForwardGraphs, why_not_captured
    from worker_svc.model_runner import TorchModelRunner

    if device != "cuda":
        raise NotHere("times of a GPU only")
    model = random_model(MEDIUM, torch.bfloat16, device)
    result: dict[str, Any] = {}
    for num_rows in (1, 16, 64):
        kv = filled_kv(model, num_rows, torch.Generator(device).manual_seed(num_rows))
        inputs = make_input([(slot, 31, 1) for slot in range(num_rows)], model.vocab_size, device)
        runners = {
            name: TorchModelRunner(model, TorchSdpaAttention() if name == "torch" else flash_infer(model))
            for name in ("torch", "flashinfer", "graph")
        }
        if reason := why_not_captured(runners["graph"]):
            raise NotHere(reason)
        runners["graph"].graphs = ForwardGraphs(
            model, runners["graph"].attention, kv, BLOCK_SIZE, num_rows, capture_on(device)
        )
        for name, runner in runners.items():
            times = []
            for _ in range(3 + TIMED_FORWARDS):
                runner.forward(inputs, kv)
                times.append(runner.finish())
            result.setdefault(name, {})[str(num_rows)] = round(statistics.median(times[3:]), 3)
    return {"ms_by_rows": result, "context_tokens": 1024, "ok": True}


def or_skipped(part: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """The part, saying why where it cannot run."""

    def run(device: str) -> dict[str, Any]:
        try:
            return part(device)
        except NotHere as error:
            return {"skipped": str(error), "ok": True}

    run.__name__ = part.__name__
    return run


PARTS = tuple(
    map(
        or_skipped,
        (check_flashinfer, check_flashinfer_invariant, check_graphs, check_bf16_sums, check_no_sync, time_graphs),
    )
)

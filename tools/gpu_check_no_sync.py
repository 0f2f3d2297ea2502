"""A part of tools/gpu_check.py: the loop without host synchronisation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput

BLOCK_SIZE = 32


def check_no_sync(device: str) -> dict[str, Any]:
    """Rounds of the loop in which torch raises for any wait between a forward's launch and its end."""
    import torch

    from tools.gpu_check import SMALL, random_model
    from worker_svc.attention.torch_sdpa import TorchSdpaAttention
    from worker_svc.model_runner import TorchModelRunner

    model = random_model(SMALL, torch.float32, device)
    runner = TorchModelRunner(model, TorchSdpaAttention())
    forward, finish, num_forwards = runner.forward, runner.finish, 0

    def watched_forward(inputs: ForwardInput, kv: KVStore) -> Tensor:
        nonlocal num_forwards
        num_forwards += 1
        logits = forward(inputs, kv)
        watch(device, True)
        return logits

    def watched_finish() -> float:
        watch(device, False)
        return finish()

    runner.forward, runner.finish = watched_forward, watched_finish  # type: ignore[method-assign]
    with bypass_allowed(device):
        blocks_done = run_rounds(runner)
    if device != "cuda":
        return {"skipped": "only CUDA tells of waits", "forwards": num_forwards, "ok": blocks_done > 0}
    return {"forwards": num_forwards, "blocks_done": blocks_done, "ok": blocks_done > 0}


def watch(device: str, is_on: bool) -> None:
    """Whether torch raises for what waits."""
    import torch

    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error" if is_on else "default")


@contextmanager
def bypass_allowed(device: str) -> Iterator[None]:
    """Copies on the stream beside the forward wait for that stream only."""
    from worker_svc.host_copies import ForwardBypass

    copies: Callable[[ForwardBypass], Any] = ForwardBypass.copies

    @contextmanager
    def unwatched(self: ForwardBypass) -> Iterator[None]:
        import torch

        before = torch.cuda.get_sync_debug_mode() if device == "cuda" else 0
        watch(device, False)
        with copies(self):
            yield
        watch(device, bool(before))

    ForwardBypass.copies = unwatched  # type: ignore[method-assign]
    try:
        yield
    finally:
        watch(device, False)
        ForwardBypass.copies = copies  # type: ignore[method-assign, assignment]


def run_rounds(runner: Any) -> int:
    """16 requests, greedy and sampled, through rounds that go on; the blocks that became done."""
    from common.packing import pack_bits, pack_ids
    from fdfo.worker.v1 import worker_pb2 as pb
    from worker_svc.denoise import DenoiseLoop
    from worker_svc.loop_config import LoopConfig
    from worker_svc.rounds import RoundRequest
    from worker_svc.rows import RowKey, RowName
    from worker_svc.starts import decode_starts

    config = LoopConfig(
        fingerprint="",
        block_size=BLOCK_SIZE,
        mask_token_id=1,
        context_length=512,
        page_size=BLOCK_SIZE,
        num_slots=16,
        num_pages=256,
        chunked_prefill_size=256,
        fused_commit=True,
    )
    loop = DenoiseLoop(runner, config, time.monotonic)
    starts = [
        pb.StartRow(
            request_id=f"r{number}",
            attempt=1,
            prompt_length=2 * BLOCK_SIZE,
            prefix_ids=pack_ids([5] * 2 * BLOCK_SIZE),
            block_index=2,
            block_ids=pack_ids([1] * BLOCK_SIZE),
            block_mask=pack_bits([True] * BLOCK_SIZE),
            algorithm="LowConfidence",
            algorithm_params={"threshold": 0.0 if number % 2 else 0.9},
            sampling=pb.SamplingParams(temperature=float(number % 4 == 0), top_p=1.0),
            tokens_left=256,
        )
        for number in range(16)
    ]
    everyone = [RowName(RowKey(start.request_id, 0), 1) for start in starts]
    replies: list[object] = []
    for round_id in range(1, 11):
        request = RoundRequest(
            scheduler_id="gpu-check",
            generation=1,
            worker_epoch=loop.epoch,
            fingerprint="",
            round_id=round_id,
            acked_round_id=max(0, round_id - 3),
            mode=pb.MODE_FDFO,
            max_forwards=4,
            max_round_ms=60_000,
            releases=[],
            starts=decode_starts(starts if round_id == 1 else [], loop.start_rules),
            continues=everyone if round_id > 1 else [],
        )
        loop.submit(request, replies.append)
        while len(replies) < round_id - 1:
            loop.tick()
    return loop.totals.blocks_done

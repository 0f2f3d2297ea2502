"""Parts of tools/gpu_check.py: all experts in one kernel, and two ranks of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_svc.model_runner import ModelRunner


def check_experts(device: str) -> dict[str, Any]:
    """All experts in one kernel against one after the other, in bf16, some of them without tokens."""
    import torch

    from tools.gpu_check import MAX_BF16_ERROR
    from worker_svc.models.experts import grouped_is_fast, run_experts

    num_experts, hidden, inner, per_token = 64, 256, 128, 4
    errors = []
    for num_tokens in (1, 32, 1000):
        x = torch.randn(num_tokens, hidden, device=device).bfloat16()
        gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=device) * hidden**-0.5).bfloat16()
        down = (torch.randn(num_experts, hidden, inner, device=device) * inner**-0.5).bfloat16()
        experts = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :per_token]
        weights = torch.rand(num_tokens, per_token, device=device)
        loop, grouped = (run_experts(x, weights, experts, gate_up, down, way).float() for way in (False, True))
        errors.append(((grouped - loop).norm() / loop.norm()).item())
    ok = all(error < MAX_BF16_ERROR for error in errors)
    return {"relative_errors": errors, "grouped_is_used": grouped_is_fast(gate_up), "ok": ok}


def run_rank(rank: int, rendezvous: Path, device: str) -> None:
    """The second rank of `check_tensor_parallel`."""
    import torch

    from worker_svc.models.shard import Shard
    from worker_svc.tensor_parallel import Group, follow

    torch.set_num_threads(1)
    shard = Shard(rank, 2)
    group = Group(shard, torch.device(f"cuda:{rank}" if device == "cuda" else device), rendezvous, num_slots=6)
    follow(shipped_runner(shard, group.device), group)
    group.leave()


def shipped_runner(shard: Any, device: Any) -> ModelRunner:
    """Of a rank's part of the shipped model, in fp32."""
    import torch

    from common.model_folder import read_model_folder
    from tools.gpu_check import ROOT, attention
    from worker_svc.model_runner import TorchModelRunner
    from worker_svc.models.loading import load_model

    folder = read_model_folder(ROOT / "models" / "tiny-llada2")
    return TorchModelRunner(load_model(folder, dtype=torch.float32, device=device, shard=shard), attention())


def check_tensor_parallel(device: str) -> dict[str, Any]:
    """Logits of the shipped checkpoint by two ranks against one; needs two devices."""
    import torch

    from tools.gpu_check import compare, logits_of
    from worker_svc.models.shard import WHOLE, Shard
    from worker_svc.ranks import Ranks
    from worker_svc.tensor_parallel import Group, LeadingRunner

    if device == "cuda" and torch.cuda.device_count() < 2:
        return {"skipped": "one GPU; --tp-size needs two", "ok": True}
    first = torch.device("cuda:0" if device == "cuda" else device)
    ranks = Ranks(2, run_rank, device)
    try:
        group = Group(Shard(0, 2), first, ranks.rendezvous, num_slots=6)
        leading = LeadingRunner(shipped_runner(Shard(0, 2), first), group)
        result = compare(logits_of(shipped_runner(WHOLE, first)), logits_of(leading))
        ranks.expect_end()
        leading.stop()
        group.leave()
        return result
    finally:
        ranks.stop(wait_s=10)


PARTS = (check_experts, check_tensor_parallel)

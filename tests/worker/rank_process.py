"""The process of a rank in test_tensor_parallel.py; it imports little, so that it is there soon."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from common.model_folder import ModelFolder, read_model_folder
from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models.loading import load_model
from worker_svc.models.shard import Shard
from worker_svc.tensor_parallel import Group, follow

SIZE = 2
SLOTS = 8
MASK = 259
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A model, and how it is run."""

    architecture: str
    block_size: int
    batch_invariant: bool = False

    def folder(self, path: Path) -> ModelFolder:
        return read_model_folder(path / self.architecture, block_size=self.block_size, mask_token_id=MASK)

    def runner(self, path: Path, shard: Shard) -> TorchModelRunner:
        folder = self.folder(path)
        model = load_model(folder, dtype=None, device="cpu", shard=shard)
        return TorchModelRunner(model, ATTENTION_BACKENDS["torch"](), self.batch_invariant, folder.logit_shift)


CASES = {
    "LLaDA2": Case("LLaDA2MoeModelLM", 8),
    "LLaDA2, batch-invariant": Case("LLaDA2MoeModelLM", 8, batch_invariant=True),
    "SDAR": Case("SDARForCausalLM", 4),
    "SDAR-MoE": Case("SDARMoeForCausalLM", 8),
    "Fast-dLLM-v2": Case("Fast_dLLM_QwenForCausalLM", 16),
}


def rank_of_all_cases(rank: int, rendezvous: Path, path: Path) -> None:
    """Follow one model after the other; all are in `path`."""
    torch.set_num_threads(1)
    shard = Shard(rank, SIZE)
    group = Group(shard, CPU, rendezvous, SLOTS)
    for case in CASES.values():
        follow(case.runner(path, shard), group)
    group.leave()

"""A model, a pool and the forwards of a test, without any of the worker around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.architectures import ARCHITECTURES
from common.model_folder import ModelFolder
from tests.model.checkpoints import TINY_CONFIG, random_weights
from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.kv.store import KVStore
from worker_svc.model_runner import ForwardInput, Segment, TorchModelRunner
from worker_svc.models.base import BlockModel
from worker_svc.models.decoder import Decoder

NUM_SLOTS = 6
MAX_BLOCKS = 16


@dataclass(frozen=True)
class Part:
    """What a forward is to compute of one slot: the tokens of consecutive blocks from `first_block` on."""

    slot: int
    first_block: int
    blocks: list[list[int]]


@dataclass
class Bench:
    """A runner with a pool in which pages are scattered and everything outside them is NaN."""

    model: BlockModel
    block_size: int
    batch_invariant: bool = False
    blocks_per_page: int = 1
    page_seed: int = 0
    logit_shift: int = 0
    kv: KVStore = field(init=False)
    runner: TorchModelRunner = field(init=False)

    def __post_init__(self) -> None:
        pages_per_slot = -(-MAX_BLOCKS // self.blocks_per_page)
        num_pages = NUM_SLOTS * pages_per_slot
        self.kv = KVStore.allocate(
            num_layers=self.model.num_layers,
            num_pages=num_pages,
            page_size=self.blocks_per_page * self.block_size,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            num_slots=NUM_SLOTS,
            max_pages_per_slot=pages_per_slot,
            dtype=self.model.dtype,
            device="cpu",
        )
        generator = torch.Generator().manual_seed(self.page_seed)
        self.kv.page_table[:] = (torch.randperm(num_pages, generator=generator) + 1).view(NUM_SLOTS, -1)
        for pool in (self.kv.k, self.kv.v):
            pool[:, 1:] = float("nan")  # as freed pages may be
        self.runner = TorchModelRunner(
            self.model, ATTENTION_BACKENDS["torch"](), self.batch_invariant, self.logit_shift
        )

    def input(self, *parts: Part) -> ForwardInput:
        """All blocks of all parts; logits of all."""
        blocks = [block for part in parts for block in part.blocks]
        segments: list[Segment] = []
        slots: list[int] = []
        block_index: list[int] = []
        for part in parts:
            segments.append(Segment(len(slots), len(part.blocks), part.first_block))
            slots += [part.slot] * len(part.blocks)
            block_index += range(part.first_block, part.first_block + len(part.blocks))
        return ForwardInput(
            ids=torch.tensor(blocks),
            slots=torch.tensor(slots),
            block_index=torch.tensor(block_index),
            segments=tuple(segments),
            logits_units=torch.arange(len(blocks)),
        )

    def forward(self, *parts: Part) -> list[Tensor]:
        """One forward over all parts; for each the logits [tokens, V] of its blocks."""
        logits = self.runner.forward(self.input(*parts), self.kv)
        assert logits.dtype == self.model.dtype
        assert logits.shape == (sum(len(part.blocks) for part in parts), self.block_size, self.model.vocab_size)
        return [part.flatten(0, 1) for part in torch.split(logits, [len(part.blocks) for part in parts])]

    def final_kv(self, slot: int, num_blocks: int) -> Tensor:
        """Keys and values of the slot's first blocks, [2, layers, tokens, kv heads, head_dim]."""
        pages = self.kv.page_table[slot]
        num_tokens = num_blocks * self.block_size
        return torch.stack([pool[:, pages].flatten(1, 2)[:, :num_tokens] for pool in (self.kv.k, self.kv.v)])


def model_of(config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> BlockModel:
    """The model with these weights, without files."""
    model = Decoder(ARCHITECTURES[config["architectures"][0]].backbone(config), dtype)
    for name, place in model.checkpoint_tensors(merged_experts=False).items():
        place.copy_(weights[name])
    return model


def tiny_model(dtype: torch.dtype = torch.float32) -> BlockModel:
    """`TINY_CONFIG` with `random_weights` of seed 0."""
    return model_of(TINY_CONFIG, random_weights(TINY_CONFIG), dtype)


def in_blocks(ids: list[int], block_size: int) -> list[list[int]]:
    """Whole blocks only."""
    assert len(ids) % block_size == 0
    return [ids[i : i + block_size] for i in range(0, len(ids), block_size)]


def random_ids(num_tokens: int, seed: int) -> list[int]:
    """Token ids below 500."""
    return torch.randint(0, 500, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def folder_of(path: Any, config: dict[str, Any], architecture: str = "LLaDA2MoeModelLM") -> ModelFolder:
    """What the loader looks at of a folder, without the checks of `read_model_folder`."""
    return ModelFolder(
        path=path,
        architecture=architecture,
        has_weights=True,
        block_size=32,
        logit_shift=0,
        algorithms=("LowConfidence",),
        vocab_size=config.get("vocab_size", 0),
        num_tokens=512,
        mask_token_id=1,
        stop_token_ids=(0,),
        context_length=4096,
        fingerprint="",
        config=config,
    )

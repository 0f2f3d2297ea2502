"""What the services are measured against: the model and the algorithms in one process, without anything that serves.

`run_plain` is the limit: the forwards of the services' FDFO schedule, with nothing to send, copy or wait for between
them. `run_one_at_a_time` is the same for one request after the other. `run_without_kv` computes the whole prefix and
the block anew in every forward, as the decode loops published with the models do.

Requests are greedy and end by their length only. KV pool and row state are made before the time is taken; what a device
does on its first use falls into it, so run once before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.packing import pack_bits, pack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.batch import Batch, Chunk, build_batch, forward_input, next_chunks
from worker_svc.kv.pages import PagePool
from worker_svc.kv.slots import SlotTable
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.rounds import Session
from worker_svc.rows import Phase, Row, SlotColumns, Start
from worker_svc.starts import StartRules, decode_start
from worker_svc.step import StepRows, flagged_rows, step, step_rows


@dataclass
class PlainResult:
    """Generated token ids by prompt, and what they took."""

    token_ids: list[list[int]] = field(default_factory=list)
    forwards: int = 0
    row_forwards: int = 0  # rows that denoised, summed over the forwards
    prefill_tokens: int = 0  # prefix positions computed, each as often as it was
    wall_s: float = 0.0
    device_ms: float = 0.0  # see ModelRunner.finish


def run_plain(
    runner: ModelRunner,
    config: LoopConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    algorithm: str = "LowConfidence",
    params: Mapping[str, float] | None = None,
    *,
    num_rows: int,
) -> PlainResult:
    """`num_rows` requests together; the next prompt takes the place of one that ended. Slots and pages are as many as
    that takes, whatever `config` says. Raises BadStart for a request that a worker would refuse."""
    starts = _starts(runner, config, prompts, max_new_tokens, algorithm, params)
    return _Loop(runner, config, starts, num_rows, keeps_kv=True).run(max_new_tokens)


def run_one_at_a_time(
    runner: ModelRunner,
    config: LoopConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    algorithm: str = "LowConfidence",
    params: Mapping[str, float] | None = None,
) -> PlainResult:
    """`run_plain` with one row."""
    return run_plain(runner, config, prompts, max_new_tokens, algorithm, params, num_rows=1)


def run_without_kv(
    runner: ModelRunner,
    config: LoopConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    algorithm: str = "LowConfidence",
    params: Mapping[str, float] | None = None,
) -> PlainResult:
    """One request after the other, all blocks up to the current one in every forward. No block has a forward for its
    KV alone: with an algorithm that does not edit, it is done when its last mask is filled."""
    starts = _starts(runner, config, prompts, max_new_tokens, algorithm, params)
    return _Loop(runner, config, starts, num_rows=1, keeps_kv=False).run(max_new_tokens)


def _starts(
    runner: ModelRunner,
    config: LoopConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    algorithm: str,
    params: Mapping[str, float] | None,
) -> list[Start]:
    """The prompts as a worker decodes them."""
    size, starts = config.block_size, []
    rules = StartRules(size, runner.vocab_size, config.max_blocks)
    for index, prompt in enumerate(prompts):
        num_tail = len(prompt) % size
        message = pb.StartRow(
            request_id=str(index),
            prompt_length=len(prompt),
            prefix_ids=pack_ids(prompt[: len(prompt) - num_tail]),
            block_index=len(prompt) // size,
            block_ids=pack_ids([*prompt[len(prompt) - num_tail :], *[config.mask_token_id] * (size - num_tail)]),
            block_mask=pack_bits([False] * num_tail + [True] * (size - num_tail)),
            algorithm=algorithm,
            algorithm_params=params,
            sampling=pb.SamplingParams(top_p=1.0),
            tokens_left=max_new_tokens,
        )
        starts.append(decode_start(message, rules))
    return starts


class _Loop:
    """All the state of a run; used once."""

    def __init__(
        self, runner: ModelRunner, config: LoopConfig, starts: list[Start], num_rows: int, keeps_kv: bool
    ) -> None:
        pages_per_slot = -(-max((start.limit_position for start in starts), default=0) // config.page_size)
        self.runner = runner
        self.config = config
        self.starts = starts
        self.num_rows = num_rows
        self.keeps_kv = keeps_kv
        self.kv = KVStore.allocate(
            num_layers=runner.num_layers,
            num_pages=num_rows * pages_per_slot,
            page_size=config.page_size,
            num_kv_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            num_slots=num_rows,
            max_pages_per_slot=pages_per_slot,
            dtype=runner.dtype,
            device=runner.device,
        )
        self.slots = SlotTable(self.kv, PagePool(self.kv.num_pages))
        self.columns = SlotColumns(num_rows, config.block_size, runner.device)
        self.session = Session("plain", 1)
        self.rows: list[Row] = []
        self.batch: Batch | None = None
        self.step_rows: StepRows | None = None
        self.done_blocks: dict[str, list[Tensor]] = {
            start.name.key.request_id: [] for start in starts
        }  # int64 [B] each
        self.result = PlainResult()

    @torch.inference_mode()
    def run(self, max_new_tokens: int) -> PlainResult:
        started_at = time.perf_counter()
        waiting = deque(self.starts)
        while waiting or self.rows:
            while waiting and len(self.rows) < self.num_rows:
                self._admit(waiting.popleft())
            if done := self._forward():
                self._settle(done)
        for start, blocks in zip(self.starts, self.done_blocks.values(), strict=True):
            first = start.prompt_length % self.config.block_size
            self.result.token_ids.append(torch.cat(blocks)[first : first + max_new_tokens].tolist())
        self.result.wall_s = time.perf_counter() - started_at
        return self.result

    def _admit(self, start: Start) -> None:
        slot = self.slots.open(start.limit_position)
        assert slot is not None
        self.columns.write([slot], [start])
        row = Row.resident(start, self.session, slot)
        if not self.keeps_kv:
            row.phase = Phase.DENOISE
            row.prefix = start.prefix.to(self.runner.device)
            # To the algorithm every block is a last one, whose KV nobody will read.
            self.columns.limit_position[slot] = 0
        self.rows.append(row)
        self.batch = None

    def _forward(self) -> list[Row]:
        """One forward and step; the rows whose block is done."""
        chunks = (
            next_chunks(self.rows, self.config.chunked_prefill_size // self.config.block_size)
            if self.keeps_kv
            else [Chunk(row, 0, row.block_index) for row in self.rows if row.block_index]
        )
        denoising = [row for row in self.rows if row.phase is Phase.DENOISE]
        if self.batch is None or len(denoising) > len(self.batch.rows):
            self.batch = build_batch(denoising, self.columns)
            self.step_rows = None
        self.slots.write_pages()
        logits = self.runner.forward(forward_input(self.batch, chunks, self.columns), self.kv)
        if self.step_rows is None:
            self.step_rows = step_rows(denoising, self.batch.slots, [True] * len(denoising), self.columns)
        flags = step(self.step_rows, logits, self.columns, self.config.mask_token_id) if denoising else None
        self.result.device_ms += self.runner.finish()
        self.result.forwards += 1
        self.result.row_forwards += len(denoising)
        self.result.prefill_tokens += sum(chunk.num_blocks for chunk in chunks) * self.config.block_size
        flagged = flagged_rows(flags) if flags is not None else []
        if any(each.bad_numerics or each.over_bound for _, each in flagged):
            raise RuntimeError("logits are not finite, or a block is over its bound of forwards")
        return [denoising[place] for place, flags in flagged if flags.done]

    def _settle(self, done: list[Row]) -> None:
        """Keep the ids of done blocks; their rows begin the next block, or leave."""
        device, going_on = self.runner.device, []
        done_ids = self.columns.ids[torch.tensor([row.slot for row in done], device=device)]
        for row, ids in zip(done, done_ids, strict=True):
            self.done_blocks[row.name.key.request_id].append(ids)
            row.block_index += 1
            if row.block_index * self.config.block_size >= row.limit_position:
                self.slots.close(row.slot)
                self.rows.remove(row)
                continue
            going_on.append(row.slot)
            if not self.keeps_kv:
                row.prefix = torch.cat([row.prefix, ids[None]])
        if going_on:
            slots = torch.tensor(going_on, device=device)
            self.columns.next_blocks(done[0].algorithm, slots, self.config.mask_token_id)
        self.batch = None

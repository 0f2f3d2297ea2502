"""How often a checkpoint is right, and in how many forwards: the worker's own loop, one request at a time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from common.model_folder import read_model_folder
from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tools.tiny.tasks import Problem
from tools.tiny.tokens import TURN
from worker_svc.algorithms import ALGORITHMS
from worker_svc.attention import ATTENTION_BACKENDS
from worker_svc.denoise import DenoiseLoop
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import TorchModelRunner
from worker_svc.models.loading import load_model
from worker_svc.run_alone import run_fdfo
from worker_svc.wire import decode_round

MAX_NEW_TOKENS = 96
CONTEXT_LENGTH = 256


@dataclass
class Figures:
    """What came of some problems with one algorithm."""

    algorithm: str
    num_right: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by task
    num_asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    forwards: list[int] = field(default_factory=list)  # of each block, the one for its KV included

    def percentile(self, percent: int) -> int:
        """Of the forwards per block."""
        return sorted(self.forwards)[(len(self.forwards) - 1) * percent // 100]

    def mean(self) -> float:
        """Of the forwards per block."""
        return statistics.fmean(self.forwards)

    def text(self) -> str:
        """One line."""
        tasks = ", ".join(f"{task} {self.num_right[task]}/{count}" for task, count in sorted(self.num_asked.items()))
        return (
            f"{self.algorithm}: {sum(self.num_right.values())} of {sum(self.num_asked.values())} exact ({tasks}); "
            f"forwards per block: mean {self.mean():.2f}, 10th percentile {self.percentile(10)}, "
            f"90th {self.percentile(90)}, most {max(self.forwards)}"
        )


def evaluate(path: Path, problems: Iterable[Problem], algorithm: str) -> Figures:
    """Answers by greedy decoding of the checkpoint in `path`, compared with the known ones letter by letter."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    worker = _Worker(path, algorithm)
    figures = Figures(algorithm)
    for problem in problems:
        answer = worker.answer(tokenizer.encode(TURN.format(prompt=problem.prompt)).ids, figures.forwards)
        figures.num_asked[problem.task] += 1
        figures.num_right[problem.task] += tokenizer.decode(answer) == problem.answer
    return figures


class _Worker:
    """A loop with one row, and the scheduler's side of its rounds."""

    def __init__(self, path: Path, algorithm: str) -> None:
        self.folder = read_model_folder(path)
        self.algorithm = algorithm
        size = self.folder.block_size
        config = LoopConfig(
            fingerprint=self.folder.fingerprint,
            block_size=size,
            mask_token_id=self.folder.mask_token_id,
            context_length=CONTEXT_LENGTH,
            page_size=size,
            num_slots=1,
            num_pages=CONTEXT_LENGTH // size,
            chunked_prefill_size=CONTEXT_LENGTH,
        )
        model = load_model(self.folder, dtype=torch.float32, device="cpu")
        self.loop = DenoiseLoop(TorchModelRunner(model, ATTENTION_BACKENDS["torch"]()), config, lambda: 0.0)
        self.num_rounds = 0

    def answer(self, prompt: list[int], forwards: list[int]) -> list[int]:
        """The ids before the stop token. For each block its forwards are added to `forwards`."""
        size = self.folder.block_size
        tail = prompt[len(prompt) // size * size :]
        start = pb.StartRow(
            request_id=str(self.num_rounds),
            attempt=1,
            prompt_length=len(prompt),
            prefix_ids=pack_ids(prompt[: len(prompt) - len(tail)]),
            block_index=len(prompt) // size,
            block_ids=pack_ids(tail + [self.folder.mask_token_id] * (size - len(tail))),
            block_mask=pack_bits([False] * len(tail) + [True] * (size - len(tail))),
            algorithm=self.algorithm,
            sampling=pb.SamplingParams(top_p=1.0),
            stop_token_ids=self.folder.stop_token_ids,
            tokens_left=MAX_NEW_TOKENS,
        )
        name = pb.RowNames(request_ids=[start.request_id], sample_indexes=[0], attempts=[1])
        row = self._round(starts=[start])
        ids: list[int] = []
        num_forwards = row.forwards[0]
        while True:
            if row.accept_lengths[0]:
                ids += unpack_ids(row.done_ids)
                forwards.append(num_forwards)
                num_forwards = 0
            if row.statuses[0] == pb.ROW_STATUS_ENDED:
                break
            row = self._round(continues=name)
            num_forwards += row.forwards[0]
        if not ALGORITHMS[self.algorithm].edits:
            forwards[-1] += 1  # the block that ends a request is spared the forward for its KV
        return ids[len(tail) : row.end_positions[0] - len(prompt) + len(tail)]

    def _round(self, **fields: Any) -> pb.RowReplies:
        """One round until its row is done."""
        self.num_rounds += 1
        request = pb.RunRoundRequest(
            scheduler_id="evaluate",
            generation=1,
            worker_epoch=self.loop.epoch,
            fingerprint=self.folder.fingerprint,
            round_id=self.num_rounds,
            acked_round_id=self.num_rounds - 1,
            mode=pb.MODE_FDFO,
            **fields,
        )
        rows = run_fdfo(self.loop, decode_round(request, self.loop.start_rules)).rows
        if rows.errors:
            raise RuntimeError(rows.errors[0])
        return rows

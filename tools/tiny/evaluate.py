"""How often a checkpoint is right, and in how many forwards: the worker's own loop, one request at a time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from common.model_folder import read_model_folder
from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from tools.tiny.tasks import Problem
from tools.tiny.tokens import TURN
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
    wrong: list[tuple[Problem, str]] = field(default_factory=list)  # and what was said instead

    def percentile(self, percent: int) -> float:
        """Of the forwards per block."""
        ordered = sorted(self.forwards)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    def text(self) -> str:
        """One line."""
        tasks = ", ".join(f"{task} {self.num_right[task]}/{count}" for task, count in sorted(self.num_asked.items()))
        return (
            f"{self.algorithm}: {sum(self.num_right.values())} of {sum(self.num_asked.values())} exact ({tasks}); "
            f"forwards per block: mean {statistics.fmean(self.forwards):.2f}, 10th percentile {self.percentile(10)}, "
            f"90th {self.percentile(90)}, most {max(self.forwards)}"
        )


def evaluate(
    path: Path, problems: Sequence[Problem], algorithm: str, params: Mapping[str, float] | None = None
) -> Figures:
    """Answers by greedy decoding of the checkpoint in `path`, compared with the known ones letter by letter."""
    folder = read_model_folder(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = folder.block_size
    config = LoopConfig(
        fingerprint=folder.fingerprint,
        block_size=size,
        mask_token_id=folder.mask_token_id,
        context_length=CONTEXT_LENGTH,
        page_size=size,
        num_slots=1,
        num_pages=CONTEXT_LENGTH // size,
        chunked_prefill_size=CONTEXT_LENGTH,
        fused_commit=False,
    )
    runner = TorchModelRunner(load_model(folder, dtype=torch.float32, device="cpu"), ATTENTION_BACKENDS["torch"]())
    loop = DenoiseLoop(runner, config, lambda: 0.0)
    figures, next_round = Figures(algorithm), 1
    for number, problem in enumerate(problems):
        prompt = tokenizer.encode(TURN.format(prompt=problem.prompt)).ids
        first = len(prompt) // size * size
        tail = prompt[first:]
        start = pb.StartRow(
            request_id=str(number),
            attempt=1,
            prompt_length=len(prompt),
            prefix_ids=pack_ids(prompt[:first]),
            block_index=first // size,
            block_ids=pack_ids(tail + [folder.mask_token_id] * (size - len(tail))),
            block_mask=pack_bits([False] * len(tail) + [True] * (size - len(tail))),
            algorithm=algorithm,
            algorithm_params=params,
            sampling=pb.SamplingParams(top_p=1.0),
            stop_token_ids=folder.stop_token_ids,
            tokens_left=MAX_NEW_TOKENS,
        )
        name = pb.RowNames(request_ids=[start.request_id], sample_indexes=[0], attempts=[1])
        tokens, forwards, rows = list(tail), 0, None
        while rows is None or rows.statuses[0] != pb.ROW_STATUS_ENDED:
            request = pb.RunRoundRequest(
                scheduler_id="evaluate",
                generation=1,
                worker_epoch=loop.epoch,
                fingerprint=config.fingerprint,
                round_id=next_round,
                acked_round_id=next_round - 1,
                mode=pb.MODE_FDFO,
                starts=[start] if rows is None else [],
                continues=None if rows is None else name,
            )
            next_round += 1
            rows = run_fdfo(loop, decode_round(request, loop.start_rules)).rows
            if rows.errors[0] if rows.errors else False:
                raise RuntimeError(f"{problem.prompt}: {rows.errors[0]}")
            forwards += rows.forwards[0]
            if rows.accept_lengths[0]:
                tokens = tokens[: len(tokens) // size * size] if len(tokens) % size else tokens
                tokens += unpack_ids(rows.done_ids)
                # A block that ends its request is spared the forward for its KV where nothing is edited.
                is_spared = rows.statuses[0] == pb.ROW_STATUS_ENDED and algorithm != "JointThreshold"
                figures.forwards.append(forwards + is_spared)
                forwards = 0
        said = tokenizer.decode(tokens[len(tail) : rows.end_positions[0] - first])
        figures.num_asked[problem.task] += 1
        figures.num_right[problem.task] += said == problem.answer
        if said != problem.answer:
            figures.wrong.append((problem, said))
    return figures

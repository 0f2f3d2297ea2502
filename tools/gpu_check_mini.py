"""Parts of tools/gpu_check.py: the worker's loop over a model of LLaDA2-mini's shape, with random weights.

The loop is the real one, with slots, pages, algorithms and replies; a feeder in its thread stands for a scheduler, so
that gRPC and its threads are not in the times. Rows denoise behind 992 tokens, each at another step of its block, 13
steps and the commit; under FDFO a round so ends with about every forward, the most that the host can have to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tools import gpu_check_targets

if TYPE_CHECKING:
    import torch

    from fdfo.worker.v1 import worker_pb2 as pb
    from worker_svc.denoise import DenoiseLoop
    from worker_svc.loop_config import LoopConfig
    from worker_svc.model_runner import TorchModelRunner
    from worker_svc.models.base import BlockModel
    from worker_svc.rounds import RoundRequest

MINI = {
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 600000.0,
    "rms_norm_eps": 1e-6,
    "use_qk_norm": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
BLOCK_SIZE = 32
DENOISING_STEPS = 13
FORWARDS_PER_BLOCK = DENOISING_STEPS + 1  # with the commit
CONTEXT_BLOCKS = 31
MAX_BLOCKS = 64
MASK_ID = 1
FRACTION = 0.85  # --mem-fraction-static


@dataclass(frozen=True)
class Scale:
    """What is measured, and for how long."""

    sizes: dict[str, Any]
    rows: tuple[int, ...]
    num_forwards: int  # of each measurement
    copy_bytes: int  # to measure the bandwidth with
    deadline_s: float  # after this nothing new is measured
    has_targets: bool  # whether the figures are judged


FULL = Scale(MINI, (1, 4, 16, 64, 128), 5 * FORWARDS_PER_BLOCK, 4 << 30, 420.0, has_targets=True)
TINY = Scale(
    MINI
    | {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    (1, 3),
    2 * FORWARDS_PER_BLOCK,
    1 << 20,
    60.0,
    has_targets=False,
)


def steps_done(row: int) -> tuple[int, int]:
    """At which step row `row` begins its block, and the positions that are set by then."""
    steps = row % DENOISING_STEPS
    per_step, rest = divmod(BLOCK_SIZE, DENOISING_STEPS)
    return steps, steps * per_step + min(steps, rest)


class Feeder:
    """A scheduler without a wire: the rows of one measurement, with `in_flight` rounds at the loop."""

    def __init__(self, loop: DenoiseLoop, num_rows: int, mode: pb.Mode, in_flight: int, name: str) -> None:
        from fdfo.worker.v1 import worker_pb2 as pb
        from worker_svc.rows import RowKey, RowName

        self.loop, self.mode, self.in_flight, self.name = loop, mode, in_flight, name
        self.names = [RowName(RowKey(f"row-{row}", 0), 1) for row in range(num_rows)]
        self.num_sent = self.num_replies = 0
        self.good = {pb.ROW_STATUS_RUNNING, pb.ROW_STATUS_PREFILLING}

    def tick(self) -> None:
        """Send what is due, then a boundary and a forward. Raises RuntimeError for a row that does not run."""
        while self.num_sent - self.num_replies < self.in_flight:
            self.loop.submit(self._round(), self._take)
        self.loop.tick()

    def end(self) -> None:
        """Give the rows back and wait for the rounds that are under way."""
        from fdfo.worker.v1 import worker_pb2 as pb

        session = self.loop.sessions[self.name]
        self.good = {pb.ROW_STATUS_RELEASED, pb.ROW_STATUS_SLOT_MISSING}
        self.loop.release(session, self.names)
        while self.num_replies < self.num_sent:
            self.loop.tick()

    def _round(self) -> RoundRequest:
        from worker_svc.rounds import RoundRequest
        from worker_svc.starts import decode_starts

        self.num_sent += 1
        starts = [self._start(row) for row in range(len(self.names))] if self.num_sent == 1 else []
        return RoundRequest(
            scheduler_id=self.name,
            generation=1,
            worker_epoch=self.loop.epoch,
            fingerprint=self.loop.config.fingerprint,
            round_id=self.num_sent,
            acked_round_id=self.num_replies,
            mode=self.mode,
            max_forwards=0,
            max_round_ms=1000,
            releases=[],
            starts=decode_starts(starts, self.loop.start_rules),
            continues=[] if starts else self.names,
        )

    def _start(self, row: int) -> pb.StartRow:
        """Random context, the same for a row in all measurements, so that the prefix cache has it after the first."""
        from random import Random

        from common.packing import pack_bits, pack_ids
        from fdfo.worker.v1 import worker_pb2 as pb

        vocab_size, random = self.loop.runner.vocab_size, Random(row)
        steps, num_set = steps_done(row)
        ids = random.choices(range(2, vocab_size), k=(CONTEXT_BLOCKS + 1) * BLOCK_SIZE)
        first = CONTEXT_BLOCKS * BLOCK_SIZE
        return pb.StartRow(
            request_id=f"row-{row}",
            attempt=1,
            prompt_length=first,
            prefix_ids=pack_ids(ids[:first]),
            block_index=CONTEXT_BLOCKS,
            block_ids=pack_ids([*ids[first : first + num_set], *[MASK_ID] * (BLOCK_SIZE - num_set)]),
            block_mask=pack_bits([place >= num_set for place in range(BLOCK_SIZE)]),
            step_count=steps,
            algorithm="LowConfidenceStatic",
            algorithm_params={"denoising_steps": DENOISING_STEPS},
            sampling=pb.SamplingParams(top_p=1.0),
            tokens_left=(MAX_BLOCKS - CONTEXT_BLOCKS) * BLOCK_SIZE,
        )

    def _take(self, reply: object) -> None:
        from fdfo.worker.v1 import worker_pb2 as pb

        self.num_replies += 1
        if not isinstance(reply, pb.RunRoundResponse):
            raise RuntimeError(f"round refused: {reply}")
        if not self.good.issuperset(reply.rows.statuses):
            raise RuntimeError(f"a row does not run: {list(reply.rows.statuses)} {dict(reply.rows.errors)}")


def measure(feeder: Feeder, num_forwards: int) -> dict[str, Any]:
    """`num_forwards` forwards of rows that all denoise: the device's time and the host's."""
    loop, totals = feeder.loop, feeder.loop.totals
    prefill_tokens = -1
    while totals.prefill_tokens != prefill_tokens:  # until a forward computes no prompt
        prefill_tokens = totals.prefill_tokens
        feeder.tick()
    settled = totals.forwards + FORWARDS_PER_BLOCK // 2
    while totals.forwards < settled:
        feeder.tick()
    before = type(totals)()
    before.CopyFrom(totals)
    started_at = time.perf_counter()
    while totals.forwards < before.forwards + num_forwards:
        feeder.tick()
    wall_ms = (time.perf_counter() - started_at) * 1000
    device_ms = totals.device_ms - before.device_ms
    count, rounds = totals.forwards - before.forwards, totals.rounds - before.rounds
    tokens = len(feeder.names) * BLOCK_SIZE
    assert loop.pool.usage().held > 0
    return {
        "forward_ms": round(device_ms / count, 3),
        "wall_ms_per_forward": round(wall_ms / count, 3),
        "device_busy": round(device_ms / wall_ms, 4),
        "host_ms_per_round": round((wall_ms - device_ms) / max(rounds, 1), 3),
        "rounds_per_forward": round(rounds / count, 2),
        "tokens_per_s": round(tokens / FORWARDS_PER_BLOCK * count / wall_ms * 1000, 1),
    }


@contextmanager
def experts_counted(counts: list[int]) -> Iterator[None]:
    """Every layer of experts that runs adds to `counts` how many of its experts got a token."""
    from worker_svc.models import decoder, experts

    def counting(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *parameters: torch.Tensor) -> Any:
        counts.append(int(chosen.flatten().bincount().count_nonzero()))
        return experts.run_experts(x, weights, chosen, *parameters)  # type: ignore[arg-type]

    with patch.object(decoder, "run_experts", counting):
        yield


@dataclass
class MiniCheck:
    """The model and what is measured with it; both are made when the first part needs them."""

    device: str
    scale: Scale
    started_at: float = field(default_factory=time.monotonic)
    why_torch_attention: str = ""  # instead of FlashInfer

    def parts(self) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
        """Names and what to run, in order."""
        by_rows = [(f"mini_{rows}_rows", lambda rows=rows: self.check_rows(rows)) for rows in self.scale.rows]
        return [("mini_model", self.check_model), *by_rows, ("mini_memory", self.check_memory)]

    @cached_property
    def model(self) -> BlockModel:
        from tools.gpu_check import random_model
        from tools.gpu_check_forward import dtype_of

        return random_model(self.scale.sizes, dtype_of(self.device), self.device)

    @cached_property
    def runner(self) -> TorchModelRunner:
        from tools import gpu_check, gpu_check_forward
        from worker_svc.model_runner import TorchModelRunner

        try:
            attention = gpu_check_forward.flash_infer(self.model)
        except gpu_check_forward.NotHere as error:
            attention, self.why_torch_attention = gpu_check.attention(), str(error)
        return TorchModelRunner(self.model, attention)

    @cached_property
    def bytes_per_s(self) -> float:
        """Read and written by a copy within the device."""
        import torch

        source = torch.ones(self.scale.copy_bytes, dtype=torch.uint8, device=self.device)
        target, repeats = torch.empty_like(source), 10
        target.copy_(source)
        self.wait()
        started_at = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source)
        self.wait()
        return 2 * source.nbytes * repeats / (time.perf_counter() - started_at)

    def wait(self) -> None:
        """For all that was launched."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def config(self, num_rows: int) -> LoopConfig:
        """Of the loop; the pool has room for the contexts of the rows that ran before."""
        from worker_svc.loop_config import LoopConfig

        return LoopConfig(
            fingerprint="mini",
            block_size=BLOCK_SIZE,
            mask_token_id=MASK_ID,
            context_length=MAX_BLOCKS * BLOCK_SIZE,
            page_size=BLOCK_SIZE,
            num_slots=num_rows,
            num_pages=num_rows * MAX_BLOCKS,
            chunked_prefill_size=64 * BLOCK_SIZE,
            fused_commit=True,
        )

    def check_model(self) -> dict[str, Any]:
        """The model's size, the seconds it took to make, and the device's copy bandwidth."""
        started_at = time.perf_counter()
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.wait()
        return {
            "parameters": num_parameters,
            "attention": type(self.runner.attention).__name__,
            "made_s": round(time.perf_counter() - started_at, 2),
            "copy_gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "ok": True,
        }

    def check_rows(self, num_rows: int) -> dict[str, Any]:
        """FDFO with one and two rounds in flight and SYNC, with every way to launch a forward; and the floor: bytes
        that must be read / copy bandwidth."""
        from worker_svc.denoise import DenoiseLoop

        loop = DenoiseLoop(self.runner, self.config(num_rows), time.monotonic)
        result: dict[str, Any] = {"rows": num_rows, "context_tokens": (CONTEXT_BLOCKS + 1) * BLOCK_SIZE}
        for way, get_ready in self.ways().items():
            why_not = self.late() or get_ready(loop)
            result[way] = {"skipped": why_not} if why_not else self.measure_modes(way, loop, result)
        self.runner.graphs = None  # their pool goes with the loop
        judged = gpu_check_targets.judge(result) if self.scale.has_targets else {"ok": True}
        return result | judged | {"ok": judged["ok"] and loop.pool.usage().held == 0}

    def ways(self) -> dict[str, Callable[[DenoiseLoop], str]]:
        """How forwards are launched, and what gets a loop ready for it or says why it cannot be."""
        return {"eager": lambda loop: "", "graphs": self.capture}

    def capture(self, loop: DenoiseLoop) -> str:
        """Graphs of the loop's forwards; why not, if so."""
        from tools import gpu_check_forward
        from worker_svc.cuda_graphs import ForwardGraphs, why_not_captured

        runner = self.runner
        if self.why_torch_attention:
            return f"torch's attention cannot be captured, and {self.why_torch_attention}"
        if reason := why_not_captured(runner):
            return reason
        max_units = -(-loop.config.num_slots * 3 // 2)
        capture = gpu_check_forward.capture_on(self.device)
        runner.graphs = ForwardGraphs(self.model, runner.attention, loop.kv, BLOCK_SIZE, max_units, capture)
        return ""

    def measure_modes(self, way: str, loop: DenoiseLoop, result: dict[str, Any]) -> dict[str, Any]:
        """By mode; `result` gets the floor once."""
        from fdfo.worker.v1 import worker_pb2 as pb

        modes: dict[str, Any] = {}
        for mode, wire_mode, in_flight in (
            ("fdfo_k1", pb.MODE_FDFO, 1),
            ("fdfo_k2", pb.MODE_FDFO, 2),
            ("sync", pb.MODE_SYNC, 1),
        ):
            if why_not := self.late():
                modes[mode] = {"skipped": why_not}
                continue
            feeder = Feeder(loop, result["rows"], wire_mode, in_flight, f"{way}-{mode}")
            modes[mode] = measure(feeder, self.scale.num_forwards)
            if "floor_ms" not in result:
                result |= self.floor(feeder)
            modes[mode]["over_floor"] = round(modes[mode]["forward_ms"] / result["floor_ms"], 2)
            feeder.end()
        return modes

    def floor(self, feeder: Feeder) -> dict[str, Any]:
        """Milliseconds to read the weights that a forward touches and the KV of its rows, at the copy's bandwidth."""
        counts: list[int] = []
        with experts_counted(counts):
            feeder.tick()
        experts = dict.fromkeys(("gate_up", "down"), 0)
        weight_bytes = 0.0
        for name, parameter in self.model.named_parameters():
            kind = name.rpartition(".")[2]
            if kind in experts and parameter.dim() == 3:
                experts[kind] += parameter.nbytes
            elif kind != "embedding":  # a row per token only
                weight_bytes += parameter.nbytes
        touched = sum(counts) / len(counts) / self.scale.sizes["num_experts"]
        weight_bytes += touched * sum(experts.values())
        kv = feeder.loop.kv
        kv_bytes = len(feeder.names) * (CONTEXT_BLOCKS + 1) * (kv.k[:, 0].nbytes + kv.v[:, 0].nbytes)
        return {
            "experts_touched": round(touched, 3),
            "weight_gb": round(weight_bytes / 1e9, 3),
            "kv_gb": round(kv_bytes / 1e9, 3),
            "floor_ms": round((weight_bytes + kv_bytes) / self.bytes_per_s * 1000, 3),
        }

    def check_memory(self) -> dict[str, Any]:
        """The pool that --mem-fraction-static gives is there, and a full batch runs over it."""
        from pathlib import Path

        import torch

        from worker_svc.denoise import DenoiseLoop
        from worker_svc.settings import WorkerSettings
        from worker_svc.start_up import sized_by_memory
        from worker_svc.warm_up import warm_up

        if self.device == "cpu":
            return {"skipped": "memory of a GPU only", "ok": True}
        torch.cuda.reset_peak_memory_stats()
        settings = WorkerSettings(model_path=Path("mini"), mem_fraction_static=FRACTION)
        config = sized_by_memory(self.runner, self.config(num_rows=64), settings)
        warm_up(DenoiseLoop(self.runner, config, time.monotonic), full=True)
        free, total = (round(figure / 1e9, 2) for figure in torch.cuda.mem_get_info())
        return {"pool_tokens": config.num_pages * BLOCK_SIZE, "free_gb": free, "total_gb": total, "ok": True}

    def late(self) -> str:
        """Why nothing more is measured, if so."""
        is_late = time.monotonic() - self.started_at > self.scale.deadline_s
        return f"over {self.scale.deadline_s:g} s since the start" if is_late else ""

"""From settings to a warm loop: model, the other ranks, memory for the pool."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from common.architectures import ARCHITECTURES, CheckpointError
from common.fingerprint import short_fingerprint
from common.logging import configure_logging
from common.model_folder import ModelFolder
from worker_svc import simulated
from worker_svc.attention import ATTENTION_BACKENDS, AttentionUnavailable
from worker_svc.cuda_graphs import capture_forwards, cuda_capture
from worker_svc.denoise import DenoiseLoop
from worker_svc.fault_hook import loop_type
from worker_svc.loop_config import LoopConfig, SettingsError
from worker_svc.memory import measure_memory, page_bytes_of, pool_pages
from worker_svc.model_runner import ModelRunner, TorchModelRunner, forget_pool
from worker_svc.models.loading import load_model
from worker_svc.models.shard import WHOLE, Shard
from worker_svc.ranks import Ranks, missing_interface
from worker_svc.settings import WorkerSettings
from worker_svc.tensor_parallel import Group, LeadingRunner, follow
from worker_svc.warm_up import WARM_UP_LIMIT_S, pages_for_full, warm_up

PROGRESS_EVERY_S = 2.0

log = structlog.get_logger()


def check_tensor_parallel(folder: ModelFolder, settings: WorkerSettings) -> None:
    """Raises SettingsError naming the flag for a model or a machine that cannot be split so."""
    size = settings.tp_size
    if size == 1:
        return
    if not folder.has_weights:
        raise SettingsError(f"--tp-size: {folder.path} is simulated; leave it out")
    misfit = Shard(0, size).misfit(ARCHITECTURES[folder.architecture].backbone(folder.config))
    if misfit is not None:
        raise SettingsError(f"--tp-size {size}: {misfit}")
    if settings.device.startswith("cuda:"):
        raise SettingsError(f"--device {settings.device}: with --tp-size say cuda; the ranks take cuda:0 and following")
    if settings.device == "cuda" and torch.cuda.device_count() < size:
        raise SettingsError(f"--tp-size {size}: there are {torch.cuda.device_count()} CUDA devices")
    if interface := missing_interface():
        raise SettingsError(f"GLOO_SOCKET_IFNAME: no network interface {interface} here; correct it or leave it out")


def device_of(settings: WorkerSettings, shard: Shard) -> torch.device:
    """Where this rank computes."""
    device = torch.device(settings.device)
    return torch.device("cuda", shard.rank) if shard.size > 1 and device.type == "cuda" else device


def load_runner(folder: ModelFolder, settings: WorkerSettings, shard: Shard = WHOLE) -> ModelRunner:
    """The folder's model, or a rank's part, on its device. Raises SettingsError naming the flag, or CheckpointError."""
    device = device_of(settings, shard)
    if not folder.has_weights:
        if device.type != "cpu" or settings.dtype != "auto":
            raise SettingsError(f"--device, --dtype: {folder.path} is simulated; leave them out")
        time_line = simulated.TimeLine(time.monotonic, time.sleep, simulated.usual_overshoot_s())
        return simulated.SimulatedRunner(folder, time_line)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"--device {settings.device}: this torch ({torch.__version__}) finds no CUDA device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    last_report_at = time.monotonic()

    def on_progress(bytes_read: int, bytes_total: int) -> None:
        nonlocal last_report_at
        if time.monotonic() - last_report_at > PROGRESS_EVERY_S:
            last_report_at = time.monotonic()
            log.info("loading", rank=shard.rank, mib_read=bytes_read >> 20, mib_total=bytes_total >> 20)

    dtype = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    model = load_model(folder, dtype=dtype, device=device, shard=shard, on_progress=on_progress)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what the warm-up takes is measured from here on
    try:
        attention = ATTENTION_BACKENDS[settings.attention_backend].for_model(model, settings.batch_invariant)
    except AttentionUnavailable as error:
        raise SettingsError(f"--attention-backend {error}") from error
    return TorchModelRunner(model, attention, batch_invariant=settings.batch_invariant, logit_shift=folder.logit_shift)


def run_rank(rank: int, rendezvous: Path, folder: ModelFolder, settings: WorkerSettings) -> None:
    """A rank of --tp-size other than 0, in its own process, until rank 0 stops it."""
    configure_logging(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(service="worker", rank=rank)
    torch.set_num_threads(1 if settings.batch_invariant else settings.num_threads)
    shard = Shard(rank, settings.tp_size)
    device = device_of(settings, shard)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group = Group(shard, device, rendezvous, settings.max_running_requests)
        follow(load_runner(folder, settings, shard), group)
    except (CheckpointError, SettingsError, torch.OutOfMemoryError) as error:
        sys.exit(f"worker: rank {rank}: {error}")
    group.leave()


def sized_by_memory(runner: ModelRunner, config: LoopConfig, settings: WorkerSettings) -> LoopConfig:
    """With the pages that weights and a warm-up of a full batch leave on a CUDA device. Raises OutOfRoom."""
    trial = DenoiseLoop(runner, replace(config, num_pages=pages_for_full(config)), time.monotonic)
    warm_up(trial, full=True)
    del trial
    forget_pool(runner)
    memory = runner.measure_memory() if isinstance(runner, LeadingRunner) else measure_memory(runner.device)
    page_bytes = page_bytes_of(runner.num_layers, config.page_size, runner.num_kv_heads, runner.head_dim, runner.dtype)
    num_pages = pool_pages(memory, settings.mem_fraction_static, page_bytes, config)
    log.info(
        "kv_pool_sized",
        total_mib=memory.total_bytes >> 20,
        free_mib=memory.free_bytes >> 20,
        warm_up_mib=memory.warm_up_bytes >> 20,
        kv_mib=num_pages * page_bytes >> 20,
    )
    return replace(config, num_pages=num_pages)


def start_ranks(settings: WorkerSettings, folder: ModelFolder) -> Ranks | None:
    """The processes of the other ranks; None without. Raises SettingsError naming the flag."""
    check_tensor_parallel(folder, settings)
    return Ranks(settings.tp_size, run_rank, folder, settings) if settings.tp_size > 1 else None


def load_loop(
    settings: WorkerSettings, folder: ModelFolder, config: LoopConfig, ranks: Ranks | None = None
) -> DenoiseLoop:
    """The folder's model behind a warm loop, with `ranks` that compute too. Raises SettingsError naming the flag, or
    CheckpointError. Memory that runs out is a SettingsError that says what to change."""
    torch.set_num_threads(1 if settings.batch_invariant else settings.num_threads)
    started_at = time.monotonic()
    try:
        loop = _make_loop(settings, folder, config, ranks)
        loaded_at = time.monotonic()
        log.info("warming_up", limit_s=WARM_UP_LIMIT_S)
        warm_up(loop)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        raise SettingsError(
            f"out of memory on {settings.device}: {text[:200]}; lower --mem-fraction-static, --max-total-tokens, "
            "--max-running-requests or --chunked-prefill-size, take --dtype bfloat16, or raise --tp-size"
        ) from error
    log.info(
        "model_ready",
        model=str(folder.path),
        fingerprint=short_fingerprint(folder.fingerprint),
        dtype=str(loop.runner.dtype),
        device=str(loop.runner.device),
        tp_size=settings.tp_size,
        kv_tokens=loop.config.num_pages * loop.config.page_size,
        num_threads=torch.get_num_threads(),
        load_s=round(loaded_at - started_at, 2),
        warm_up_s=round(time.monotonic() - loaded_at, 2),
    )
    return loop


def _make_loop(settings: WorkerSettings, folder: ModelFolder, config: LoopConfig, ranks: Ranks | None) -> DenoiseLoop:
    shard, group = Shard(0, settings.tp_size), None
    if ranks is not None:
        group = Group(shard, device_of(settings, shard), ranks.rendezvous, config.num_slots)
    runner = load_runner(folder, settings, shard)
    if group is not None:
        runner = LeadingRunner(runner, group)
    if runner.device.type == "cuda" and settings.max_total_tokens is None:
        config = sized_by_memory(runner, config, settings)
    loop = loop_type(os.environ)(runner, config, time.monotonic)
    if runner.device.type == "cuda":
        capture_forwards(runner, loop.kv, config.block_size, settings, cuda_capture(runner.device))
    return loop

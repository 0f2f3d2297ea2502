"""Settings of the worker service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.security_settings import SecuritySettings
from common.settings import setting
from common.tracing_settings import TracingSettings

DEFAULT_MAX_TOTAL_TOKENS = 65_536
ENV_PREFIX = "FDFO_WORKER_"


def default_kv_tokens(context_length: int, page_size: int, max_running_requests: int) -> int:
    """Tokens of the KV pool where --max-total-tokens says nothing: what all slots need, up to a bound, but at least one
    context, rounded up to whole pages."""
    whole_context = -(-context_length // page_size) * page_size
    return max(whole_context, min(max_running_requests * whole_context, DEFAULT_MAX_TOTAL_TOKENS))


def _check_device(text: str) -> None:
    name, colon, index = text.partition(":")
    if name not in ("cpu", "cuda") or (colon and (name == "cpu" or not index.isdecimal())):
        raise ValueError("allowed are cpu, cuda and cuda:N")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(TracingSettings, SecuritySettings):
    """What a worker is started with. Names end in their unit."""

    model_path: Path = setting(help="folder of the model in the published format", metavar="DIR")
    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = setting(50052, help="port to listen on; 0 takes a free one", metavar="PORT", minimum=0, maximum=65535)
    context_length: int | None = setting(
        None, help="tokens of prompt and output together; default: what the model says", metavar="TOKENS", minimum=1
    )
    block_size: int | None = setting(
        None, help="tokens of a block; default: what the model says", metavar="TOKENS", minimum=1
    )
    mask_token_id: int | None = setting(
        None, help="id of the mask token; default: what the model says", metavar="ID", minimum=0
    )
    max_running_requests: int = setting(
        64, help="requests in the batch at one time (slots)", metavar="N", minimum=1, maximum=65536
    )
    page_size: int | None = setting(
        None, help="tokens of a KV page, a multiple of the block size; default: one block", metavar="TOKENS", minimum=1
    )
    max_total_tokens: int | None = setting(
        None,
        help="tokens the KV pool holds; default on CUDA: what --mem-fraction-static leaves, else what all slots need, "
        "at most 65536 (at least one full context)",
        metavar="TOKENS",
        minimum=1,
    )
    mem_fraction_static: float = setting(
        0.85,
        help="CUDA: share of the device's memory for weights and KV pool; the rest is for the forwards",
        metavar="SHARE",
        minimum=0.01,
        maximum=0.99,
    )
    chunked_prefill_size: int = setting(
        2048, help="prompt tokens computed in one forward, all requests together", metavar="TOKENS", minimum=1
    )
    enable_prefix_caching: bool = setting(
        True, help="keep the KV of ended requests while there is room, for prompts that begin alike"
    )
    dtype: str = setting(
        "auto", help="type of weights and KV; auto: what the checkpoint says", choices=("auto", "float32", "bfloat16")
    )
    device: str = setting("cpu", help="cpu, cuda or cuda:N", metavar="DEVICE", check=_check_device)
    tp_size: int = setting(
        1,
        help="tensor parallel: processes, each with its part of the model on a device of its own (cuda:0, cuda:1, ...)",
        metavar="N",
        minimum=1,
        maximum=64,
    )
    attention_backend: str = setting(
        "torch",
        help="kernels that attend over the KV pool; flashinfer: CUDA, bfloat16",
        choices=("torch", "flashinfer"),
    )
    disable_cuda_graph: bool = setting(
        False, help="launch every kernel by itself; graphs need --attention-backend flashinfer"
    )
    cuda_graph_max_bs: int | None = setting(
        None,
        help="most blocks in a captured forward (a fused commit is one more); default: 1.5 * --max-running-requests",
        metavar="N",
        minimum=1,
        maximum=4096,
    )
    fused_commit: bool = setting(
        True, help="FDFO: the forward that commits a block is also its next block's first; not where algorithms edit"
    )
    batch_invariant: bool = setting(
        False, help="logits do not depend on the other requests, bit for bit; slow, for tests"
    )
    early_end: bool = setting(
        True, help="a block ends its request once all up to its first stop token is set; not for algorithms that edit"
    )
    num_threads: int = setting(
        1,
        help="CPU threads of the model; threads that spin beside another process are far slower than one",
        metavar="N",
        minimum=1,
        maximum=1024,
    )
    lease_s: float = setting(
        30.0, help="seconds without a word after which a scheduler's slots are freed", metavar="SECONDS", minimum=0.1
    )
    stall_timeout_s: float = setting(
        300.0,
        help='the health of "" turns NOT_SERVING when the device has been at one thing for this many seconds; longer '
        "than the longest forward",
        metavar="SECONDS",
        minimum=2.0,
    )
    metrics_port: int | None = setting(
        None,
        help="port for Prometheus, at /metrics; 0 takes a free one; default: none",
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    log_format: str = setting("console", help="form of the log on stderr", choices=("console", "json"))
    log_level: str = setting("info", help="least important event to log", choices=("debug", "info", "warning", "error"))
    exit_with_parent: bool = setting(False, help="stop as on SIGTERM when standard input closes")

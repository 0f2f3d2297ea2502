"""Settings of the scheduler service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.folder_files import folder_name
from common.security_settings import SecuritySettings
from common.settings import setting
from common.tracing_settings import TracingSettings

NAME_PREFIX = "dns:///"
ENV_PREFIX = "FDFO_SCHEDULER_"


def split_target(target: str) -> tuple[str, int]:
    """Host (without the brackets of IPv6) and port of host:port. Raises ValueError."""
    host, _, port = target.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets, or one colon too many
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r} is not host:port")
    return host, int(port)


def _check_workers(text: str) -> None:
    targets = [target.strip() for target in text.split(",")]
    for target in targets:
        try:
            split_target(target.removeprefix(NAME_PREFIX))
        except ValueError:
            raise ValueError(
                f"{target!r} is not host:port nor {NAME_PREFIX}name:port; several are separated by commas, and an IPv6 "
                f"address stands in brackets"
            ) from None
    if len(set(targets)) < len(targets):
        raise ValueError("an address is named twice")


def _check_ports(text: str) -> None:
    if not all(port.isdecimal() and int(port) < 65536 for port in text.split(",")):
        raise ValueError("must be numbers from 0 to 65535, separated by commas")


def _check_not_empty(text: str) -> None:
    if not text:
        raise ValueError("must not be empty")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(TracingSettings, SecuritySettings):
    """What a scheduler is started with. Names end in their unit; times are seconds or milliseconds."""

    model_path: Path = setting(
        help="folder with tokenizer and configuration; weights that are there are only compared with the workers'",
        metavar="DIR",
    )
    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = setting(50051, help="port to listen on; 0 takes a free one", metavar="PORT", minimum=0, maximum=65535)
    workers: str = setting(
        "127.0.0.1:50052",
        help="the workers, separated by commas; dns:///name:port stands for all addresses that the name has now",
        metavar="HOST:PORT,...",
        check=_check_workers,
    )
    resolve_interval_s: float = setting(
        5.0, help="seconds between two looks at the names in --workers", metavar="SECONDS", minimum=0.1
    )
    max_connection_age_s: float = setting(
        300.0,
        help="seconds after which a client is told to connect anew, so that it sees new schedulers; its streams go on",
        metavar="SECONDS",
        minimum=0.1,
        maximum=1_000_000,
    )
    context_length: int | None = setting(
        None, help="tokens of prompt and output together; default: what the model says", metavar="TOKENS", minimum=1
    )
    block_size: int | None = setting(
        None, help="tokens of a block; default: what the model says", metavar="TOKENS", minimum=1
    )
    mask_token_id: int | None = setting(
        None, help="id of the mask token; default: what the model says", metavar="ID", minimum=0
    )
    dllm_algorithm: str | None = setting(
        None,
        help="denoising algorithm of requests that name none; default: what the model was published with",
        metavar="NAME",
        check=_check_not_empty,
    )
    dllm_algorithm_config: Path | None = setting(
        None, help="YAML file with the algorithm's default parameters", metavar="FILE"
    )
    dllm_fdfo: bool = setting(
        True, help="a block leaves the batch as soon as it is done; off: all blocks of a batch wait for the slowest"
    )
    rounds_in_flight: int = setting(
        2,
        help="continuing rounds kept at each worker: 1 lets the device wait for each round trip, 2 hides it; "
        "--no-dllm-fdfo has always 1",
        metavar="N",
        minimum=1,
        maximum=16,
    )
    max_queued_requests: int = setting(
        1024, help="requests that wait for a row; one more is refused", metavar="N", minimum=1
    )
    max_queued_requests_per_client: int = setting(
        0,
        help="the same for one client (the name of an API key, or all callers where there are none); 0 = no limit",
        metavar="N",
        minimum=0,
    )
    max_running_requests_per_client: int = setting(
        0,
        help="rows that one client may have at all workers; its other requests wait; 0 = no limit",
        metavar="N",
        minimum=0,
    )
    max_stream_buffer_bytes: int = setting(
        1024 * 1024,
        help="bytes a client has not read after which its request is parked; it goes on when half of them are read",
        metavar="BYTES",
        minimum=1,
    )
    slow_reader_timeout_s: float = setting(
        60.0,
        help="a client that takes nothing for this many seconds, while there is something to read, loses its request",
        metavar="SECONDS",
        minimum=0.1,
    )
    served_model_name: str | None = setting(
        None, help="name told to clients; default: the folder's", metavar="NAME", check=_check_not_empty
    )
    vllm_grpc: bool = setting(
        False,
        help="serve vllm.grpc.engine.VllmEngine too, which gateways for OpenAI clients call; needs the extra gateway",
    )
    served_models: Path | None = setting(
        None,
        help="YAML file of more model names for --vllm-grpc, each with an algorithm and params of its own",
        metavar="FILE",
    )
    served_model_ports: str | None = setting(
        None,
        help="ports of the names in --served-models, in their order; default: free ones",
        metavar="PORT,...",
        check=_check_ports,
    )
    max_forwards: int = setting(
        0, help="forwards after which a round replies in any case; 0 = no limit", metavar="N", minimum=0, maximum=2**31
    )
    max_round_ms: int = setting(
        1000,
        help="milliseconds after which a round replies in any case; not for --no-dllm-fdfo",
        metavar="MS",
        minimum=1,
        maximum=3_600_000,
    )
    hang_timeout_s: float = setting(
        10.0,
        help="a worker that is this many seconds late with a round hangs",
        metavar="SECONDS",
        minimum=0.1,
        flag="--hang-timeout",
    )
    sync_round_timeout_s: float = setting(
        120.0,
        help="the same for --no-dllm-fdfo, counted from the start of the round",
        metavar="SECONDS",
        minimum=0.1,
        flag="--sync-round-timeout",
    )
    stop_grace_s: float = setting(
        5.0,
        help="seconds that running requests have to finish after SIGTERM; the rest is for another scheduler to resume",
        metavar="SECONDS",
        minimum=0.0,
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
    trace_sample_ratio: float = setting(
        1.0,
        help="share of the requests that are traced, of those that come without a traceparent; one that has it is "
        "traced if its client samples it",
        metavar="SHARE",
        minimum=0.0,
        maximum=1.0,
    )
    exit_with_parent: bool = setting(False, help="stop as on SIGTERM when standard input closes")
    worker_tls_ca_file: Path | None = setting(
        None, help="PEM file with the authorities that signed the workers' certificates; turns TLS on", metavar="FILE"
    )
    worker_tls_cert_file: Path | None = setting(
        None, help="PEM file with the certificate to show to workers that ask for one", metavar="FILE"
    )
    worker_tls_key_file: Path | None = setting(
        None, help="PEM file with the private key of --worker-tls-cert-file", metavar="FILE"
    )
    worker_tls_server_name: str | None = setting(
        None,
        help="name in the workers' certificates, where they are reached by address; default: the host in --workers",
        metavar="NAME",
        check=_check_not_empty,
    )
    worker_api_key_file: Path | None = setting(
        None, help="file with the key to send to workers that ask for one (their --api-keys-file)", metavar="FILE"
    )

    @property
    def model_name(self) -> str:
        """What clients are told."""
        return self.served_model_name or folder_name(self.model_path)

    @property
    def model_ports(self) -> tuple[int, ...]:
        """Those of the names in --served-models; none where they are left to the system."""
        return tuple(map(int, self.served_model_ports.split(","))) if self.served_model_ports else ()

    @property
    def worker_targets(self) -> tuple[str, ...]:
        """The workers with a fixed address, host:port each."""
        return tuple(target for target in self._workers if not target.startswith(NAME_PREFIX))

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The names that are resolved again and again, host:port each."""
        return tuple(target.removeprefix(NAME_PREFIX) for target in self._workers if target.startswith(NAME_PREFIX))

    @property
    def _workers(self) -> list[str]:
        return [target.strip() for target in self.workers.split(",")]

"""`python -m fdfo_client.openai_gateway`: the gateway smg, unmodified, as a child of `fdfo serve`.

It runs in this process, so that nothing of it is left when its parent is gone: says on standard output when it is
ready, in one JSON line, and stops when standard input closes. Everything else that it prints goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from fdfo_client.listening import free_port

# How the gateway uses schedulers: each in its turn, and without one that drains after two looks, a second apart. What
# is on its way when it stops gets a second; schedulers stop before it.
FLAGS = (
    *("--policy", "round_robin"),
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "2"),
    *("--shutdown-grace-period-secs", "1"),
    *("--log-level", "warn"),
)
POLL_S = 0.05


def why_not() -> str:
    """What is missing here and how to install it, in one line; "" for nothing."""
    for module, name in (("smg", "smg"), ("smg_grpc_proto", "smg-grpc-proto")):
        if importlib.util.find_spec(module) is None:
            return f"--openai-port needs the package {name}: pip install 'fdfo[gateway]' smg"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fdfo_client.openai_gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--schedulers", required=True, nargs="+", metavar="HOST:PORT", help="a scheduler started with --vllm-grpc"
    )
    arguments = parser.parse_args(argv)
    host, port = arguments.host, arguments.port or free_port(arguments.host)
    words = ["launch", "--host", host, "--port", str(port), *FLAGS]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port("127.0.0.1"))]
    urls = [f"grpc://{target}" for target in arguments.schedulers]
    words += ["--worker-urls", *urls]

    ready_line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_stop_at_eof, daemon=True).start()
    threading.Thread(target=_tell_when_ready, args=(host, port, urls, ready_line), daemon=True).start()
    from smg.cli import main as smg  # a package of its own

    try:
        smg(words)
    except RuntimeError as error:  # its reason to end, as a port that is taken
        sys.stderr.write(f"gateway: {error}\n")
        return 1
    return 0


def _stop_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell_when_ready(host: str, port: int, urls: Sequence[str], line: Any) -> None:
    """Ready: all schedulers are there, and the tokenizer of each of their models."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while not is_ready(address, port, urls):
        time.sleep(POLL_S)
    line.write(json.dumps({"event": "ready", "target": f"{host}:{port}"}) + "\n")
    line.flush()


def is_ready(address: str, port: int, urls: Sequence[str]) -> bool:
    """Whether a gateway for the schedulers at these URLs is ready there. One that answers there for others is not."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        workers = _get(address, port, "/workers")["workers"]
        if set(urls) <= {worker["url"] for worker in workers if worker["is_healthy"]}:
            models = {model["id"] for model in _get(address, port, "/v1/models")["data"]}
            return models <= {known["name"] for known in _get(address, port, "/v1/tokenizers")["tokenizers"]}
    return False


def _get(address: str, port: int, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        fields: dict[str, Any] = json.load(connection.getresponse())
    return fields


if __name__ == "__main__":
    sys.exit(main())

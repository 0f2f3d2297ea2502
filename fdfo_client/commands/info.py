"""`fdfo info`: what schedulers serve and what they have done."""

from __future__ import annotations

import argparse
import dataclasses
import json

from fdfo_client._access import access_from
from fdfo_client._sync_client import Client
from fdfo_client._types import ServerInfo, WorkerInfo
from fdfo_client.commands.flags import add_target

EXAMPLES = """\
examples:
  fdfo info
  fdfo info --target 127.0.0.1:50051,127.0.0.1:50052 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo info`."""
    parser.description = "Show what schedulers serve, and what they and their workers have done."
    parser.epilog = EXAMPLES
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each scheduler")


def main(arguments: argparse.Namespace) -> int:
    """`fdfo info`."""
    access = access_from(arguments)
    for target in arguments.target:
        with Client(target, tls=access.tls, api_key=access.api_key) as client:
            server = client.server_info()
        if arguments.json:
            print(json.dumps({"target": target, **dataclasses.asdict(server)}))
        else:
            print("\n".join(info_lines(target, server)))
    return 0


def info_lines(target: str, server: ServerInfo) -> list[str]:
    """What `fdfo info` shows of one scheduler, for a person."""
    counters = server.counters
    mode = "FDFO" if server.fdfo else "sync"
    rows = counters.denoise_row_forwards + counters.waiting_row_forwards
    lines = [
        f"scheduler {target}, version {server.version}, id {server.scheduler_id}",
        f"  model      {server.served_model_name}, blocks of {server.block_size} tokens, "
        f"context of {server.context_length}",
        f"  denoising  {server.algorithm}, {mode}, {server.rounds_in_flight} in flight",
        f"  requests   {server.running} running, {server.queued} queued (at most {server.max_queued_requests}), "
        f"{counters.requests_finished} finished, {counters.requests_aborted} aborted, "
        f"{counters.requests_rejected} rejected, {counters.requests_expired} past their deadline",
        f"  so far     {counters.published_tokens} tokens, {counters.blocks_done} blocks, {counters.rounds} rounds, "
        f"{counters.forwards} forwards",
        f"             {counters.restarts} restarts, {counters.preemptions} preemptions",
    ]
    if counters.forwards:
        lines.append(
            f"             {counters.published_tokens / counters.forwards:.2f} tokens and "
            f"{rows / counters.forwards:.2f} rows per forward, {counters.waiting_row_forwards} row-forwards wasted"
        )
    lines += [_worker_line(worker) for worker in server.workers]
    if not server.workers:
        lines.append("  worker     none known")
    return lines


def _worker_line(worker: WorkerInfo) -> str:
    if not worker.ready:
        return f"  worker     {worker.target}  NOT READY  {worker.last_error}".rstrip()
    return (
        f"  worker     {worker.target}  ready, {worker.rows} of {worker.max_rows} rows; KV pages: {worker.pages_held} "
        f"held, {worker.pages_cached} cached, {worker.pages_free} free of {worker.pages_total}"
    )

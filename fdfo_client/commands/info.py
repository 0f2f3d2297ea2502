"""`fdfo info`: what schedulers serve and what they have done."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from common.fingerprint import short_fingerprint
from fdfo_client._access import access_from
from fdfo_client._errors import FdfoError
from fdfo_client._sync_client import Client
from fdfo_client._types import ServerCounters, ServerInfo, WorkerInfo
from fdfo_client._waiting import waiting
from fdfo_client.commands.flags import add_target
from fdfo_client.commands.words import duration

EXAMPLES = """\
examples:
  fdfo info
  fdfo info --target 127.0.0.1:50051,127.0.0.1:50052 --json

A scheduler that does not answer is named on stderr, and the exit status is 1; the others are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo info`."""
    parser.description = "Show what schedulers serve, and what they and their workers have done."
    parser.epilog = EXAMPLES
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each scheduler")


def main(arguments: argparse.Namespace) -> int:
    """`fdfo info`."""
    access, status = access_from(arguments), 0
    for target in arguments.target:
        try:
            with Client(target, tls=access.tls, api_key=access.api_key) as client, waiting(f"waiting for {target}"):
                server = client.server_info()
        except FdfoError as error:
            print(f"fdfo: {error}", file=sys.stderr, flush=True)
            status = 1
            continue
        if arguments.json:
            print(json.dumps({"target": target, **dataclasses.asdict(server)}), flush=True)
        else:
            print("\n".join(info_lines(target, server)), flush=True)
    return status


def info_lines(target: str, server: ServerInfo) -> list[str]:
    """What `fdfo info` shows of one scheduler, for a person."""
    counters = server.counters
    mode = "FDFO" if server.fdfo else "sync"
    lines = [
        f"scheduler {target}, version {server.version}, id {server.scheduler_id}, up {duration(server.uptime_s)}",
        f"  model      {server.served_model_name}, blocks of {server.block_size} tokens, "
        f"context of {server.context_length}, {server.num_tokens} token ids, "
        f"fingerprint {short_fingerprint(server.fingerprint)}",
        f"  denoising  {server.algorithm}, {mode}, {server.rounds_in_flight} in flight",
        f"  requests   {server.running} running, {server.queued} queued (at most {server.max_queued_requests}), "
        f"{counters.requests_finished} finished, {counters.requests_aborted} aborted, "
        f"{counters.requests_rejected} rejected, {counters.requests_expired} past their deadline",
        f"  so far     {counters.published_tokens} tokens, {counters.blocks_done} blocks, {counters.rounds} rounds, "
        f"{counters.forwards} forwards, {counters.prefill_tokens} tokens of prompts computed",
        f"             {counters.restarts} restarts, {counters.preemptions} preemptions, "
        f"{counters.times_parked} times parked for a slow reader",
        *_ratio_lines(counters),
    ]
    lines += [line for worker in server.workers for line in _worker_lines(worker)]
    if not server.workers:
        lines.append("  worker     none known")
    return lines


def _ratio_lines(counters: ServerCounters) -> list[str]:
    if not (counters.forwards and counters.rounds):
        return []
    rows = counters.denoise_row_forwards + counters.waiting_row_forwards
    return [
        f"             {counters.published_tokens / counters.forwards:.2f} tokens and "
        f"{rows / counters.forwards:.2f} rows per forward, {counters.waiting_row_forwards} row-forwards wasted",
        f"  time       {counters.device_ms / counters.forwards:.2f} ms of the device a forward; a round: "
        f"{counters.round_trip_ms / counters.rounds:.2f} ms to its reply, "
        f"{counters.host_ms / counters.rounds:.2f} ms of the scheduler",
    ]


def _worker_lines(worker: WorkerInfo) -> list[str]:
    if not worker.ready:
        return [f"  worker     {worker.target}  NOT READY  {worker.last_error}".rstrip()]
    return [
        f"  worker     {worker.target}  ready, {worker.rows} of {worker.max_rows} rows; KV pages: "
        f"{worker.pages_held} held, {worker.pages_cached} cached, {worker.pages_free} free of {worker.pages_total}",
        f"             {worker.device} {worker.dtype}, version {worker.version}, epoch {worker.worker_epoch}; "
        f"{worker.page_size} tokens a page, {worker.page_size * worker.pages_total} in all",
    ]

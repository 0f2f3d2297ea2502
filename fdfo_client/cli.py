"""The command `fdfo`: serve, generate, info, eval, bench, replay, trace, chaos.

Exit status: 0 done, 1 failed, 2 wrong usage or a refused request, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdfo_client import serve
from fdfo_client._access import access_from, add_access_arguments
from fdfo_client._channel import parse_targets
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client._options import GenerateOptions, Message
from fdfo_client._sync_client import Client
from fdfo_client._types import Committed, Completion, Finished, ServerInfo, WorkerInfo
from fdfo_client.bench import cli as bench_cli
from fdfo_client.evaluate import cli as evaluate_cli
from fdfo_client.trace import cli as trace_cli

DEFAULT_TARGET = "127.0.0.1:50051"
CHECKOUT = Path(__file__).resolve().parent.parent

EXAMPLES = """\
examples:
  fdfo serve                                    # the small model that ships, on this machine
  fdfo generate "Count from 3 to 7."
  fdfo info
  fdfo eval                                     # how many problems with known answers it gets right
  fdfo bench --concurrency 16 --requests 100    # needs the extra: pip install 'fdfo[bench]'

exit status: 0 done, 1 failed, 2 wrong usage or a refused request"""

GENERATE_EXAMPLES = """\
examples:
  fdfo generate "What is the number of days in a week?"
  fdfo generate --temperature 0.8 --seed 7 "Sort these numbers: 76 73 66"
  fdfo generate --stop 7 --json "Count from 3 to 9."
  fdfo generate --algorithm LowConfidence --param threshold=0.9 "Repeat: Ivy Nina Leo"
  fdfo generate --raw - < prompt.txt"""

INFO_EXAMPLES = """\
examples:
  fdfo info
  fdfo info --target 127.0.0.1:50051,127.0.0.1:50052 --json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process when None) and return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["chaos"]:  # its flags are its own
        return chaos(words[1:])
    parser = build_parser()
    arguments = parser.parse_args(words)
    # gRPC's own lines on stderr, such as one for each connection that a stopped server closes. Read at the first call.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        match arguments.command:
            case "serve":
                return serve.main(arguments)
            case "generate":
                return generate(arguments)
            case "eval":
                return evaluate_cli.evaluate(arguments)
            case "bench":
                return bench_cli.bench(arguments)
            case "replay":
                return bench_cli.replay(arguments)
            case "trace":
                return trace_cli.trace(arguments)
            case _:
                return info(arguments)
    except FdfoError as error:
        print(f"fdfo: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away, as `head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Examples keep their lines, and a flag is written out: an abbreviation may mean another flag tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = _Parser(prog="fdfo", description="Serve a block-diffusion language model, and ask it.", epilog=EXAMPLES)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve.add_arguments(
        commands.add_parser(
            "serve",
            usage="fdfo serve [--workers N] [--schedulers N] [--port P] [--json] [flags of the services]",
            help="start workers and schedulers on this machine",
            description="Start workers and schedulers on this machine and keep them running.",
            epilog=serve.NOTES,
        )
    )
    _add_generate_arguments(
        commands.add_parser(
            "generate",
            help="answer one prompt",
            description="Answer one prompt; the text appears block by block.",
            epilog=GENERATE_EXAMPLES,
        )
    )
    _add_info_arguments(
        commands.add_parser(
            "info",
            help="show what a scheduler serves and how busy it is",
            description="Show what a scheduler serves and how busy it and its workers are.",
            epilog=INFO_EXAMPLES,
        )
    )
    _add_eval_arguments(
        commands.add_parser(
            "eval",
            help="ask problems with known answers",
            description="Ask problems with known answers: how many are right, at what cost, whether two runs differ.",
            epilog=evaluate_cli.EXAMPLES,
        )
    )
    _add_bench_arguments(
        commands.add_parser(
            "bench",
            help="measure a scheduler under load",
            description="Send many requests and measure throughput, latencies and what the server did for them.",
            epilog=bench_cli.BENCH_EXAMPLES,
        )
    )
    _add_replay_arguments(
        commands.add_parser(
            "replay",
            help="send a recorded load again",
            description="Send the requests of a trace at its times, and measure as `fdfo bench` does.",
            epilog=bench_cli.REPLAY_EXAMPLES,
        )
    )
    _add_trace_arguments(
        commands.add_parser(
            "trace",
            help="see a run: a page with a time line, and a file for trace viewers",
            description="Record a run round by round: a lane for each answer, its blocks, and who waits for whom.",
            epilog=trace_cli.EXAMPLES,
        )
    )
    commands.add_parser("chaos", help="in a checkout: inject faults into services and check what must hold")
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help="the prompt; - reads it from standard input")
    _add_target(parser)
    add_access_arguments(parser)
    add("--raw", action="store_true", help="the prompt as plain text, without the model's chat template")
    add("--system", metavar="TEXT", help="a system message before the prompt")
    add("--max-new-tokens", type=int, metavar="N", help="at most so many tokens (up to the context limit)")
    _add_temperature(parser)
    add("--top-p", type=float, metavar="P", help="above 0, up to 1 (1: off)")
    add("--top-k", type=int, metavar="K", help="the K most probable tokens only (0: off)")
    add("--min-p", type=float, metavar="P", help="tokens of at least P times the best one's probability (0: off)")
    add("--seed", type=int, metavar="S", help="the same seed gives the same text (drawn by the server)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--stop-token-id", action="append", type=int, metavar="ID", help="end before this token; several times too")
    add("--ignore-eos", action="store_true", help="go on past the model's own stop tokens")
    _add_algorithm(parser)
    add("--n", type=int, metavar="N", help="so many samples, up to 16, printed one after the other (1)")
    add("--priority", type=int, metavar="P", help="requests with a higher one run earlier; -1000 to 1000 (0)")
    add("--parse-special-tokens", action="store_true", help="with --raw: special tokens in the prompt are read as such")
    add("--request-id", metavar="ID", help="name of the request (drawn by the server)")
    add("--timeout", type=float, metavar="SECONDS", help="give up after so long (never)")
    add("--no-stream", dest="stream", action="store_false", help="print the text when it is complete")
    add("--json", action="store_true", help="print one line of JSON a sample, with text, token ids and usage")
    add("--logprobs", action="store_true", help="with --json: each token's log probability")
    add("--first-unmask-steps", action="store_true", help="with --json: the step that first unmasked each token")


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add_access_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each scheduler")


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add_access_arguments(parser)
    evaluate_cli.add_eval_arguments(parser)
    _add_algorithm(parser)
    _add_temperature(parser)


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add_access_arguments(parser)
    bench_cli.add_bench_arguments(parser)
    _add_algorithm(parser)
    _add_temperature(parser)


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    _add_target(where)
    add_access_arguments(parser)
    bench_cli.add_replay_arguments(parser, where)


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_access_arguments(parser)
    trace_cli.add_trace_arguments(parser)
    _add_algorithm(parser)
    _add_temperature(parser)


def _add_temperature(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the most probable token; up to 2 (0)")


def _add_algorithm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithm", metavar="NAME", help="denoising algorithm (the server's default)")
    parser.add_argument(
        "--param",
        action="append",
        type=_parameter,
        metavar="NAME=VALUE",
        help="parameter of the algorithm, such as threshold=0.9; may be given several times",
    )


def _add_target(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--target",
        type=_targets,
        default=parse_targets(DEFAULT_TARGET),
        metavar="HOST:PORT,...",
        help=f"the scheduler, or several ({DEFAULT_TARGET})",
    )


def _targets(text: str) -> tuple[str, ...]:
    try:
        return parse_targets(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parameter(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER") from None


def generate(arguments: argparse.Namespace) -> int:
    """`fdfo generate`."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw and arguments.system is not None:
        raise InvalidRequest("--system: a raw prompt has no messages; leave one of --raw and --system out", "system")
    for flag in ("logprobs", "first_unmask_steps"):
        if getattr(arguments, flag) and not arguments.json:
            raise InvalidRequest(f"--{flag.replace('_', '-')}: only --json prints it; add --json", flag)
    messages: list[Message] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    messages.append({"role": "user", "content": prompt})
    options: GenerateOptions = {
        "messages": None if arguments.raw else messages,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "ignore_eos": arguments.ignore_eos,
        "algorithm": arguments.algorithm,
        "algorithm_params": dict(arguments.param or ()),
        "n": arguments.n,
        "priority": arguments.priority,
        "logprobs": arguments.logprobs,
        "first_unmask_steps": arguments.first_unmask_steps,
        "request_id": arguments.request_id,
        "parse_special_tokens": arguments.parse_special_tokens,
        "timeout": arguments.timeout,
    }
    text = prompt if arguments.raw else None
    access = access_from(arguments)
    with Client(arguments.target, tls=access.tls, api_key=access.api_key) as client:
        if arguments.json or not arguments.stream or (arguments.n or 1) > 1:
            samples = client.generate(text, **options).samples
            for sample in samples:
                print(_json_line(sample) if arguments.json else sample.text)
            return max(map(_judge, samples))
        return _print_stream(client, text, options)


def _json_line(sample: Completion) -> str:
    fields = dataclasses.asdict(sample)
    del fields["others"]
    return json.dumps(fields)


def _print_stream(client: Client, prompt: str | None, options: GenerateOptions) -> int:
    finished: Finished | None = None
    open_line = False
    try:
        for event in client.stream(prompt, **options):
            match event:
                case Committed() if event.text:
                    print(event.text, end="", flush=True)
                    open_line = not event.text.endswith("\n")
                case Finished():
                    finished = event
    finally:
        if open_line:  # an error message then begins on a line of its own
            print(flush=True)
    assert finished is not None, "the client refuses a stream without Finished"
    return _judge(finished)


def _judge(end: Finished | Completion) -> int:
    """Say on a terminal what the request cost. The exit status."""
    reason = end.reason if isinstance(end, Finished) else end.finish_reason
    if reason == "abort":
        print("fdfo: the request was aborted", file=sys.stderr)
        return 1
    if sys.stderr.isatty():
        usage = end.usage
        resumed = f", resumed {end.resumes} times" if end.resumes else ""
        print(
            f"[{usage.completion_tokens} tokens, {usage.forwards} forwards, {usage.rounds} rounds{resumed}; "
            f"ended by {reason}]",
            file=sys.stderr,
        )
    return 0


def chaos(words: Sequence[str]) -> int:
    """`fdfo chaos`: becomes `python -m tests.chaos`; returns only where there is none."""
    if not (CHECKOUT / "tests/chaos/__main__.py").is_file():
        print(
            f"fdfo: chaos: the scenarios are in tests/chaos of the project's repository, not in the package that is "
            f"installed in {CHECKOUT}; run it in a checkout, after `make venv`, as .venv/bin/fdfo",
            file=sys.stderr,
        )
        return 2
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "tests.chaos", *words], {**os.environ, "PYTHONPATH": path})


def info(arguments: argparse.Namespace) -> int:
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

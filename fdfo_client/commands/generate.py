"""`fdfo generate`: one prompt, and its answer block by block."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from fdfo_client._access import access_from
from fdfo_client._arguments import json_object
from fdfo_client._errors import InvalidRequest
from fdfo_client._options import GenerateOptions, Message
from fdfo_client._sync_client import Client
from fdfo_client._types import Committed, Completion, Finished, Started
from fdfo_client._waiting import waiting
from fdfo_client.commands.flags import add_algorithm, add_target, add_temperature

EXAMPLES = """\
examples:
  fdfo generate "What is the number of days in a week?"
  fdfo generate --temperature 0.8 --seed 7 "Sort these numbers: 76 73 66"
  fdfo generate --stop 7 --json "Count from 3 to 9."
  fdfo generate --algorithm LowConfidence --param threshold=0.9 "Repeat: Ivy Nina Leo"
  fdfo generate --chat-template-kwargs '{"enable_thinking": false}' "Name three rivers."
  fdfo generate --raw - < prompt.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo generate`."""
    parser.description = "Answer one prompt; the text appears block by block."
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("prompt", help="the prompt; - reads it from standard input")
    add_target(parser)
    add("--raw", action="store_true", help="the prompt as plain text, without the model's chat template")
    add("--system", metavar="TEXT", help="a system message before the prompt")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="variables for the chat template, an object")
    add("--max-new-tokens", type=int, metavar="N", help="at most so many tokens (up to the context limit)")
    add_temperature(parser)
    add("--top-p", type=float, metavar="P", help="above 0, up to 1 (1: off)")
    add("--top-k", type=int, metavar="K", help="the K most probable tokens only (0: off)")
    add("--min-p", type=float, metavar="P", help="tokens of at least P times the best one's probability (0: off)")
    add("--seed", type=int, metavar="S", help="the same seed gives the same text (drawn by the server)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--stop-token-id", action="append", type=int, metavar="ID", help="end before this token; several times too")
    add("--ignore-eos", action="store_true", help="go on past the model's own stop tokens")
    add_algorithm(parser)
    add("--n", type=int, metavar="N", help="so many samples, up to 16, printed one after the other (1)")
    add("--priority", type=int, metavar="P", help="requests with a higher one run earlier; -1000 to 1000 (0)")
    add("--parse-special-tokens", action="store_true", help="with --raw: special tokens in the prompt are read as such")
    add("--request-id", metavar="ID", help="name of the request (drawn by the server)")
    add("--timeout", type=float, metavar="SECONDS", help="give up after so long (never)")
    add("--no-stream", dest="stream", action="store_false", help="print the text when it is complete")
    add("--json", action="store_true", help="print one line of JSON a sample, with text, token ids and usage")
    add("--logprobs", action="store_true", help="with --json: each token's log probability")
    add("--first-unmask-steps", action="store_true", help="with --json: the step that first unmasked each token")


def main(arguments: argparse.Namespace) -> int:
    """`fdfo generate`."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    for flag in ("system", "chat_template_kwargs"):
        if arguments.raw and getattr(arguments, flag) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise InvalidRequest(f"{name}: a raw prompt has no messages; leave one of --raw and {name} out", flag)
    for flag in ("logprobs", "first_unmask_steps"):
        if getattr(arguments, flag) and not arguments.json:
            raise InvalidRequest(f"--{flag.replace('_', '-')}: only --json prints it; add --json", flag)
    messages: list[Message] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    messages.append({"role": "user", "content": prompt})
    options: GenerateOptions = {
        "messages": None if arguments.raw else messages,
        "chat_template_kwargs": arguments.chat_template_kwargs,
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
            with waiting(f"waiting for the whole answer of {','.join(arguments.target)}"):
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
    state = f"waiting for {', '.join(client.targets)}"
    with waiting(lambda: state) as over:
        try:
            for event in client.stream(prompt, **options):
                match event:
                    case Started():
                        state = f"waiting for the first block; {event.queue_position} requests were queued before it"
                    case Committed() if event.text:
                        over.set()
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

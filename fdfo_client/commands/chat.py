"""`fdfo chat`: lines in, answers out, and what the model is told of the turns before."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from functools import partial

from fdfo_client._access import access_from
from fdfo_client._arguments import whole
from fdfo_client._errors import FdfoError, InvalidRequest
from fdfo_client._options import GenerateOptions, Message
from fdfo_client._sync_client import Client
from fdfo_client._types import Committed, Finished, Provisional
from fdfo_client.chat.live_text import LiveText, is_live, terminal_size
from fdfo_client.commands.flags import add_algorithm, add_target, add_temperature

EXAMPLES = """\
examples:
  fdfo chat
  fdfo chat --system "Answer in one word." --temperature 0.7
  printf '%s\\n' "Count from 3 to 7." "And from 5 to 9." | fdfo chat    # a line each; plain text, block by block"""

COMMANDS = """\
/reset          forget the conversation; the system message stays
/system TEXT    the system message from now on; without TEXT there is none
/exit           leave, as Ctrl-D does
Ctrl-C          stop the answer; what is there of it stays in the conversation
A line that begins with a space is never a command."""

PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo chat`."""
    parser.description = "A conversation: answers appear as their blocks are denoised.\n\n" + COMMANDS
    parser.epilog = EXAMPLES
    add_target(parser)
    add_algorithm(parser)
    add_temperature(parser)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="a system message before the conversation")
    add("--max-new-tokens", type=int, metavar="N", help="at most so many tokens an answer (up to the context limit)")
    add("--seed", type=int, metavar="S", help="the same seed gives the same answers (drawn by the server)")
    add(
        "--every",
        type=whole(0),
        default=1,
        metavar="N",
        help="on a terminal, show a block every N forwards while it is denoised; 0: only when it is done (1)",
    )


def main(arguments: argparse.Namespace) -> int:
    """`fdfo chat`. The exit status."""
    access = access_from(arguments)
    with Client(arguments.target, tls=access.tls, api_key=access.api_key) as client:
        server = client.server_info()
        options: GenerateOptions = {
            "max_new_tokens": arguments.max_new_tokens,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "algorithm": arguments.algorithm,
            "algorithm_params": dict(arguments.param or ()),
        }
        if arguments.every and server.fdfo and is_live(sys.stdout, os.environ):
            options["provisional_every_forwards"] = arguments.every
        chat = Chat(client, options, arguments.system)
        if chat.is_interactive:
            if is_live(sys.stdout, os.environ):  # readline moves the cursor too
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 (input() then edits its line)
            print(f"{server.served_model_name}, {server.context_length} tokens of context; /help lists the commands")
        chat.run()
    return 0


class Chat:
    """The conversation, over standard input and output. `options`: of each request."""

    def __init__(self, client: Client, options: GenerateOptions, system: str | None) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._client = client
        self._options = options
        self._system = system
        self._turns: list[Message] = []

    def run(self) -> None:
        """Until the input or the user ends it. Where nobody is there to read it, an error ends it too."""
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if line.split()[0] == "/exit":
                        return
                    self._obey(*line.split(maxsplit=1))
                elif line.strip():
                    self._ask(line.strip())
            except FdfoError as error:
                if not self.is_interactive:
                    raise
                print(f"fdfo: {error}", file=sys.stderr)

    def _read(self) -> str | None:
        """The next line; None at the end."""
        if not self.is_interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input(PROMPT)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit leaves")

    def _obey(self, command: str, text: str = "") -> None:
        match command:
            case "/reset":
                self._turns = []
            case "/system":
                self._system = text.strip() or None
            case "/help":
                print(COMMANDS)
            case _:
                raise InvalidRequest(f"{command}: no such command; /help lists them, a space before it sends the line")

    def _ask(self, question: str) -> None:
        """Answer, and remember it as far as it went."""
        system = [] if self._system is None else [Message(role="system", content=self._system)]
        asked = Message(role="user", content=question)
        answer: list[str] = []
        finished: Finished | None = None
        text = _view()
        options: GenerateOptions = {**self._options, "messages": [*system, *self._turns, asked]}
        events = self._client.stream(**options)
        try:
            with _typing_unseen(), contextlib.closing(events):
                for event in events:
                    match event:
                        case Provisional():
                            text.show(pieces=event.pieces)
                        case Committed():
                            answer.append(event.text)
                            text.show(event.text)
                        case Finished():
                            finished = event
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
        finally:
            text.end()
            if answer or finished is not None:
                self._turns += [asked, Message(role="assistant", content="".join(answer))]
        if self.is_interactive:
            print(_note(finished), file=sys.stderr)


def _note(finished: Finished | None) -> str:
    """How an answer ended, for a person."""
    if finished is None:
        return "[stopped]"
    usage = finished.usage
    return f"[{usage.completion_tokens} tokens, {usage.forwards} forwards; ended by {finished.reason}]"


def _view() -> LiveText | PlainText:
    if not is_live(sys.stdout, os.environ):
        return PlainText()
    return LiveText(sys.stdout, partial(terminal_size, sys.stdout), has_style=not os.environ.get("NO_COLOR"))


class PlainText:
    """An answer where the cursor cannot be moved: the final text only, and nothing but text."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, final: str = "", pieces: object = ()) -> None:
        """`final` goes on the text; the pieces are not shown."""
        print(final, end="", flush=True)
        self._last = final or self._last

    def end(self) -> None:
        """Leave the cursor at the beginning of a line."""
        if self._last and not self._last.endswith("\n"):
            print(flush=True)


@contextlib.contextmanager
def _typing_unseen() -> Iterator[None]:
    """What is typed while an answer is drawn, Ctrl-C too, is not echoed into it; the next prompt gets it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

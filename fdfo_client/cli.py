"""The command `fdfo`: its commands, and what all of them have in common.

A command is a module with `add_arguments(parser)` and `main(arguments)`, which returns the exit status; see
`fdfo_client.commands`. Only the module of the command that was asked for is imported.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from fdfo_client._errors import FdfoError, InvalidRequest

# Name -> module, and what it does in a few words.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("fdfo_client.serve", "start workers and schedulers on this machine"),
    "generate": ("fdfo_client.commands.generate", "answer one prompt"),
    "chat": ("fdfo_client.commands.chat", "talk with the model; blocks appear as they are denoised"),
    "info": ("fdfo_client.commands.info", "show what schedulers serve and what they have done"),
    "top": ("fdfo_client.commands.top", "show schedulers and workers, live"),
    "doctor": ("fdfo_client.commands.doctor", "check an installation and say what to do"),
    "eval": ("fdfo_client.commands.evaluate", "ask problems with known answers"),
    "bench": ("fdfo_client.commands.bench", "measure a scheduler under load"),
    "replay": ("fdfo_client.commands.replay", "send a recorded load again"),
    "trace": ("fdfo_client.commands.trace", "see a run: a page with a time line, and a file for trace viewers"),
    "chaos": ("fdfo_client.commands.chaos", "in a checkout: inject faults into services and check what must hold"),
}

EXAMPLES = """\
examples:
  fdfo serve                                    # the small model that ships, on this machine
  fdfo generate "Count from 3 to 7."
  fdfo chat                                     # a conversation; blocks appear as they are denoised
  fdfo top                                      # what schedulers and workers do, live
  fdfo doctor                                   # when something does not work
  fdfo eval                                     # how many problems with known answers it gets right
  fdfo bench --concurrency 16 --requests 100    # needs the extra: pip install 'fdfo[bench]'

fdfo COMMAND --help shows the flags of a command."""

EXIT_STATUS = "exit status: 0 done, 1 failed, 2 wrong usage or a refused request, 130 ended by Ctrl-C"


# For terminals that have only ASCII: bars of `fdfo top`, masks of `fdfo chat`.
STAND_INS = dict(zip("▁▂▃▄▅▆▇█░…", "_.-~=+*#.~", strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process when None) and return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("fdfo-stand-in", _stand_in)
        sys.stdout.reconfigure(errors="fdfo-stand-in")
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Nobody reads what is written, as with `head`, or there is no room for it. Python would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"fdfo: {error}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    arguments = _parse(words)
    # gRPC's own lines on stderr, such as one for each connection that a stopped server closes. Read at the first call.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        status: int = arguments.main(arguments)
    except FdfoError as error:
        print(f"fdfo: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    return status


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """For what the encoding of stdout has not: of the same width."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    from fdfo_client.chat.live_text import char_width

    chars = error.object[error.start : error.end]
    return "".join(STAND_INS.get(char, "?" * char_width(char)) for char in chars), error.end


def _parse(words: list[str]) -> argparse.Namespace:
    if words[:1] == ["chaos"]:  # its flags are its own
        return argparse.Namespace(main=import_module(COMMANDS["chaos"][0]).main, words=words[1:])
    return build_parser(words[:1]).parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Examples keep their lines, and a flag is written out: an abbreviation may mean another flag tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own passes over what cannot be written."""
        (file or sys.stderr).write(message)


def build_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command, with the flags of the commands of these names."""
    parser = _Parser(
        prog="fdfo",
        description="Serve a block-diffusion language model, and ask it.",
        epilog=f"{EXAMPLES}\n\n{EXIT_STATUS}",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name in names:
            module = import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(main=module.main)
            command.epilog = "\n\n".join(filter(None, [command.epilog, EXIT_STATUS]))
    return parser

"""The command `fdfo chat`: the conversation that it sends, and what a terminal shows."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import cli
from fdfo_client.commands import chat as chat_cli
from fdfo_client.testing import HOLD, FakeScheduler, Step, committed, failure, finished, serving, started
from tests.client.terminal import Terminal

FDFO = pb.GetServerInfoResponse(served_model_name="tiny", context_length=4096, fdfo=True)
LOCKSTEP = pb.GetServerInfoResponse(served_model_name="tiny", context_length=4096)
COLUMNS, LINES = 80, 24


def shown(*pieces: str | int) -> pb.GenerateResponse:
    """A provisional event of these texts and numbers of masks."""
    return pb.GenerateResponse(
        provisional=pb.Provisional(
            pieces=[
                pb.ProvisionalPiece(text=piece) if isinstance(piece, str) else pb.ProvisionalPiece(num_masks=piece)
                for piece in pieces
            ]
        )
    )


def echo(request: pb.GenerateRequest) -> list[Step]:
    """Answers with the question in capitals, shown before."""
    answer = request.messages.messages[-1].content.upper()
    return [started("r"), shown(answer[:2], 3), committed(answer, [5]), finished(pb.FINISH_REASON_STOP)]


def talk(monkeypatch: pytest.MonkeyPatch, fake: FakeScheduler, lines: Sequence[str], *flags: str) -> int:
    """Run the command with these lines on a pipe; the exit status."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    with serving(fake) as target:
        return cli.main(["chat", "--target", target, *flags])


def turns(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def test_a_conversation_over_pipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is answered by plain text, with all turns before it; nothing provisional is asked for."""
    fake = FakeScheduler(echo, infos=[FDFO])
    assert talk(monkeypatch, fake, ["one", "", " /two "], "--system", "Be brief.", "--temperature", "0.5") == 0
    assert capsys.readouterr() == ("ONE\n/TWO\n", "")
    system = ("system", "Be brief.")
    assert turns(fake.requests[0]) == [system, ("user", "one")]
    assert turns(fake.requests[1]) == [system, ("user", "one"), ("assistant", "ONE"), ("user", "/two")]
    assert [request.sampling.temperature for request in fake.requests] == [0.5, 0.5]
    assert not any(request.HasField("provisional_every_forwards") for request in fake.requests)


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """/reset forgets the turns, /system sets or takes away the system message, /exit ends it, /help lists them."""
    fake = FakeScheduler(echo, infos=[FDFO])
    lines = ["/system Be brief.", "a", "/reset", "b", "/system", "c", "/help", "/exit", "never"]
    assert talk(monkeypatch, fake, lines) == 0
    assert [turns(request) for request in fake.requests] == [
        [("system", "Be brief."), ("user", "a")],
        [("system", "Be brief."), ("user", "b")],
        [("user", "b"), ("assistant", "B"), ("user", "c")],
    ]
    assert "/reset" in capsys.readouterr().out


def test_errors_on_a_pipe_end_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A script hears of them: status 2 for a command that does not exist, 1 for an error of the server; what came of an
    answer stands on a line of its own."""
    assert talk(monkeypatch, FakeScheduler(echo, infos=[FDFO]), ["/nope", "never"]) == 2
    assert "/nope: no such command; /help" in capsys.readouterr().err
    lost = failure(grpc.StatusCode.INTERNAL, "it broke")
    fake = FakeScheduler(lambda request: [started(), committed("some", [1]), lost], infos=[FDFO])
    assert talk(monkeypatch, fake, ["a", "never"]) == 1
    out, err = capsys.readouterr()
    assert out == "some\n" and "it broke" in err and len(fake.requests) == 1


@pytest.mark.parametrize(
    ("info", "flags", "every"),
    [(FDFO, [], 1), (FDFO, ["--every", "3"], 3), (FDFO, ["--every", "0"], 0), (LOCKSTEP, [], 0)],
)
def test_provisional_blocks_are_asked_for_where_they_are_served_and_seen(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    info: pb.GetServerInfoResponse,
    flags: list[str],
    every: int,
) -> None:
    """On a terminal, of a server that is not in lockstep, as often as --every says."""
    monkeypatch.setattr(chat_cli, "is_live", lambda out, environment: True)
    monkeypatch.setattr(chat_cli, "terminal_size", lambda out: os.terminal_size((COLUMNS, LINES)))
    fake = FakeScheduler(echo, infos=[info])
    assert talk(monkeypatch, fake, ["one"], *flags) == 0
    terminal = Terminal(COLUMNS, LINES)
    terminal.write(capsys.readouterr().out)
    assert terminal.lines() == ["ONE", ""]
    assert fake.requests[0].provisional_every_forwards == every
    assert fake.requests[0].HasField("provisional_every_forwards") == bool(every)


def test_ctrl_c_at_the_prompt_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how to leave, and the conversation goes on; the end of the input leaves."""
    typed: list[str | BaseException] = [KeyboardInterrupt(), "one", EOFError()]

    def read(prompt: str) -> str:
        sys.stdout.write(prompt)
        line = typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(chat_cli, "is_live", lambda out, environment: False)
    monkeypatch.setattr(chat_cli, "_typing_unseen", contextlib.nullcontext)
    fake = FakeScheduler(echo, infos=[FDFO])
    with serving(fake) as target:
        assert cli.main(["chat", "--target", target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["> ", "Ctrl-D or /exit leaves", "> ONE", "> "]


# On a real pseudo terminal ----------------------------------------------------------------------------------------


class Typist:
    """The person at a pseudo terminal on which the command runs."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.terminal = Terminal(COLUMNS, LINES)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, *lines: str, is_dim: str = "") -> None:
        """Until the last rows are these, `is_dim` being what of them is dim."""
        deadline = time.monotonic() + 20
        while self.terminal.lines()[-len(lines) :] != list(lines) or self.terminal.text(is_dim=True) != is_dim:
            readable = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))[0]
            assert readable, f"{self.terminal.lines()}, dim {self.terminal.text(is_dim=True)!r}"
            self.terminal.write(os.read(self.master, 4096).decode())


# The child makes the pseudo terminal its own, so that Ctrl-C reaches it as a signal.
CHILD = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
termios.tcsetwinsize(0, ({lines}, {columns}))
from fdfo_client.cli import main
status = main(["chat", "--target", "{target}"])
if "{terminal}" == "dumb" and "readline" in sys.modules:
    status = "readline moves the cursor"
sys.exit(status)
"""


@contextlib.contextmanager
def at_a_terminal(target: str, terminal: str = "xterm") -> Iterator[tuple[Typist, subprocess.Popen[bytes]]]:
    master, slave = pty.openpty()
    code = CHILD.format(lines=LINES, columns=COLUMNS, target=target, terminal=terminal)
    environment: dict[str, Any] = {**os.environ, "TERM": terminal}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    )
    os.close(slave)
    try:
        yield Typist(master), process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_terminal_whose_cursor_cannot_be_moved() -> None:
    """There the line that is typed is not edited by readline, which would draw over it."""
    with serving(FakeScheduler(echo, infos=[FDFO])) as target, at_a_terminal(target, "dumb") as (typist, process):
        typist.wait_for(">")
        typist.type("/exit\n")
        typist.wait_for("> /exit", "")
        assert process.wait(timeout=10) == 0


def test_a_conversation_at_a_terminal() -> None:
    """Blocks appear dim and become text; Ctrl-C stops an answer and keeps what is there of it; errors end no
    conversation; Ctrl-D leaves."""
    scripts: list[list[Step]] = [
        [started("r"), shown("3 ", 2), HOLD],
        [started("r"), committed("3 4 ", [5]), shown("5", 4), HOLD],
        [failure(grpc.StatusCode.INTERNAL, "it broke")],
        [started("r"), shown(1), committed("界 done", [5]), finished(usage=pb.Usage(completion_tokens=2, forwards=1))],
    ]
    fake = FakeScheduler(lambda request: scripts.pop(0), infos=[FDFO])
    with serving(fake) as target, at_a_terminal(target) as (typist, process):
        typist.wait_for("tiny, 4096 tokens of context; /help lists the commands", ">")
        typist.type("never mind\r")
        typist.wait_for("> never mind", "3 ░░", is_dim="3 ░░")
        fake.held.get(timeout=10)
        typist.type("\x03")
        typist.wait_for("> never mind", "[stopped]", ">")
        assert fake.cancelled.get(timeout=10) == "fake-1"
        typist.type("count\r")
        typist.wait_for("> count", "3 4 5░░░░", is_dim="5░░░░")
        typist.type("\x03")
        typist.wait_for("> count", "3 4", "[stopped]", ">")
        typist.type("again\r")
        typist.wait_for("> again", f"fdfo: {target} failed the request: INTERNAL: it broke", ">")
        typist.type("more\r")
        typist.wait_for("> more", "界 done", "[2 tokens, 1 forwards; ended by length]", ">")
        typist.type("\x04")
        assert process.wait(timeout=10) == 0
    assert [turns(request) for request in fake.requests] == [
        [("user", "never mind")],
        [("user", "count")],
        [("user", "count"), ("assistant", "3 4 "), ("user", "again")],
        [("user", "count"), ("assistant", "3 4 "), ("user", "more")],
    ]

"""The command `fdfo`: what it sends, prints and returns."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import cli
from fdfo_client.testing import FakeScheduler, Step, committed, failure, finished, serving, started


def run(*argv: str, fake: FakeScheduler | None = None) -> int:
    """Run the command against a scripted scheduler; the exit status."""
    with serving(fake or FakeScheduler()) as target:
        return cli.main([argv[0], "--target", target, *argv[1:]])


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command line that is wrong: the status is 2; gives what was said on stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_generate_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The text appears on stdout with one newline after it, and nothing else does."""
    assert run("generate", "Hi") == 0
    assert capsys.readouterr() == ("Hello world\n", "")


def test_text_that_ends_a_line_gets_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A newline of the model's own is the last one."""
    fake = FakeScheduler(lambda request: [started(), committed("a\n", [1]), finished()])
    assert run("generate", "Hi", fake=fake) == 0
    assert capsys.readouterr().out == "a\n"


def test_generate_without_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-stream prints the same."""
    assert run("generate", "--no-stream", "Hi") == 0
    assert capsys.readouterr() == ("Hello world\n", "")


def test_generate_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one line with all of the completion."""
    assert run("generate", "--json", "Hi", "--seed", "5") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    completion = json.loads(out)
    assert completion["text"] == "Hello world"
    assert completion["seed"] == 5
    assert completion["usage"]["forwards"] == 2


def test_generate_prints_every_sample(capsys: pytest.CaptureFixture[str]) -> None:
    """--n prints the samples in order, as text or as a line of JSON each."""
    steps: list[Step] = [started(), committed("b", [2], sample_index=1), finished(sample_index=1)]
    fake = FakeScheduler(lambda request: [*steps, committed("a", [1]), finished()])
    assert run("generate", "Hi", "--n", "2", fake=fake) == 0
    assert capsys.readouterr().out == "a\nb\n"
    assert run("generate", "Hi", "--n", "2", "--json", fake=fake) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["sample_index"], line["text"]) for line in lines] == [(0, "a"), (1, "b")]


def test_records_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--logprobs and --first-unmask-steps ask for values and print them; left out they are null."""
    values = committed("ab", [5, 6], logprobs=[-0.5, -2.0], first_unmask_steps=[3, 0])
    fake = FakeScheduler(lambda request: [started(), values, finished()])
    assert run("generate", "--json", "--logprobs", "--first-unmask-steps", "Hi", fake=fake) == 0
    assert run("generate", "--json", "--logprobs", "Hi", fake=fake) == 0
    both, one = map(json.loads, capsys.readouterr().out.splitlines())
    assert (both["logprobs"], both["first_unmask_steps"]) == ([-0.5, -2.0], [3, 0])
    assert (one["logprobs"], one["first_unmask_steps"]) == ([-0.5, -2.0], None)
    assert [(request.logprobs, request.first_unmask_steps) for request in fake.requests] == [
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize("flag", ["--logprobs", "--first-unmask-steps"])
def test_records_without_json_are_wrong_usage(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for and never shown would be a waste: status 2, and the flag is named."""
    assert cli.main(["generate", flag, "Hi"]) == 2
    assert f"{flag}: only --json" in capsys.readouterr().err


def test_a_prompt_is_one_user_message() -> None:
    """By default the prompt is a turn of a chat; --system stands before it, and the chat's template takes variables;
    --raw sends plain text."""
    fake = FakeScheduler()
    run("generate", "Hi", fake=fake)
    run("generate", "Hi", "--system", "Be brief.", "--chat-template-kwargs", '{"enable_thinking": false}', fake=fake)
    run("generate", "Hi", "--raw", fake=fake)
    user = pb.ChatMessage(role="user", content="Hi")
    assert list(fake.requests[0].messages.messages) == [user]
    assert list(fake.requests[1].messages.messages) == [pb.ChatMessage(role="system", content="Be brief."), user]
    assert fake.requests[1].messages.chat_template_kwargs == '{"enable_thinking": false}'
    assert fake.requests[2].text == "Hi"


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt - is what stands on stdin, to its end."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("line 1\nline 2\n"))
    fake = FakeScheduler()
    run("generate", "-", "--raw", fake=fake)
    assert fake.requests[0].text == "line 1\nline 2\n"


def test_every_flag_reaches_the_request() -> None:
    """Each flag sets its field, repeated ones add up."""
    fake = FakeScheduler()
    flags = (
        "--max-new-tokens 5 --temperature 0.5 --top-p 0.25 --top-k 4 --min-p 0.125 --seed 0 --stop a --stop b "
        "--stop-token-id 1 --stop-token-id 2 --ignore-eos --algorithm JointThreshold --param threshold=0.75 "
        "--param max_post_edit_steps=2 --n 1 --priority -3 --request-id mine --parse-special-tokens --timeout 60 --raw"
    )
    assert run("generate", "Hi", *flags.split(), fake=fake) == 0
    assert fake.requests == [
        pb.GenerateRequest(
            request_id="mine",
            text="Hi",
            sampling=pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=0),
            max_new_tokens=5,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            algorithm="JointThreshold",
            algorithm_params={"threshold": 0.75, "max_post_edit_steps": 2},
            n=1,
            priority=-3,
            parse_special_tokens=True,
        )
    ]


def test_flags_left_out_set_nothing() -> None:
    """Without flags the request holds the prompt alone."""
    fake = FakeScheduler()
    run("generate", "Hi", "--raw", fake=fake)
    assert fake.requests == [pb.GenerateRequest(text="Hi")]


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.UNAVAILABLE, 1), (grpc.StatusCode.INTERNAL, 1), (grpc.StatusCode.INVALID_ARGUMENT, 2)],
)
def test_an_error_has_one_line_and_a_status(
    code: grpc.StatusCode, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure is one line on stderr; the status is 1, or 2 when the request was refused."""
    assert run("generate", "Hi", fake=FakeScheduler(lambda request: [failure(code, "why")])) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fdfo: ")
    assert err.count("\n") == 1
    assert "why" in err


def test_text_before_an_error_keeps_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The half answer stays, ended by a newline, and the error follows on stderr."""
    steps: list[Step] = [started(), committed("half", [1]), failure(grpc.StatusCode.INTERNAL, "why")]
    assert run("generate", "Hi", fake=FakeScheduler(lambda request: steps)) == 1
    out, err = capsys.readouterr()
    assert out == "half\n"
    assert "why" in err


def test_an_aborted_request_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Reason abort gives status 1 and says so, streamed or not."""
    fake = FakeScheduler(lambda request: [started(), finished(pb.FINISH_REASON_ABORT)])
    assert run("generate", "Hi", fake=fake) == 1
    assert run("generate", "--no-stream", "Hi", fake=fake) == 1
    assert capsys.readouterr().err == 2 * "fdfo: the request was aborted\n"


def test_no_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a scheduler the status is 1 and the line says how to start one."""
    assert cli.main(["generate", "--target", "127.0.0.1:1", "Hi"]) == 1
    assert "fdfo serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["generate"], "prompt"),
        (["generate", "Hi", "--colour"], "--colour"),
        (["generate", "Hi", "--temp", "1"], "--temp"),
        (["generate", "Hi", "--temperature", "hot"], "--temperature"),
        (["generate", "Hi", "--param", "threshold"], "NAME=NUMBER"),
        (["generate", "Hi", "--param", "threshold=high"], "NAME=NUMBER"),
        (["generate", "Hi", "--chat-template-kwargs", "{"], "JSON object"),
        (["generate", "Hi", "--chat-template-kwargs", "[1]"], "JSON object"),
        (["generate", "Hi", "--target", "localhost"], "host:port"),
        (["info", "Hi"], "Hi"),
    ],
)
def test_wrong_usage(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong on the command line is named, with status 2; flags are not abbreviated."""
    assert named in usage_error(capsys, *argv)


def test_what_the_client_refuses_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A number that does not fit the wire, and --raw with what belongs to messages, give status 2 and the name."""
    assert cli.main(["generate", "Hi", "--max-new-tokens", "-1"]) == 2
    assert cli.main(["generate", "Hi", "--raw", "--system", "x"]) == 2
    assert cli.main(["generate", "Hi", "--raw", "--chat-template-kwargs", "{}"]) == 2
    err = capsys.readouterr().err
    assert "max_new_tokens" in err
    assert "--system" in err
    assert "--chat-template-kwargs" in err


INFO = pb.GetServerInfoResponse(
    scheduler_id="s1",
    version="0.1",
    served_model_name="tiny",
    block_size=32,
    context_length=1024,
    algorithm="LowConfidence",
    fdfo=True,
    running=2,
    queued=1,
    rounds_in_flight=1,
    workers=[
        pb.WorkerState(target="w:1", ready=True, rows=2, max_rows=64, pages_held=3, pages_free=7, pages_total=10),
        pb.WorkerState(target="w:2", last_error="connection refused"),
    ],
    counters=pb.SchedulerCounters(
        published_tokens=60, forwards=20, denoise_row_forwards=50, waiting_row_forwards=10, rounds=15
    ),
)


def test_info_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """info shows model, requests, ratios and each worker, a lost one with its error."""
    assert run("info", fake=FakeScheduler(infos=[INFO])) == 0
    out = capsys.readouterr().out
    for part in (
        "tiny, blocks of 32",
        "LowConfidence, FDFO",
        "2 running, 1 queued",
        "3.00 tokens and 3.00 rows per forward, 10 row-forwards wasted",
        "w:1  ready, 2 of 64 rows; KV pages: 3 held, 0 cached, 7 free of 10",
        "w:2  NOT READY  connection refused",
    ):
        assert part in out


def test_info_of_a_fresh_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first forward, and without workers, nothing is divided by zero."""
    assert run("info", fake=FakeScheduler(infos=[pb.GetServerInfoResponse()])) == 0
    assert "none known" in capsys.readouterr().out


def test_info_json_has_a_line_for_each_target(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one line a scheduler, with its target and all fields."""
    with serving(FakeScheduler(infos=[INFO])) as one, serving(FakeScheduler()) as two:
        assert cli.main(["info", "--json", "--target", f"{one},{two}"]) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["target"] for line in lines] == [one, two]
    assert lines[0]["workers"][1]["last_error"] == "connection refused"
    assert lines[0]["counters"]["waiting_row_forwards"] == 10


def test_info_goes_on_past_a_scheduler_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """It is named on stderr and the status is 1; the others are shown."""
    with serving(FakeScheduler(infos=[INFO])) as target:
        assert cli.main(["info", "--json", "--target", f"127.0.0.1:1,{target}"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["target"] == target
    assert err.startswith("fdfo: no scheduler is available at 127.0.0.1:1")


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS if name != "chaos")], ids=" ".join)
def test_help_has_examples_and_statuses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends well and shows examples and what the exit status means."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and cli.EXIT_STATUS in out
    assert out.count("exit status:") == 1


def test_the_page_of_the_commands_has_all_of_them() -> None:
    """docs/cli.md has a section for each command, and the exit statuses word for word."""
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert re.findall(r"^## `fdfo (\S+)`$", page, re.MULTILINE) == list(cli.COMMANDS)
    for status in cli.EXIT_STATUS.removeprefix("exit status: ").split(", "):
        number, _, meaning = status.partition(" ")
        assert f"| {number} | {meaning}" in page


LOADED = """
import sys
from fdfo_client import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    print(*sorted(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["", "generate", "bench", "top", "doctor"])
def test_help_loads_no_more_than_it_needs(command: str) -> None:
    """Neither what draws and measures nor the services are imported to show flags, and no other command."""
    words = [sys.executable, "-c", LOADED, *command.split(), "--help"]
    loaded = set(subprocess.run(words, capture_output=True, text=True, check=True).stderr.split())
    heavy = {"torch", "numpy", "matplotlib", "rich", "jinja2", "tokenizers", "structlog"}
    assert not {name.partition(".")[0] for name in loaded} & heavy
    commands = {module for module, _ in cli.COMMANDS.values()} & loaded
    used = {"fdfo_client.serve"} if command == "doctor" else set()  # for the folder that ships
    assert commands == used | ({cli.COMMANDS[command][0]} if command else set())


@pytest.mark.parametrize("command", [["--help"], ["generate", "Hi"]])
def test_no_room_for_the_output(command: list[str]) -> None:
    """On a full disk a command ends with status 1 and one line."""
    with serving(FakeScheduler()) as target, open("/dev/full", "w") as full:
        words = [*command, *(["--target", target] if len(command) > 1 else [])]
        process = subprocess.run(
            [sys.executable, "-m", "fdfo_client", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (process.returncode, process.stderr) == (1, "fdfo: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its encoding has not becomes something of the same width."""
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding=encoding))
    fake = FakeScheduler(lambda request: [started(), committed("a界▁█░\u0301é", [1]), finished()])
    assert run("generate", "Hi", fake=fake) == 0
    accent = "?" if encoding == "ascii" else "\xe9"
    assert bytes_out.getvalue().decode(encoding) == f"a??_#.{accent}\n"


def test_a_reader_that_goes_away() -> None:
    """When the reader of stdout closes it, as head does, the command ends with status 1 and no traceback."""
    long_text = FakeScheduler(lambda request: [started(), *[committed("x" * 65536, [1])] * 20, finished()])
    with serving(long_text) as target:
        command = [sys.executable, "-m", "fdfo_client", "generate", "--target", target, "Hi"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        with process.stderr as stderr:
            assert stderr.read() == b""
        assert process.wait(timeout=10) == 1

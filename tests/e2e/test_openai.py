"""The package `openai`, unmodified, through the gateway `smg`, unmodified: `make openai-check`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fdfo_client import Client
from tests.e2e.served import POLL_S, ROOT, Served, service, serving

openai = pytest.importorskip("openai", reason="the package openai is not installed: make venv")
pytest.importorskip("smg", reason="the package smg is not installed: make venv")

SIMULATED = ROOT / "models" / "simulated-h200-llada2-mini"
MODELS = """
tiny-llada2-eager:
  algorithm: LowConfidence
  params: {threshold: 0.3}
"""
UNSURE = "Tell me a story about Zoe."  # unlike what the model learned, so that thresholds and draws decide
COUNT = "Count from 3 to 9."
TOTALS = "Start at 9: +3 +2 +2 -1 +1 +4 -8 -6"  # its answer has three blocks
PROMPTS = (COUNT, UNSURE, "What is the number of days in a week?", "Omar has 2 eggs. Omar buys 4 more. How many eggs?")
JSON = {"Content-Type": "application/json"}
# On the simulated device 3000 tokens take some ten seconds.
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000}


class Door:
    """What the tests talk to: the gateway of `fdfo serve`, and behind it the scheduler itself."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.target = served.target
        self.url = served.openai
        self.address = self.url.split("/")[2]
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=30)

    def chat(self, prompt: str, model: str = "tiny-llada2", **options: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return self.client.chat.completions.create(model=model, messages=messages, **{"max_tokens": 64, **options})

    def grpc(self, prompt: str, **options: Any) -> Any:
        """The same of our own client."""
        with Client(self.target) as client:
            return client.generate(messages=[{"role": "user", "content": prompt}], **{"max_new_tokens": 64, **options})

    def add(self, target: str, name: str) -> None:
        """One more scheduler behind the gateway; returns when it is used and the model's tokenizer is there."""
        url = f"grpc://{target}"

        def is_used() -> bool:
            schedulers, tokenizers = self._call("GET", "/workers"), self._call("GET", "/v1/tokenizers")
            is_healthy = any(it["url"] == url and it["is_healthy"] for it in schedulers["workers"])
            return is_healthy and any(it["name"] == name for it in tokenizers["tokenizers"])

        assert self._call("POST", "/workers", {"url": url})["status"] == "accepted"
        until(is_used)

    def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=5)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), JSON)
            fields: dict[str, Any] = json.load(connection.getresponse())
        return fields


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("openai")
    (folder / "models.yaml").write_text(MODELS)
    flags = ["--batch-invariant", "--served-models", str(folder / "models.yaml"), "--openai-port", "0"]
    with serving(folder / "log", *flags) as running:
        door = Door(running)
        with door.client:
            yield door


@pytest.fixture(scope="module")
def slow(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts schedulers of a simulated device behind the gateway, one row and one place in the queue each."""
    folder = tmp_path_factory.mktemp("slow")
    with contextlib.ExitStack() as stack:
        _, worker = stack.enter_context(service(folder / "worker", "worker_svc", model=SIMULATED))

        def start(name: str, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
            flags = ("--workers", worker, "--vllm-grpc", "--max-running-requests-per-client", "1", *flags)
            flags = ("--max-queued-requests", "1", "--served-model-name", name, *flags)
            process, target = stack.enter_context(service(folder / name, "scheduler_svc", *flags, model=SIMULATED))
            until(lambda: info(target).workers[0].ready)
            door.add(target, name)
            return process, target

        yield start


@pytest.fixture(scope="module")
def busy(slow: Callable[..., Any]) -> str:
    """The target of the scheduler of the model "busy"."""
    return str(slow("busy")[1])


def info(target: str) -> Any:
    with Client(target) as client:
        return client.server_info(timeout=5)


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(POLL_S)


def texts(chunks: Any) -> list[str]:
    return [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_p": 0.95, "seed": 5}])
def test_a_chat_is_what_our_own_client_gets(door: Door, options: dict[str, Any]) -> None:
    """Text, tokens with their log probabilities, finish reason and usage are those over gRPC; greedy and seeded."""
    for prompt in PROMPTS:
        ours = door.grpc(prompt, logprobs=True, **options)
        answer = door.chat(prompt, logprobs=True, **options)
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (ours.text, ours.finish_reason)
        assert "".join(token.token for token in choice.logprobs.content) == ours.text
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(ours.logprobs)
        assert answer.usage.completion_tokens == ours.usage.completion_tokens
        assert answer.usage.prompt_tokens == ours.usage.prompt_tokens


def test_a_streamed_chat_is_the_same(door: Door) -> None:
    """The pieces are the whole answer, in more than one piece where it has several blocks, and usage comes last."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    whole = door.chat(TOTALS, **options)
    chunks = list(door.chat(TOTALS, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(texts(chunks)) == whole.choices[0].message.content
    assert len(texts(chunks)) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 100


@pytest.mark.parametrize("stop", ["7", " is", "umber of d", "ven."])
def test_a_stop_string_never_leaks(door: Door, stop: str) -> None:
    """Streamed and not, the text ends where it does over gRPC, also where the string begins inside a token."""
    prompt = COUNT if stop == "7" else PROMPTS[2]
    ours = door.grpc(prompt, stop=[stop])
    assert ours.stop_string == stop
    (choice,) = door.chat(prompt, stop=[stop]).choices
    assert (choice.message.content, choice.finish_reason, choice.matched_stop) == (ours.text, "stop", stop)
    assert "".join(texts(door.chat(prompt, stop=[stop], stream=True))) == ours.text


def test_samples_are_those_of_the_seed(door: Door) -> None:
    """n=4 gives the samples that our own client gets, each under its index, whole and streamed. A later one of them has
    fewer forwards, so it ends first."""
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 4}
    samples = door.grpc(UNSURE, **options).samples
    ours, forwards = [sample.text for sample in samples], [sample.usage.forwards for sample in samples]
    assert len(set(ours)) == 4 and forwards != sorted(forwards)
    choices = door.chat(UNSURE, **options).choices
    assert [(choice.index, choice.message.content) for choice in choices] == list(enumerate(ours))
    streamed = [""] * 4
    for chunk in door.chat(UNSURE, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == ours


def test_completions_and_responses(door: Door) -> None:
    """A completion continues a plain prompt, and the Responses API gives the chat's answer, streamed too."""
    prompt = f"<role>HUMAN</role>{COUNT}<|role_end|><role>ASSISTANT</role>"
    with Client(door.target) as client:
        ours = client.generate(prompt, parse_special_tokens=True, max_new_tokens=12)
    complete = door.client.completions.create
    assert complete(model="tiny-llada2", prompt=prompt, max_tokens=12).choices[0].text == ours.text == "3 4 5 6 7 8 "
    pieces = complete(model="tiny-llada2", prompt=prompt, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == ours.text

    respond = door.client.responses.create
    request: dict[str, Any] = {"model": "tiny-llada2", "input": COUNT, "temperature": 0, "max_output_tokens": 64}
    assert respond(**request).output_text == door.grpc(COUNT).text
    deltas = [event.delta for event in respond(**request, stream=True) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == door.grpc(COUNT).text


def test_a_models_name_chooses_the_algorithm(door: Door) -> None:
    """The names of --served-models are listed, and each denoises as its entry says."""
    assert {model.id for model in door.client.models.list()} >= {"tiny-llada2", "tiny-llada2-eager"}
    eager = door.chat(UNSURE, model="tiny-llada2-eager").choices[0].message.content
    assert eager == door.grpc(UNSURE, algorithm="LowConfidence", algorithm_params={"threshold": 0.3}).text
    assert eager != door.chat(UNSURE).choices[0].message.content


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ({"prompt": "1 2 3 " * 2000}, 400, "maximum context length is 4096"),
        ({"max_tokens": 5000}, 400, "max_tokens: must be at most 40"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs must be 0"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: is not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "constrained output is not served"),
        ({"prompt": "<|mask|>"}, 400, "is the mask token"),
        ({"seed": -3}, 400, "seed: must not be below 0"),
        ({"model": "tiny-llada9"}, 404, "tiny-llada9"),
    ],
)
def test_what_cannot_be_served_is_refused(door: Door, options: dict[str, Any], status: int, says: str) -> None:
    """The status is OpenAI's and the message names what is wrong."""
    with pytest.raises(openai.APIStatusError) as caught:
        door.chat(**{"prompt": COUNT, **options})
    assert caught.value.status_code == status
    assert says in caught.value.message


def test_a_dropped_stream_is_aborted(door: Door, busy: str) -> None:
    """A client that closes its stream frees its row; the gateway sends an Abort when it writes the next block."""
    aborted = info(busy).counters.requests_aborted
    with door.client.chat.completions.create(model="busy", stream=True, **LONG) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert info(busy).running == 1
    until(lambda: info(busy).running == 0)
    assert info(busy).counters.requests_aborted == aborted + 1


def test_a_dropped_call_is_aborted(door: Door, busy: str) -> None:
    """A client that hangs up before its answer frees its row, and one that waits in the queue its place."""
    aborted = info(busy).counters.requests_aborted
    with contextlib.ExitStack() as calls:
        for _ in range(2):
            connection = http.client.HTTPConnection(door.address)
            calls.callback(connection.close)
            connection.request("POST", "/v1/chat/completions", json.dumps({"model": "busy", **LONG}), JSON)
        until(lambda: (info(busy).running, info(busy).queued) == (1, 1))
    until(lambda: (info(busy).running, info(busy).queued) == (0, 0))
    assert info(busy).counters.requests_aborted == aborted + 2


def test_an_overloaded_scheduler_is_429(door: Door, busy: str) -> None:
    """With row and queue taken the next request is refused, and there is room again when they are free."""
    with Client(busy) as ours, contextlib.ExitStack() as streams:
        for _ in range(2):
            next(streams.enter_context(contextlib.closing(ours.stream("hello", max_new_tokens=3000))))
        until(lambda: (info(busy).running, info(busy).queued) == (1, 1))
        with pytest.raises(openai.RateLimitError, match="the queue is full; try again in"):
            door.client.chat.completions.create(model="busy", **LONG)
    until(lambda: info(busy).running == 0)
    assert door.client.chat.completions.create(model="busy", **{**LONG, "max_tokens": 5}).usage.completion_tokens == 5


def test_one_of_two_schedulers_drains(door: Door, slow: Callable[..., Any]) -> None:
    """While one of two stops, its request ends whole, new ones are answered by the other, and none fails."""
    (leaving, old), (_, new) = slow("twin", "--stop-grace-s", "10"), slow("twin")
    answers: list[Any] = []

    def request(num_tokens: int) -> None:
        options = {**LONG, "max_tokens": num_tokens}
        answers.append(door.client.chat.completions.create(model="twin", **options).usage.completion_tokens)

    running = [threading.Thread(target=request, args=(300,)) for _ in range(2)]
    for thread in running:
        thread.start()
    until(lambda: (info(old).running, info(new).running) == (1, 1))
    leaving.send_signal(signal.SIGTERM)
    for _ in range(4):
        request(5)
    for thread in running:
        thread.join()
    assert sorted(answers) == [5, 5, 5, 5, 300, 300]
    assert leaving.wait(timeout=10) == 0


def test_a_scheduler_that_dies_is_back_under_all_its_names(door: Door) -> None:
    """`fdfo serve` starts it again at its ports, and the gateway finds it there."""
    children = Path(f"/proc/{door.served.process.pid}/task/{door.served.process.pid}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if b"scheduler_svc" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(pid, signal.SIGKILL)

    def answers(model: str) -> bool:
        with contextlib.suppress(openai.APIError):
            return bool(door.chat(COUNT, model=model).choices[0].message.content)
        return False

    for model in ("tiny-llada2", "tiny-llada2-eager"):
        until(lambda model=model: answers(model), 20)  # type: ignore[misc]


def blocks(language: str) -> list[str]:
    """What docs/openai.md shows in a language."""
    page = (ROOT / "docs" / "openai.md").read_text()
    return [part.partition("```")[0] for part in page.split(f"```{language}\n")[1:]]


def test_the_commands_of_the_page(door: Door, tmp_path: Path) -> None:
    """curl and the Python of docs/openai.md, as they stand there but for the port, give the answer of the page."""
    (curl,) = [block for block in blocks("sh") if block.startswith("curl")]
    (python,) = blocks("python")
    program = tmp_path / "program.py"
    program.write_text(python.replace("http://127.0.0.1:8000/v1", door.url))
    for words in (["bash", "-c", curl.replace("http://127.0.0.1:8000/v1", door.url)], [sys.executable, str(program)]):
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        assert "3 4 5 6 7" in done.stdout

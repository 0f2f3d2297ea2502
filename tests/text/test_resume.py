"""A sample that is cut off after any of its messages and goes on from what they say: at the level of its commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidField
from fdfo.scheduler.v1 import resume_pb2
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.commit import OutputCommitter
from scheduler_svc.outbox import Outbox
from scheduler_svc.replies import DoneBlock
from scheduler_svc.request import Request
from scheduler_svc.resume import Past, decode, encode
from scheduler_svc.stream import Stream
from scheduler_svc.text import TextCodec
from scheduler_svc.validation import GenerateSpec, Sampling
from tests.text.folders import byte_tokenizer, write_folder
from tests.text.test_commit import ALPHABET, MORE, OTHER_STOP_ID, STOP_ID

B = 4
MASK = STOP_ID + 3


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    special = ("<role>", "<|endoftext|>", "<|role_end|>", "<|mask|>")
    return TextCodec(write_folder(tmp_path_factory.mktemp("resume"), tokenizer=byte_tokenizer(MORE, special)))


class Messages(Stream):
    """A stream that keeps what it is to send."""

    def __init__(self) -> None:
        super().__init__("r", Outbox(), "r")
        self.sent: list[api.GenerateResponse] = []

    def put(self, response: api.GenerateResponse) -> None:
        self.sent.append(response)


@dataclass
class Seen:
    """What a client has of a sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    committed_ids: list[int] = field(default_factory=list)
    value: bytes = b""
    finished: api.Finished | None = None

    def take(self, response: api.GenerateResponse) -> None:
        if response.HasField("started"):
            self.value = response.started.resume
            return
        assert self.finished is None
        if response.HasField("finished"):
            self.finished = api.Finished()
            self.finished.CopyFrom(response.finished)
            self.committed_ids += self.finished.committed_ids
            self.value = self.finished.resume
            self.finished.ClearField("committed_ids")
            return
        message = response.committed
        self.text += message.text
        self.token_ids += message.token_ids
        self.logprobs += message.logprobs
        self.steps += message.first_unmask_steps
        self.committed_ids += message.committed_ids
        self.value = message.resume


def new_request(codec: TextCodec, spec: GenerateSpec) -> Request:
    request = Request(
        spec=spec,
        seed=7,
        block_size=B,
        mask_token_id=MASK,
        committer=OutputCommitter(
            codec,
            model_stop_ids=[STOP_ID],
            request_stop_ids=spec.request_stop_ids,
            stop_strings=spec.stop_strings,
            ignore_eos=spec.ignore_eos,
            max_new_tokens=spec.max_new_tokens,
        ),
        worker_stop_ids=[],
        stream=Messages(),
    )
    request.stream.samples = [request]
    return request


def run(request: Request, ids: Sequence[int], num_messages: int | None = None) -> list[api.GenerateResponse]:
    """Start it and commit blocks of `ids`, the tokens after the prompt, until it finishes or the messages are sent.

    Block b takes b + 1 forwards; token i has log probability -i and step i.
    """
    stream = request.stream
    assert isinstance(stream, Messages)
    stream.start(0)
    prompt = request.spec.prompt_ids
    while not request.is_finished and (num_messages is None or len(stream.sent) < num_messages):
        number = request.block_index
        first = number * B - len(prompt)
        places = range(max(first, -len(prompt)), first + B)
        # Behind the end of the ids: what a block that ended early holds.
        block = [prompt[i] if i < 0 else ids[i] if i < len(ids) else MASK for i in places]
        request.forwards += number + 1
        request.rounds += 1
        request.commit_block(DoneBlock(number, block, [*map(abs, places)], [-1.0 * i for i in places]))
    return stream.sent if num_messages is None else stream.sent[:num_messages]


def cut_off(codec: TextCodec, spec: GenerateSpec, ids: Sequence[int], cuts: Sequence[int]) -> Seen:
    """What a client has in the end whose scheduler dies after so many messages, and the next one after so many."""
    seen = Seen()
    for cut in [*cuts, None]:
        request = new_request(codec, spec)
        if seen.value:
            request.resume(Past("resumes[0]", seen.committed_ids, decode(seen.value, "").sample))
        for message in run(request, ids, cut):
            seen.take(message)
        if seen.finished is not None:
            break
    return seen


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.sampled_from(ALPHABET), max_size=30),
    prompt_length=st.integers(1, 9),
    stop_strings=st.lists(st.text("abcé€\ufffd", min_size=1, max_size=4), max_size=3),
    ignore_eos=st.booleans(),
    max_new_tokens=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_a_cut_changes_nothing(
    codec: TextCodec,
    ids: list[int],
    prompt_length: int,
    stop_strings: list[str],
    ignore_eos: bool,
    max_new_tokens: int,
    cuts: list[int],
) -> None:
    """Wherever the schedulers die, text, ids, records, end and usage together are those of the undisturbed run."""
    spec = GenerateSpec(
        request_id="r",
        prompt_ids=[97] * prompt_length,
        sampling=Sampling(0.0, 1.0, 0, 0.0, None),
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop_strings),
        request_stop_ids=(OTHER_STOP_ID,),
        ignore_eos=ignore_eos,
        algorithm="LowConfidence",
        algorithm_params={},
        logprobs=True,
        first_unmask_steps=True,
    )
    ids = [*ids, OTHER_STOP_ID]
    calm = cut_off(codec, spec, ids, [])
    assert calm.finished is not None and MASK not in calm.committed_ids
    assert len(calm.token_ids) == len(calm.logprobs) == len(calm.steps) == calm.finished.usage.completion_tokens
    assert cut_off(codec, spec, ids, cuts) == calm
    assert cut_off(codec, spec, ids, [len(run(new_request(codec, spec), ids)) - 1]) == calm, "only Finished was lost"


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=80), place=st.integers(0), bit=st.integers(0, 7))
def test_damaged_values_are_refused(data: bytes, place: int, bit: int) -> None:
    """Any bytes, any flipped bit and any cut of a good value: an error that names the field, never another value."""
    state = resume_pb2.ResumeState(sample=resume_pb2.ResumedSample(sample_index=3, published_characters=9))
    good = encode(state.SerializeToString())
    assert decode(good, "x") == state
    place %= len(good)
    flipped = bytearray(good)
    flipped[place] ^= 1 << bit
    for bad in (data, bytes(flipped), good[:place], good + b"\0"):
        with pytest.raises(InvalidField) as caught:
            decode(bad, "resumes[0].value")
        assert caught.value.field == "resumes[0].value"


def test_a_value_of_another_version_is_refused_in_words() -> None:
    """Which version it has and which is known; the same for one that only pretends to be ours."""
    with pytest.raises(InvalidField, match="is of version 9; this scheduler knows version 1"):
        decode(b"\x09abcdefghijk", "v")
    with pytest.raises(InvalidField, match="damaged"):
        decode(encode(b"\xff\xff"), "v")

"""Text as a user of the client library gets it: the scheduler's own commits, over gRPC, into the library's events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo_client import Client, Committed, Finished, RetryPolicy
from fdfo_client.testing import FakeScheduler, lose_connection, serving
from scheduler_svc.resume import Past, decode
from scheduler_svc.text import TextCodec
from scheduler_svc.validation import GenerateSpec, Sampling
from tests.text.folders import byte_tokenizer, write_folder
from tests.text.test_commit import MORE, STOP_ID, naive
from tests.text.test_resume import B, new_request, run

TEXT = "aé€😀ßЖ日本語🚀z€"  # of one to four bytes; a token is a byte, a block four of them
LIMIT = 1000


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    special = ("<role>", "<|endoftext|>", "<|role_end|>", "<|mask|>")
    return TextCodec(write_folder(tmp_path_factory.mktemp("border"), tokenizer=byte_tokenizer(MORE, special)))


def scheduler_of(codec: TextCodec, ids: Sequence[int]) -> FakeScheduler:
    """It answers with the messages that these tokens, committed block by block, give; resumes are taken too."""

    def script(request: api.GenerateRequest) -> list[api.GenerateResponse]:
        spec = GenerateSpec(
            request_id=request.request_id,
            prompt_ids=list(request.prompt_ids.ids),
            sampling=Sampling(0.0, 1.0, 0, 0.0, None),
            max_new_tokens=LIMIT,
            stop_strings=tuple(request.stop),
            request_stop_ids=(),
            ignore_eos=False,
            algorithm="LowConfidence",
            algorithm_params={},
            logprobs=False,
            first_unmask_steps=False,
        )
        row = new_request(codec, spec)
        for resume in request.resumes:
            row.resume(Past("resumes[0]", list(resume.committed_ids), decode(resume.value, "").sample))
        return run(row, ids)

    return FakeScheduler(script)


@pytest.mark.parametrize(
    "stop",
    [[], ["😀"], ["€😀ß"], ["本語🚀zz", "語🚀z€€"], ["é", "€"], ["\ufffd"]],
    ids=["none", "in a block", "over blocks", "two that only begin", "the first of two", "never"],
)
@pytest.mark.parametrize("shift", range(B))
def test_whole_characters_and_no_stop_string(codec: TextCodec, stop: list[str], shift: int) -> None:
    """With a block border at every byte: each event has what its block makes known, whole characters of no stop string,
    no more and no less; and a scheduler that is lost after any of them changes nothing."""
    ids = [*TEXT.encode(), STOP_ID]
    known = [("", list[int]())]
    for end in range(B - shift, len(ids) + B, B):
        text, token_ids, finish = naive(codec, ids[:end], stop, [STOP_ID], LIMIT)
        if (text, token_ids) != known[-1]:
            known.append((text, token_ids))
    assert finish is not None and "\ufffd" not in text
    scheduler = scheduler_of(codec, ids)
    prompt_ids = [97] * (shift + B)
    with serving(scheduler) as target, Client(target, retry=RetryPolicy(first_delay_s=0.0)) as client:
        *_, last = events = list(client.stream(prompt_ids=prompt_ids, stop=stop))
        blocks = [event for event in events if isinstance(event, Committed)]
        assert [(event.text, event.token_ids) for event in blocks] == [
            (new_text.removeprefix(old_text), tuple(new_ids[len(old_ids) :]))
            for (old_text, old_ids), (new_text, new_ids) in itertools.pairwise(known)
        ]
        assert isinstance(last, Finished)
        assert (last.reason, last.stop_string) == (finish.reason, finish.stop_string)

        for num_blocks in range(len(blocks) + 1):
            scheduler.faults.append(lose_connection(num_blocks))
            completion = client.generate(prompt_ids=prompt_ids, stop=stop)
            assert (completion.text, list(completion.token_ids), completion.resumes) == (text, token_ids, 1)

"""The fake scheduler that users get for their tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from fdfo_client import (
    Client,
    Committed,
    DeadlineExceeded,
    Overloaded,
    RetryPolicy,
    ServerUnavailable,
    Started,
    Timeout,
    Usage,
)
from fdfo_client.testing import FakeScheduler, exceed_deadline, lose_connection, overload, serving, stall

QUICK = RetryPolicy(first_delay_s=0.0)
TEXTS = ["é€", "😀b", "c"]


@pytest.mark.parametrize(
    ("num_samples", "num_blocks"), [*((1, number) for number in range(4)), *((3, number) for number in (0, 1, 5, 9))]
)
def test_an_answer_lost_anywhere_is_whole(num_samples: int, num_blocks: int) -> None:
    """Each sample has its text and all that goes with its tokens, whatever number of blocks came before."""
    calm, lossy = FakeScheduler(TEXTS), FakeScheduler(TEXTS, faults=[lose_connection(num_blocks)])
    with serving(calm) as one, serving(lossy) as two, Client(one) as client, Client(two, retry=QUICK) as other:
        answers = [
            each.generate("x", n=num_samples, seed=5, request_id="r", logprobs=True, first_unmask_steps=True)
            for each in (client, other)
        ]
    assert [sample.text for sample in answers[0].samples] == ["é€😀bc"] * num_samples
    for sample, again in zip(answers[0].samples, answers[1].samples, strict=True):
        assert (again.text, again.token_ids, again.usage) == (sample.text, sample.token_ids, sample.usage)
        assert again.logprobs is not None and len(again.logprobs) == len(again.token_ids) == len(again.text)
    assert answers[0].usage == Usage(prompt_tokens=1, completion_tokens=5, forwards=3, rounds=3)
    assert [len(scheduler.requests) for scheduler in (calm, lossy)] == [1, 2]


def test_faults_are_for_a_call_each() -> None:
    """In order, and calls after the last one have none; more may be added."""
    scheduler = FakeScheduler(["a", "b"], faults=[overload(), lose_connection(1), exceed_deadline(1)])
    with serving(scheduler) as target, Client(target, retry=RetryPolicy(max_retries=0)) as client:
        with pytest.raises(Overloaded) as full:
            client.generate("x")
        assert full.value.retry_after_s is None
        with pytest.raises(ServerUnavailable):
            client.generate("x")
        with pytest.raises(DeadlineExceeded) as late:
            client.generate("four", n=2)
        assert late.value.part == "total"
        assert late.value.usage == (Usage(4, 1, 0, 1, 1), Usage(4, 0, 0, 0, 0)), "a block of the first sample"
        assert client.generate("x").text == "ab"
        scheduler.faults.append(overload(retry_after_s=1.5))
        with pytest.raises(Overloaded) as full:
            client.generate("x")
        assert full.value.retry_after_s == 1.5


def test_a_stalled_call_ends_by_abort_or_cancel() -> None:
    """Its request can be found by the id that it was given, and what became of it is told."""
    scheduler = FakeScheduler(["a", "b"], faults=[stall(1), stall(), stall()])
    with serving(scheduler) as target, Client(target) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "x")
        assert client.abort(scheduler.held.get(timeout=10))
        assert (running.result(timeout=10).text, running.result().finish_reason) == ("a", "abort")
        with pytest.raises(DeadlineExceeded, match="first_token"):
            client.generate("x", timeout=Timeout(first_token=0.02))
        assert scheduler.cancelled.get(timeout=10) == scheduler.held.get(timeout=10) == "fake-2"
        for event in client.stream("x"):
            assert isinstance(event, Started)
            break
        assert scheduler.cancelled.get(timeout=10) == "fake-3"


def test_resumes_that_do_not_fit_are_refused() -> None:
    """Tokens that were never sent are an error here as at a real scheduler, so a client that loses some is found."""
    with serving(FakeScheduler(["ab"])) as target, grpc.insecure_channel(target) as channel:
        resumes = [pb.Resume(committed_ids=[1], value=b"0:1")]
        with pytest.raises(grpc.RpcError, match="other tokens than those sent"):
            list(pb_grpc.SchedulerServiceStub(channel).Generate(pb.GenerateRequest(text="x", resumes=resumes)))


def test_a_scheduler_that_comes_back() -> None:
    """`serving` takes a port, so that a client finds it again; one that is taken is an error, at once."""
    scheduler = FakeScheduler(["a", "b"], faults=[stall(1)])
    with ThreadPoolExecutor(1) as pool:
        with serving(scheduler) as target:
            port = int(target.rpartition(":")[2])
            with pytest.raises(RuntimeError):
                serving(FakeScheduler(), port).__enter__()
            client = Client(target, retry=RetryPolicy(first_delay_s=0.01))
            running = pool.submit(client.generate, "x")
            scheduler.held.get(timeout=10)
        with client, serving(scheduler, port):
            assert running.result(timeout=10).text == "ab"
    assert not [thread for thread in threading.enumerate() if thread.name == "fake-scheduler"]


def test_a_fake_scheduler_is_ready() -> None:
    """`wait_ready` returns at once, with something to divide by."""
    with serving(FakeScheduler()) as target, Client(target) as client:
        info = client.wait_ready(timeout=10)
        events = list(client.stream("x"))
    assert info.workers[0].ready and info.block_size and info.context_length
    assert [event.text for event in events if isinstance(event, Committed)] == ["Hello", " world"]

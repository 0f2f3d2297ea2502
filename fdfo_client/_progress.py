"""What came of a request over all its calls, so that a next call can go on after it."""

from __future__ import annotations

import dataclasses

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._errors import UnexpectedServer
from fdfo_client._types import Event, Finished, Provisional, Started, Usage, event_from_proto, usage_from_proto


class Progress:
    """Hands on each event once, and keeps what a scheduler needs to go on.

    num_news: grows with every event that was handed on, but provisional ones.
    num_resumes: calls that went on with what another had begun.
    usage: by sample, what the scheduler of the last call told when it could not finish it.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.started: Started | None = None
        self.num_news = 0
        self.num_resumes = 0
        self.usage: dict[int, Usage] = {}
        self._request = request
        self._num_samples = request.n or 1
        self._first_value = b""
        self._samples: dict[int, pb.Resume] = {}
        self._finished: set[int] = set()
        # Of the call that runs.
        self._call_has_started = False
        self._call_finished: set[int] = set()

    @property
    def can_resume(self) -> bool:
        """Whether the request was begun, by a scheduler whose requests can be resumed."""
        return bool(self._first_value)

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished."""
        return len(self._finished) == self._num_samples

    def next_request(self) -> pb.GenerateRequest:
        """The message of a next call: the request, or what is left of it."""
        self.usage, self._call_has_started, self._call_finished = {}, False, set()
        if self.started is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = self.started.request_id
        request.resumes.extend(self._samples.values() or [pb.Resume(value=self._first_value)])
        return request

    def take(self, response: pb.GenerateResponse, target: str) -> Event | None:
        """The event that a message of `target` is for the caller, if any. Raises UnexpectedServer for one that may not
        come now."""
        if response.HasField("interrupted"):
            self._keep(response.interrupted)
            self.usage[response.interrupted.sample_index] = usage_from_proto(response.interrupted.usage)
            return None
        event = event_from_proto(response, self._request)
        if event is None:
            return None
        self._check_order(event, target)
        if isinstance(event, Provisional):
            return event
        if isinstance(event, Started):
            if self.started is not None:
                self._go_on(event, target)
                return None
            self.started, self._first_value = event, response.started.resume
        elif isinstance(event, Finished):
            self._keep(response.finished)
            if event.sample_index in self._finished:
                return None
            self._finished.add(event.sample_index)
            event = dataclasses.replace(event, resumes=self.num_resumes)
        else:
            self._keep(response.committed)
        self.num_news += 1
        return event

    def _go_on(self, again: Started, target: str) -> None:
        assert self.started is not None
        if (again.request_id, again.seed) != (self.started.request_id, self.started.seed):
            raise UnexpectedServer(f"{target} did not resume the request, but began another")
        self.num_resumes += 1

    def _keep(self, message: pb.Committed | pb.Finished | pb.Interrupted) -> None:
        sample = self._samples.setdefault(message.sample_index, pb.Resume())
        sample.committed_ids.extend(message.committed_ids)
        sample.value = message.resume

    def _check_order(self, event: Event, target: str) -> None:
        """In a call: Started first, nothing of a sample after its Finished, nothing new of one finished before."""
        if isinstance(event, Started):
            fits, self._call_has_started = not self._call_has_started, True
        else:
            index = event.sample_index
            fits = self._call_has_started and index < self._num_samples and index not in self._call_finished
            if isinstance(event, Finished):
                self._call_finished.add(index)
            else:
                fits = fits and index not in self._finished
        if not fits:
            raise UnexpectedServer(f"{target} sent {type(event).__name__} out of order")

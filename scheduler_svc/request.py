"""One sample of a request and its life: all that is needed to go on with it on any worker, in mid-block.

queued  --start-->  running (on one worker)  --last block or abort-->  finished
   ^------- worker lost, preempted ------------|
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.packing import pack_bits, pack_ids
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.commit import Finish, OutputCommitter, Published
from scheduler_svc.replies import DoneBlock, Snapshot, read_snapshot
from scheduler_svc.stream import Stream
from scheduler_svc.validation import GenerateSpec

RowName = tuple[str, int]  # Stream.name and sample index


@dataclass(eq=False)
class Request:
    """One sample of a live request: a row. `attempt` rises with its every start on a worker; a reply of another
    attempt is dropped."""

    spec: GenerateSpec
    seed: int
    block_size: int
    mask_token_id: int
    committer: OutputCommitter
    worker_stop_ids: list[int]
    stream: Stream
    sample_index: int = 0
    attempt: int = 0
    num_preemptions: int = 0
    committed_ids: list[int] = field(default_factory=list)  # all generated tokens of done blocks
    first_unmask_steps: list[int] = field(default_factory=list)  # of committed_ids, on request
    logprobs: list[float] = field(default_factory=list)  # likewise
    block_index: int = field(init=False)
    forwards: int = 0
    rounds: int = 0
    published_tokens: int = 0
    num_told_ids: int = 0  # committed ids that a message carried
    cached_tokens: int = 0
    is_finished: bool = False
    _incomplete: Snapshot = field(init=False)
    _unread: tuple[pb.RowReplies, int] | None = None  # a newer one, in the reply that brought it

    def __post_init__(self) -> None:
        self.block_index = len(self.spec.prompt_ids) // self.block_size
        prompt_tail = self.spec.prompt_ids[self.block_index * self.block_size :]
        self._set_fresh_block(prompt_tail)

    def _set_fresh_block(self, known_ids: list[int]) -> None:
        num_masked = self.block_size - len(known_ids)
        ids = pack_ids(known_ids + [self.mask_token_id] * num_masked)
        mask = pack_bits([False] * len(known_ids) + [True] * num_masked)
        self._incomplete, self._unread = Snapshot(self.block_index, ids, mask, 0, b""), None

    @property
    def name(self) -> RowName:
        """What tells it from the other rows of this scheduler."""
        return (self.stream.name, self.sample_index)

    @property
    def priority(self) -> int:
        """Its class; a higher one runs earlier."""
        return self.spec.priority

    @property
    def client(self) -> str:
        """Whose it is; clients share the rows."""
        return self.stream.client

    @property
    def is_parked(self) -> bool:
        """Whether its client must read first; rounds do not name its row."""
        return self.stream.is_parked

    @property
    def may_start(self) -> bool:
        """Whether a round may start it now."""
        return self.stream.may_start

    @property
    def incomplete(self) -> Snapshot:
        """The block that is not done, as last reported."""
        if self._unread is not None:
            rows, place = self._unread
            self._incomplete, self._unread = read_snapshot(rows, place, self.block_size), None
        return self._incomplete

    @property
    def dllm_incomplete_ids(self) -> bytes:
        """Its packed ids."""
        return self.incomplete.ids

    @property
    def dllm_algo_state(self) -> bytes:
        """The algorithm's state for it; never looked into."""
        return self.incomplete.algo_state

    @property
    def num_positions(self) -> int:
        """Positions whose KV the request holds while it runs: prefix and block."""
        return (self.block_index + 1) * self.block_size

    def start_row(self, attempt: int) -> pb.StartRow:
        """Begin, or go on elsewhere, from the committed tokens and the incomplete block. `attempt` must rise."""
        self.attempt = attempt
        prefix = (self.spec.prompt_ids + self.committed_ids)[: self.block_index * self.block_size]
        sampling, block = self.spec.sampling, self.incomplete
        return pb.StartRow(
            request_id=self.stream.name,
            sample_index=self.sample_index,
            attempt=self.attempt,
            prompt_length=len(self.spec.prompt_ids),
            prefix_ids=pack_ids(prefix),
            block_index=self.block_index,
            block_ids=self.dllm_incomplete_ids,
            block_mask=block.mask,
            step_count=block.step_count,
            algorithm=self.spec.algorithm,
            algorithm_params=self.spec.algorithm_params,
            algo_state=self.dllm_algo_state,
            sampling=pb.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=self.seed,
            ),
            stop_token_ids=self.worker_stop_ids,
            tokens_left=self.spec.max_new_tokens - len(self.committed_ids),
            want_first_unmask_steps=self.spec.first_unmask_steps,
            want_logprobs=self.spec.logprobs,
            first_unmask_steps=block.first_unmask_steps,
            logprobs=block.logprobs,
        )

    def keep_snapshot(self, rows: pb.RowReplies, place: int) -> None:
        """The incomplete block as a reply shows it at `place`; one of another block is dropped."""
        if rows.block_indexes[place] == self.block_index:
            self._unread = (rows, place)

    def commit_block(self, block: DoneBlock) -> bool:
        """A done block: publish what it brings and begin the next. False: an older block, dropped."""
        if block.block_index != self.block_index:
            return False
        num_prompt = max(0, len(self.spec.prompt_ids) - block.block_index * self.block_size)
        new_ids = block.ids[num_prompt:]
        self.committed_ids += new_ids
        self.first_unmask_steps += block.first_unmask_steps[num_prompt:]
        self.logprobs += block.logprobs[num_prompt:]
        self.block_index += 1
        self._set_fresh_block([])
        published = self.committer.push(new_ids)
        if published.text or published.token_ids:
            self.stream.put(api.GenerateResponse(committed=self._committed(published)))
        if self.committer.finish is not None:
            self.finish(_finished(self.committer.finish))
        return True

    def _committed(self, published: Published) -> api.Committed:
        """The message of a publication, counted as told. Published ids are the next ones of `committed_ids`."""
        first, self.published_tokens = self.published_tokens, self.published_tokens + len(published.token_ids)
        records = slice(first, self.published_tokens)
        told_ids, self.num_told_ids = self.num_told_ids, len(self.committed_ids)
        return api.Committed(
            text=published.text,
            token_ids=published.token_ids,
            forwards=self.forwards,
            committed_ids=self.committed_ids[told_ids:],
            logprobs=self.logprobs[records] if self.spec.logprobs else (),
            first_unmask_steps=self.first_unmask_steps[records] if self.spec.first_unmask_steps else (),
            sample_index=self.sample_index,
        )

    def _usage(self) -> api.Usage:
        return api.Usage(
            prompt_tokens=len(self.spec.prompt_ids),
            completion_tokens=self.published_tokens,
            cached_tokens=min(self.cached_tokens, len(self.spec.prompt_ids)),  # a restart finds output too
            forwards=self.forwards,
            rounds=self.rounds,
        )

    def interrupted(self) -> api.Interrupted:
        """The message before an error that this sample does not end with for good."""
        return api.Interrupted(usage=self._usage(), sample_index=self.sample_index)

    def finish(self, finished: api.Finished) -> None:
        """The sample's one terminal event; a second one is ignored."""
        if not self.is_finished:
            self.is_finished = True
            finished.MergeFrom(api.Finished(usage=self._usage(), sample_index=self.sample_index))
            self.stream.put(api.GenerateResponse(finished=finished))


def _finished(finish: Finish) -> api.Finished:
    if finish.reason == "length":
        return api.Finished(reason=api.FINISH_REASON_LENGTH)
    return api.Finished(
        reason=api.FINISH_REASON_STOP, stop_token_id=finish.stop_token_id, stop_string=finish.stop_string
    )

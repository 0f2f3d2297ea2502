"""One sample of a request and its life: all that is needed to go on with it on any worker, in mid-block.

queued  --start-->  running (on one worker)  --last block or abort-->  finished
   ^------- worker lost, preempted ------------|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidField
from common.packing import pack_bits, pack_ids, unpack_bits, unpack_ids
from fdfo.scheduler.v1 import resume_pb2
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.commit import Finish, OutputCommitter, Published
from scheduler_svc.replies import DoneBlock, Snapshot, read_snapshot
from scheduler_svc.resume import Past, encode
from scheduler_svc.stream import Stream
from scheduler_svc.validation import GenerateSpec

RowName = tuple[str, int]  # Stream.name and sample index
DEATHS_BEFORE_SUSPICION = 2  # of workers, under a request that had not advanced there


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
    num_deaths: int = 0  # of workers, since it last committed a block
    has_advanced_there: bool = False  # since its last start, as far as we heard
    prefix_keys: tuple[int, ...] | None = None  # see placement.py
    committed_ids: list[int] = field(default_factory=list)  # all generated tokens of done blocks, up to the finish
    first_unmask_steps: list[int] = field(default_factory=list)  # of those not published yet, on request
    logprobs: list[float] = field(default_factory=list)  # likewise
    block_index: int = field(init=False)
    forwards: int = 0
    rounds: int = 0
    published_tokens: int = 0
    published_characters: int = 0
    published_before: int = 0  # tokens, by another call
    num_told_ids: int = 0  # committed ids that a message carried
    cached_tokens: int | None = None  # of the prompt, as its first start found it
    is_finished: bool = False
    shown: api.Provisional | None = None  # the last one, without its forwards
    shown_at: int = 0  # forwards when that was looked at
    block_began_at: float | None = None  # this and the next: see metrics.py
    block_began_forwards: int = 0
    _incomplete: Snapshot = field(init=False)
    _unread: tuple[pb.RowReplies, int] | None = None  # a newer one, in the reply that brought it

    def __post_init__(self) -> None:
        self._begin_block()

    def _begin_block(self) -> None:
        """The block after the committed tokens; the first one may begin with the end of the prompt."""
        known_ids = self.spec.prompt_ids + self.committed_ids
        self.block_index = len(known_ids) // self.block_size
        self._set_fresh_block(known_ids[self.block_index * self.block_size :])

    def resume(self, past: Past) -> None:
        """Go on where another call stood: all is rebuilt by committing its ids again, and nothing published. Raises
        InvalidField where ids and value do not belong together."""
        characters, tokens = 0, 0
        for first in range(0, len(past.committed_ids), self.block_size):
            published = self.committer.push(past.committed_ids[first : first + self.block_size])
            characters += len(published.text)
            tokens += len(published.token_ids)
        sample, ids_field = past.sample, f"{past.field}.committed_ids"
        if self.committer.num_ids < len(past.committed_ids):
            raise InvalidField(ids_field, f"goes on after its end, which is at {self.committer.num_ids} ids")
        end = len(self.spec.prompt_ids) + len(past.committed_ids)
        if past.committed_ids and end % self.block_size and self.committer.finish is None:
            raise InvalidField(ids_field, f"must end with a block of {self.block_size}, not {end % self.block_size} on")
        if (characters, tokens) != (sample.published_characters, sample.usage.completion_tokens):
            raise InvalidField(
                f"{past.field}.value",
                f"says that {sample.published_characters} characters and {sample.usage.completion_tokens} tokens were "
                f"published; the committed ids give {characters} and {tokens}",
            )
        self.committed_ids = list(past.committed_ids)
        self.num_told_ids = len(self.committed_ids)
        self.logprobs, self.first_unmask_steps = list(sample.logprobs), list(sample.first_unmask_steps)
        self.forwards, self.rounds = sample.usage.forwards, sample.usage.rounds
        self.cached_tokens = sample.usage.cached_tokens if past.committed_ids else None
        self.published_characters = characters
        self.published_tokens = self.published_before = tokens
        self._begin_block()

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
    def is_suspect(self) -> bool:
        """Whether it may be what ended its workers; it then runs alone until it commits a block."""
        return self.num_deaths >= DEATHS_BEFORE_SUSPICION

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
        self.attempt, self.has_advanced_there = attempt, False
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

    def keep_snapshot(self, rows: pb.RowReplies, place: int, forwards: int) -> None:
        """The incomplete block as a reply shows it at `place`, after so many forwards in its round; one of another
        block is dropped."""
        if rows.block_indexes[place] == self.block_index:
            self._unread = (rows, place)
            self.has_advanced_there |= forwards > 0
            self._show()

    def _show(self) -> None:
        """To a client that asked, the incomplete block every so many forwards, where it changed."""
        every = self.spec.provisional_every_forwards
        if not every or self.forwards // every == self.shown_at // every:
            return
        self.shown_at = self.forwards
        shown = self._provisional()
        if shown != self.shown:
            self.shown = shown
            event = api.GenerateResponse(provisional=shown)
            event.provisional.forwards = self.forwards
            self.stream.show(event)

    def _provisional(self) -> api.Provisional:
        """The generated positions of the incomplete block, as its client may see them."""
        block = self.incomplete
        first = max(0, len(self.spec.prompt_ids) - self.block_index * self.block_size)
        masked = unpack_bits(block.mask, self.block_size)[first:]
        ids = [
            self.mask_token_id if is_masked else token_id
            for token_id, is_masked in zip(unpack_ids(block.ids)[first:], masked, strict=True)
        ]
        num_shown, pieces = self.committer.preview(ids, masked)
        return api.Provisional(
            sample_index=self.sample_index,
            block_index=self.block_index,
            token_ids=ids[:num_shown],
            masked=masked[:num_shown],
            pieces=[api.ProvisionalPiece(text=piece.text, num_masks=piece.num_masks) for piece in pieces],
        )

    def commit_block(self, block: DoneBlock) -> bool:
        """A done block: publish what it brings and begin the next. False: an older block, dropped."""
        if block.block_index != self.block_index:
            return False
        num_prompt = max(0, len(self.spec.prompt_ids) - block.block_index * self.block_size)
        published = self.committer.push(block.ids[num_prompt:])
        new = slice(num_prompt, num_prompt + self.committer.num_ids - len(self.committed_ids))
        self.committed_ids += block.ids[new]
        self.first_unmask_steps += block.first_unmask_steps[new]
        self.logprobs += block.logprobs[new]
        self.block_index += 1
        self.num_deaths, self.has_advanced_there = 0, True
        self._set_fresh_block([])
        if published.text or published.token_ids:
            self.stream.put(api.GenerateResponse(committed=self._committed(published)))
        self.finish_if_over()
        return True

    def _committed(self, published: Published) -> api.Committed:
        """The message of a publication. Published ids are the next ones of `committed_ids`."""
        count = len(published.token_ids)
        self.published_tokens += count
        self.published_characters += len(published.text)
        logprobs, self.logprobs = self.logprobs[:count], self.logprobs[count:]
        steps, self.first_unmask_steps = self.first_unmask_steps[:count], self.first_unmask_steps[count:]
        return api.Committed(
            text=published.text,
            token_ids=published.token_ids,
            forwards=self.forwards,
            logprobs=logprobs if self.spec.logprobs else (),
            first_unmask_steps=steps if self.spec.first_unmask_steps else (),
            sample_index=self.sample_index,
            **self._for_resume(),
        )

    def resume_value(self) -> bytes:
        """What a client needs beside the committed ids to go on with this sample elsewhere."""
        sample = resume_pb2.ResumedSample(
            sample_index=self.sample_index,
            published_characters=self.published_characters,
            usage=self._usage(),
            logprobs=self.logprobs if self.spec.logprobs else (),
            first_unmask_steps=self.first_unmask_steps if self.spec.first_unmask_steps else (),
        )
        return encode(self.stream.request_part + resume_pb2.ResumeState(sample=sample).SerializeToString())

    def _for_resume(self) -> dict[str, Any]:
        """The fields of every message of this sample: the ids that no message carried yet, and the value."""
        told, self.num_told_ids = self.num_told_ids, len(self.committed_ids)
        return {"committed_ids": self.committed_ids[told:], "resume": self.resume_value()}

    def _usage(self) -> api.Usage:
        return api.Usage(
            prompt_tokens=len(self.spec.prompt_ids),
            completion_tokens=self.published_tokens,
            cached_tokens=self.cached_tokens or 0,
            forwards=self.forwards,
            rounds=self.rounds,
        )

    def interrupted(self) -> api.Interrupted:
        """The message before an error that this sample does not end with for good."""
        return api.Interrupted(usage=self._usage(), sample_index=self.sample_index, **self._for_resume())

    def finish_if_over(self) -> None:
        """Finish by a finish rule that matched in the committed tokens."""
        if self.committer.finish is not None:
            self.finish(_finished(self.committer.finish))

    def finish(self, finished: api.Finished) -> None:
        """The sample's one terminal event; a second one is ignored."""
        if not self.is_finished:
            self.is_finished = True
            finished.MergeFrom(api.Finished(usage=self._usage(), sample_index=self.sample_index, **self._for_resume()))
            self.stream.put(api.GenerateResponse(finished=finished))


def _finished(finish: Finish) -> api.Finished:
    if finish.reason == "length":
        return api.Finished(reason=api.FINISH_REASON_LENGTH)
    return api.Finished(
        reason=api.FINISH_REASON_STOP, stop_token_id=finish.stop_token_id, stop_string=finish.stop_string
    )

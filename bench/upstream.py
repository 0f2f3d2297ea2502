"""The shape of the rounds that other systems run, in our loop: to be measured against, not to be served.

One forward a round. While any prompt is incomplete, forwards are for prompts only, one block of each; nobody denoises.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker_svc.batch import Batch, Chunk, build_batch
from worker_svc.denoise import DenoiseLoop
from worker_svc.forward_plan import ForwardPlanner
from worker_svc.rounds import Session
from worker_svc.rows import Phase


class UpstreamPlanner(ForwardPlanner):
    """Forwards either prefill or denoise."""

    _prefills = False

    def _plan_prefill(self, sessions: Sequence[Session]) -> list[Chunk]:
        chunks = []
        for session in sessions:
            round_ = session.active
            assert round_ is not None
            for entry in round_.rows:
                row = entry.row
                if row is not None and row.phase is Phase.PREFILL:
                    chunks.append(Chunk(row, row.prefilled_blocks, 1))
                    row.prefilled_blocks += 1
                    if row.prefilled_blocks == len(row.prefix):
                        row.phase = Phase.DENOISE  # from the next forward on
                        entry.joined_after = round_.work.forwards + 1
        self._is_stale |= self._prefills or bool(chunks)
        self._prefills = bool(chunks)
        return chunks

    def _build_batch(self, sessions: Sequence[Session]) -> Batch:
        if not self._prefills:
            return super()._build_batch(sessions)
        self._active, self._tally = [], [(session, 0, 0) for session in sessions]
        return build_batch([], self.columns)


class UpstreamLoop(DenoiseLoop):
    """A DenoiseLoop with such forwards."""

    planner_type = UpstreamPlanner

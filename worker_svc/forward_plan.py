"""What the next forward computes: prompt chunks within a budget, fused commits, and the rows that denoise.

Everything here is planned from the active rounds at a boundary; only what changed since the last forward is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.algorithms import ALGORITHMS
from worker_svc.batch import Batch, Chunk, build_batch, forward_input, next_chunks
from worker_svc.host_copies import upload
from worker_svc.kv.pages import PagePool
from worker_svc.kv.slots import SlotTable
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ForwardInput
from worker_svc.records import keep_committed
from worker_svc.rounds import Session
from worker_svc.rows import Phase, Row, SlotColumns, Start
from worker_svc.step import StepRows, step_rows


@dataclass(frozen=True)
class Plan:
    """A forward: the rows of its step, and the units beside them."""

    batch: Batch
    chunks: list[Chunk]
    commits: list[Row]  # whose blocks before their own become final
    tally: Sequence[tuple[Session, int, int]]  # denoising and waiting rows of the batch by session
    inputs: ForwardInput


class ForwardPlanner:
    """Plans forwards over the rows of the active rounds."""

    def __init__(self, config: LoopConfig, pool: PagePool, slots: SlotTable, columns: SlotColumns) -> None:
        self.config = config
        self.pool = pool
        self.slots = slots
        self.columns = columns
        self._batch: Batch | None = None
        self._is_stale = True
        self._active: list[bool] = []  # of the batch's rows
        self._step_rows: StepRows | None = None
        self._steps_are_stale = True
        self.complete_rows: list[Row] = []  # whose block has no mask left and no commit planned
        self._tally: list[tuple[Session, int, int]] = []

    def changed(self) -> None:
        """A row joined, left, or began a block: the batch is to be built anew."""
        self._is_stale = True

    def complete(self, row: Row) -> None:
        """The row's last mask was filled, and the block does not end its request."""
        self.complete_rows.append(row)

    def started(self, row: Row, start: Start) -> None:
        """A block that starts without a masked position has its commit next, unless it ends its request."""
        if start.is_complete:
            slots = upload([row.slot], self.columns.device)
            ids, masked = self.columns.ids[slots], self.columns.masked[slots]
            ends, _ = self.columns.ends_request(slots, ids, masked, self.columns.editable(slots), edits=False)
            if not ends:
                self.complete(row)

    def plan(self, sessions: Sequence[Session]) -> Plan:
        """The next forward; the rows it takes on are marked so."""
        chunks, commits = self._plan_prefill(sessions), self._plan_commits()
        if self._batch is None or self._is_stale:
            self._batch = self._build_batch(sessions)
            self._is_stale, self._steps_are_stale = False, True
        inputs = forward_input(self._batch, chunks, self.columns, commits)
        return Plan(self._batch, chunks, commits, self._tally, inputs)

    def step_rows(self) -> StepRows:
        """What the step of the planned forward needs; asked for once it is launched."""
        assert self._batch is not None
        if self._step_rows is None or self._steps_are_stale:
            batch, last = self._batch, self._step_rows
            self._step_rows = step_rows(batch.rows, batch.slots, self._active, self.columns, last)
            self._steps_are_stale = False
        return self._step_rows

    def _plan_prefill(self, sessions: Sequence[Session]) -> list[Chunk]:
        """Chunks in the order of the sessions and their rows, within the budget of one forward."""
        entries = (entry for session in sessions if session.active is not None for entry in session.active.rows)
        rows = (entry.row for entry in entries if entry.row is not None)
        chunks = next_chunks(rows, self.config.chunked_prefill_size // self.config.block_size)
        for row, _, _ in chunks:
            if row.phase is Phase.DENOISE:
                assert row.entry is not None and row.session.active is not None
                row.entry.joined_after = row.session.active.work.forwards
                self._is_stale = True
        return chunks

    def _plan_commits(self) -> list[Row]:
        """Rows that begin their next block in the next forward, which also makes the KV of their complete one final."""
        commits: list[Row] = []
        size, waiting = self.config.block_size, self.complete_rows if self.config.fused_commit else []
        self.complete_rows = []
        for row in waiting:
            session, entry = row.session, row.entry
            if session.rows.get(row.name.key) is not row or row.phase is Phase.DONE:
                continue
            if entry is None or row.phase is Phase.PREFILL:  # parked, or its prefix is not complete
                self.complete_rows.append(row)
                continue
            round_ = session.active
            assert round_ is not None
            calls_before = self.pool.num_calls
            may_fuse = round_.request.mode == pb.MODE_FDFO and not ALGORITHMS[row.algorithm].edits
            if may_fuse and self.slots.grow(row.slot, (row.block_index + 2) * size):
                row.block_index += 1
                commits.append(row)
            round_.work.allocator_calls += self.pool.num_calls - calls_before
        keep_committed(commits, self.columns)
        for algorithm in {row.algorithm for row in commits}:
            slots = upload([row.slot for row in commits if row.algorithm == algorithm], self.columns.device)
            self.columns.begin_committing(algorithm, slots, self.config.mask_token_id)
        self._is_stale |= bool(commits)
        return commits

    def _build_batch(self, sessions: Sequence[Session]) -> Batch:
        """All denoising rows of the active rounds, and in SYNC rounds the done ones, which keep their place."""
        rows: list[Row] = []
        active = self._active = []
        self._tally = []
        for session in sessions:
            assert session.active is not None
            first, is_sync = len(rows), session.active.request.mode == pb.MODE_SYNC
            for entry in session.active.rows:
                if entry.row is not None and entry.status == pb.ROW_STATUS_RUNNING:
                    denoises = entry.row.phase is Phase.DENOISE
                    if denoises or (entry.row.phase is Phase.DONE and is_sync):
                        rows.append(entry.row)
                        active.append(denoises)
            num_active = sum(active[first:])
            self._tally.append((session, num_active, len(rows) - first - num_active))
        return build_batch(rows, self.columns, self._batch)

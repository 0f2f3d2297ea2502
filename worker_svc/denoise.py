"""The one loop: forward and step over all live rows of all active rounds of all schedulers.

    tick():   reply where the rule of the mode says so  ->  begin the rounds whose turn it is  ->  one forward, one step

FDFO and SYNC differ only in when a round replies (`_is_over`) and in whether a done row keeps its place in the
forward. A row goes on in place: its ids, mask bits, slot and pages stay where they are from step to step and from
round to round. All of this runs on one thread; executor.py makes it the device thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from common.errors import Refused, ServiceError
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.forward_plan import ForwardPlanner, Plan
from worker_svc.host_copies import upload
from worker_svc.kv.pages import PagePool, PageUsage
from worker_svc.kv.slots import SlotTable
from worker_svc.kv.store import KVStore
from worker_svc.leases import Leases
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.replies import RowCopies, copy_rows
from worker_svc.rounds import Deliver, Round, RoundRequest, RoundRow, Session
from worker_svc.rows import Phase, Row, RowName, SlotColumns, Start
from worker_svc.starts import BadStart, StartRules
from worker_svc.step import RowFlags, flagged_rows, step

ROW_ERRORS = frozenset((pb.ROW_STATUS_NO_KV_SPACE, pb.ROW_STATUS_SLOT_MISSING, pb.ROW_STATUS_BAD_STATE))
REFUSAL_MEMORY_S = 1.0  # after a start found no space, schedulers share evenly for so long


@dataclass(frozen=True)
class LoopState:
    """What others may read at any time, as of the last boundary."""

    pages: PageUsage
    slots_used: int
    counters: pb.WorkerCounters
    draining: bool


class DenoiseLoop:
    """Slots, pages, sessions and the loop over them. `clock` gives seconds and never goes back."""

    planner_type = ForwardPlanner

    def __init__(self, runner: ModelRunner, config: LoopConfig, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.config = config
        self.epoch = secrets.token_hex(8)
        self.draining = False
        self.totals = pb.WorkerCounters()
        self.leases = Leases(config.lease_s, clock, self.totals, self._free_all)
        self.sessions = self.leases.sessions
        self.kv = KVStore.allocate(
            num_layers=runner.num_layers,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_kv_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            num_slots=config.num_slots,
            max_pages_per_slot=config.max_pages_per_slot,
            dtype=runner.dtype,
            device=runner.device,
        )
        self.pool = PagePool(config.num_pages)
        self.slots = SlotTable(self.kv, self.pool, config.enable_prefix_caching)
        self.columns = SlotColumns(
            config.num_slots, config.block_size, runner.device, config.early_end, config.logit_shift
        )
        self.start_rules = StartRules(config.block_size, runner.vocab_size, config.max_blocks, config.logit_shift)
        self.clock = clock
        self._planner = self.planner_type(config, self.pool, self.slots, self.columns)
        self._last_refusal_at = float("-inf")
        self._forward_ended_at = 0.0
        self._unsent: list[tuple[Session, RowCopies, PageUsage]] = []
        self.state = self._state()

    # What schedulers ask ----------------------------------------------------------------------------------------

    def submit(self, request: RoundRequest, deliver: Deliver) -> None:
        """Take a round; `deliver` is called once, with its reply or with the error that refuses it."""
        request.arrived_at = request.arrived_at or self.clock()
        if request.worker_epoch != self.epoch:
            return deliver(Refused("EPOCH_CHANGED", f"worker_epoch: this worker is {self.epoch}; ask GetWorkerInfo"))
        if request.fingerprint != self.config.fingerprint:
            return deliver(Refused("OTHER_MODEL", f"fingerprint: this worker serves {self.config.fingerprint}"))
        try:
            session = self.leases.touch(request.scheduler_id, request.generation)
        except ServiceError as refusal:
            return deliver(refusal)
        session.offer(request, deliver, self._draining_error() if self.draining else None)

    def withdraw(self, request: RoundRequest, deliver: Deliver) -> None:
        """The call behind `deliver` was cancelled."""
        session = self.sessions.get(request.scheduler_id)
        if session is not None and session.generation == request.generation:
            session.withdraw(request.round_id, deliver)

    def release(self, session: Session, names: Iterable[RowName]) -> None:
        """Free rows at this boundary; unknown ones are ignored."""
        for name in names:
            row = session.rows.get(name.key)
            if row is not None and row.name.attempt == name.attempt:
                self._free(row, pb.ROW_STATUS_RELEASED)

    def drain(self) -> None:
        """Running rounds reply at the next boundary, waiting and new ones are refused."""
        self.draining = True
        for session in self.sessions.values():
            session.refuse_waiting(self._draining_error())

    def _state(self) -> LoopState:
        counters = pb.WorkerCounters()
        counters.CopyFrom(self.totals)
        counters.allocator_calls = self.pool.num_calls
        return LoopState(
            pages=self.pool.usage(),
            slots_used=self.slots.num_slots - self.slots.num_free,
            counters=counters,
            draining=self.draining,
        )

    def allowance(self, session: Session) -> pb.Allowance:
        """All that is free, cached or held by schedulers that may be gone, while nobody was refused in the last second;
        else an even share of the whole."""
        silent = self.leases.silent()
        if self.clock() - self._last_refusal_at < REFUSAL_MEMORY_S:
            num_live = len(self.sessions) - len(silent)
            return pb.Allowance(rows=self.slots.num_slots // num_live, pages=self.pool.total // num_live)
        rows = [row for each in (session, *silent) for row in each.rows.values()]
        return pb.Allowance(
            rows=len(rows) + self.slots.num_free,
            pages=sum(self.slots.num_pages(row.slot) for row in rows) + self.pool.num_available,
        )

    def _take_from_silent(self) -> bool:
        """Rows of schedulers that may be gone make way, before their lease ends; False if there are none. Such a
        scheduler starts them again, if it is there."""
        rows = [row for session in self.leases.silent() for row in session.rows.values()]
        for row in rows:
            self._free(row, pb.ROW_STATUS_RELEASED)
        return bool(rows)

    # The loop ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def tick(self) -> bool:
        """One boundary and, if a row is live, one forward. False: nothing to do until someone asks something."""
        self.leases.expire()
        going_on = [session for session in self.sessions.values() if self._goes_on(session)]
        for session in list(self.sessions.values()):
            if session not in going_on:
                self._boundary(session)
        running = [session for session in self.sessions.values() if session.active is not None]
        if not running or not self.runner.is_asynchronous:
            self._publish()
        plan = self._planner.plan(running) if running else None
        self.slots.write_pages()
        if plan is None:
            return False
        launched_at = self.clock()
        self.columns.bypass.mark()
        logits = self.runner.forward(plan.inputs, self.kv)
        for session in going_on:
            self._change_rounds(session, plan.commits)
        self._publish()
        rows = plan.batch.rows
        flags = step(self._planner.step_rows(), logits, self.columns, self.config.mask_token_id) if rows else None
        device_ms = self.runner.finish()
        self._forward_ended_at = self.clock()
        self._account(plan, launched_at, device_ms)
        for place, row_flags in flagged_rows(flags) if flags is not None else ():
            self._settle(rows[place], row_flags)
        self._note_final(plan)
        return True

    def _boundary(self, session: Session) -> None:
        """Reply if the active round is over, then begin the next one; rounds without a live row pass at once."""
        while True:
            if session.active is not None:
                if not self._is_over(session, session.active):
                    return
                self.columns.bypass.mark()
                self._reply(session, session.active)
            if session.begin_next() is None:
                return
            self._begin(session)

    def _goes_on(self, session: Session) -> bool:
        """Whether the active round is over and the next one only goes on with its rows, which all denoise: on an
        asynchronous device the one can give way to the other while the next forward computes."""
        this, following = session.active, session.following
        if this is None or following is None or session.changes_wait or self.draining or this.cancelled:
            return False
        if not self.runner.is_asynchronous or pb.MODE_SYNC in (this.request.mode, following.request.mode):
            return False
        live = [entry.row for entry in this.rows if entry.row is not None and not entry.ends]
        if not live or any(row.phase is not Phase.DENOISE for row in live) or not self._is_over(session, this):
            return False
        if any(row.entry is not None and row.entry.committed_block is not None for row in self._planner.complete_rows):
            return False  # the next commit would take the place of one that is not told yet
        return {row.name for row in live} <= set(following.request.continues)

    def _change_rounds(self, session: Session, commits: Sequence[Row]) -> None:
        """The active round replies and the next one begins while the device computes the forward of both. Of blocks
        that this forward commits the reply says nothing."""
        assert session.active is not None
        self._reply(session, session.active, commits)
        session.begin_next()
        self._begin(session)

    def _is_over(self, session: Session, round_: Round) -> bool:
        """Whether the active round replies at this boundary."""
        if all(entry.row is None or entry.row.phase is Phase.DONE for entry in round_.rows):
            return True
        if self.draining or round_.cancelled:
            return True
        if round_.request.mode == pb.MODE_SYNC:
            return False
        if session.changes_wait:
            return True
        if round_.first_forward_at is None:
            return False
        if 0 < round_.request.max_forwards <= round_.work.forwards:
            return True
        elapsed_ms = (self.clock() - round_.first_forward_at) * 1000
        return round_.eventful or elapsed_ms >= round_.request.max_round_ms

    def _begin(self, session: Session) -> None:
        """Releases, then starts, then continues of the round that became active."""
        round_ = session.active
        assert round_ is not None
        round_.begun_at = self.clock()
        round_.work.queued_ms = (round_.begun_at - round_.request.arrived_at) * 1000
        calls_before = self.pool.num_calls
        self.release(session, round_.request.releases)
        round_.rows = [self._start(session, start) for start in round_.request.starts]
        self._write_starts(round_)
        self._continue_rows(session, round_)
        round_.eventful = any(entry.status in ROW_ERRORS or entry.ends for entry in round_.rows)
        round_.work.allocator_calls += self.pool.num_calls - calls_before
        self._planner.changed()

    def _start(self, session: Session, start: Start | BadStart) -> RoundRow:
        """Take slot and pages for prefix and block at once, or nothing. An older attempt is freed first."""
        if isinstance(start, BadStart):
            return RoundRow(None, pb.ROW_STATUS_BAD_STATE, str(start))
        older = session.rows.get(start.name.key)
        if older is not None:
            if start.name.attempt <= older.name.attempt:
                return RoundRow(None, pb.ROW_STATUS_BAD_STATE, f"attempt: must be above {older.name.attempt}")
            self._free(older, pb.ROW_STATUS_RELEASED)
        num_positions = start.num_blocks * self.config.block_size
        slot = self.slots.open(num_positions, start.prefix)
        if slot is None and self._take_from_silent():
            slot = self.slots.open(num_positions, start.prefix)
        if slot is None:
            self._last_refusal_at = self.clock()
            return RoundRow(None, pb.ROW_STATUS_NO_KV_SPACE)
        session.ended.pop(start.name.key, None)
        cached_tokens = self.slots.num_final(slot)
        cached_blocks = cached_tokens // self.config.block_size
        row = session.rows[start.name.key] = Row.resident(start, session, slot, cached_blocks)
        row.entry = RoundRow(row, cached_tokens=cached_tokens)
        return row.entry

    def _write_starts(self, round_: Round) -> None:
        """The blocks of the rows that started go to their slots."""
        started = [
            (entry.row, start)
            for entry, start in zip(round_.rows, round_.request.starts, strict=True)
            if entry.row is not None and not isinstance(start, BadStart)
        ]
        if started:
            self.columns.write([row.slot for row, _ in started], [start for _, start in started])
            for row, start in started:
                self._planner.started(row, start)

    def _continue_rows(self, session: Session, round_: Round) -> None:
        """Go on in place. A done row rolls over to its next block, unless that finds no page: then it stays done."""
        rolling: dict[str, list[Row]] = {}  # by algorithm
        for name in round_.request.continues:
            row = session.rows.get(name.key)
            if row is None or row.name.attempt != name.attempt:
                round_.rows.append(self._missing(session, name))
                continue
            row.entry = entry = RoundRow(row)
            round_.rows.append(entry)
            if row.is_withheld:
                row.is_withheld, entry.forwards = False, 0
                self._end(entry, row)
            elif row.phase is Phase.DONE:
                num_positions = (row.block_index + 2) * self.config.block_size
                has_page = self.slots.grow(row.slot, num_positions)
                if has_page or (self._take_from_silent() and self.slots.grow(row.slot, num_positions)):
                    row.block_index += 1
                    row.phase = Phase.DENOISE
                    rolling.setdefault(row.algorithm, []).append(row)
                else:
                    self._last_refusal_at = self.clock()
                    entry.status, entry.forwards = pb.ROW_STATUS_NO_KV_SPACE, 0
        for algorithm, rows in rolling.items():
            self._roll_over(algorithm, rows)

    @staticmethod
    def _missing(session: Session, name: RowName) -> RoundRow:
        """A row that is not here: it ended before, or nobody knows it."""
        ended = session.ended.get(name.key)
        if ended is not None and ended.attempt == name.attempt:
            return RoundRow(None, pb.ROW_STATUS_ENDED, end_reason=ended.reason, end_position=ended.position)
        return RoundRow(None, pb.ROW_STATUS_SLOT_MISSING, "this worker does not hold the row")

    def _roll_over(self, algorithm: str, rows: list[Row]) -> None:
        """The next blocks of done rows begin; of the blocks that they leave nothing will be written again."""
        slots = upload([row.slot for row in rows], self.columns.device)
        self._keep_blocks(rows, self.columns.ids)
        self.columns.next_blocks(algorithm, slots, self.config.mask_token_id)

    def _keep_blocks(self, rows: list[Row], ids: torch.Tensor) -> None:
        """The KV of the blocks before the rows' own is final; their ids stand in `ids`, int64 [slots, B]."""
        if rows and self.config.enable_prefix_caching:
            slots = upload([row.slot for row in rows], self.columns.device)
            for row, own in zip(rows, ids[slots].cpu().numpy(), strict=True):
                self.slots.finish(row.slot, row.block_index * self.config.block_size, own.tobytes())

    def _account(self, plan: Plan, launched_at: float, device_ms: float) -> None:
        """Count the forward that just ended, before its rows are settled."""
        self.totals.forwards += 1
        self.totals.device_ms += device_ms
        for session, num_active, num_waiting in plan.tally:
            round_ = session.active
            assert round_ is not None
            round_.count_forward(launched_at, self._forward_ended_at, device_ms)
            for work in (self.totals, round_.work):
                work.denoise_row_forwards += num_active
                work.waiting_row_forwards += num_waiting
        for row in plan.commits:
            assert row.entry is not None and row.session.active is not None
            row.entry.committed_block = row.block_index - 1
            row.session.active.eventful = True
            self.totals.blocks_done += 1
        for chunk in plan.chunks:
            assert chunk.row.session.active is not None
            for work in (self.totals, chunk.row.session.active.work):
                work.prefill_tokens += chunk.num_blocks * self.config.block_size

    def _note_final(self, plan: Plan) -> None:
        """The KV that this forward made final, of prefixes and by fused commits; of rows in error nothing is kept."""
        for row, first_block, num_blocks in plan.chunks:
            self.slots.finish(row.slot, (first_block + num_blocks) * self.config.block_size)
        self._keep_blocks(plan.commits, self.columns.committed_ids)

    def _settle(self, row: Row, flags: RowFlags) -> None:
        """The row's block is complete; or the row left the denoising, done or in error, and its round has to say so."""
        round_, entry = row.session.active, row.entry
        assert round_ is not None and entry is not None
        if flags.filled and not flags.over_bound:
            self._planner.complete(row)
            return None
        if flags.done and row.is_lead_in:
            return self._end_lead_in(row)
        round_.eventful = True
        self._planner.changed()
        entry.forwards = round_.work.forwards - entry.joined_after
        if flags.done:
            row.phase = Phase.DONE
            row.is_withheld = entry.committed_block is not None  # a row has one done block in a reply
            row.first_stop = flags.first_stop
            if flags.ends and not row.is_withheld:
                self._end(entry, row)
            self.totals.blocks_done += 1
        elif flags.bad_numerics:
            entry.error = "logits are not finite"
            self._free(row, pb.ROW_STATUS_BAD_NUMERICS)
        else:
            entry.error = "the block is over its bound of forwards"
            self._free(row, pb.ROW_STATUS_BAD_STATE)

    def _end_lead_in(self, row: Row) -> None:
        """The first token of the block that the row started with is known: that one begins, in pages it has already."""
        assert row.entry is not None and row.session.active is not None
        row.is_lead_in = False
        row.block_index += 1
        self._roll_over(row.algorithm, [row])
        row.entry.joined_after = row.session.active.work.forwards
        self._planner.changed()

    def _end(self, entry: RoundRow, row: Row) -> None:
        """The row's done block ends its request: at the first stop token, or with the last allowed token."""
        stop_position = row.block_index * self.config.block_size + row.first_stop
        is_stop = row.first_stop < self.config.block_size and stop_position < row.limit_position
        entry.ends = True
        entry.end_reason = pb.END_REASON_STOP_TOKEN if is_stop else pb.END_REASON_LIMIT
        entry.end_position = stop_position if is_stop else row.limit_position - 1

    # Replies and freeing ----------------------------------------------------------------------------------------

    def _reply(self, session: Session, round_: Round, commits: Sequence[Row] = ()) -> None:
        """Answer the active round. The snapshot is copied here, before the next step may write; of `commits`, whose
        next blocks have begun, there is none."""
        calls_before = self.pool.num_calls
        copies = copy_rows(round_, self.columns, commits)
        for entry in round_.rows:
            row = entry.row
            if row is not None:
                row.entry = None
                if entry.ends:
                    entry.status = pb.ROW_STATUS_ENDED
                    session.remember_end(row.name, entry)
                    self._free(row, pb.ROW_STATUS_ENDED)
        round_.work.allocator_calls += self.pool.num_calls - calls_before
        session.active = None
        self._unsent.append((session, copies, self.pool.usage()))
        self.totals.rounds += 1
        self._planner.changed()

    def _publish(self) -> None:
        """Build and deliver the replies of the rounds that are over; on an asynchronous device, while it computes."""
        self.state = self._state()
        unsent, self._unsent = self._unsent, []
        for session, copies, pages in unsent:
            round_ = copies.round_
            reply = pb.RunRoundResponse(
                worker_epoch=self.epoch,
                round_id=round_.request.round_id,
                pages=page_usage_message(pages),
                allowance=self.allowance(session),
                work=round_.work,
                draining=self.draining,
                rows=copies.build(),
            )
            if round_.first_forward_at is not None:
                reply.work.reply_ms = (self.clock() - self._forward_ended_at) * 1000
            session.finish(round_, reply)

    def _free(self, row: Row, status: pb.RowStatus) -> None:
        """The one place where a row leaves the worker."""
        del row.session.rows[row.name.key]
        ends = status == pb.ROW_STATUS_ENDED or row.is_withheld or (row.entry is not None and row.entry.ends)
        # A block that ends its request may lack its final KV.
        if self.config.enable_prefix_caching and row.phase is Phase.DONE and not ends:
            ids = self.columns.ids[row.slot].cpu().numpy().tobytes()
            self.slots.finish(row.slot, (row.block_index + 1) * self.config.block_size, ids)
        self.slots.close(row.slot, is_sound=status != pb.ROW_STATUS_BAD_NUMERICS)
        if row.entry is not None:
            row.entry.row, row.entry.status = None, status
            row.entry = None
        self._planner.changed()

    def _free_all(self, session: Session) -> None:
        """The scheduler is forgotten."""
        for row in list(session.rows.values()):
            self._free(row, pb.ROW_STATUS_RELEASED)

    @staticmethod
    def _draining_error() -> Refused:
        return Refused("DRAINING", "this worker is shutting down")


def page_usage_message(usage: PageUsage) -> pb.PageUsage:
    return pb.PageUsage(free=usage.free, cached=usage.cached, held=usage.held, total=usage.total)

"""The one loop: forward and step over all live rows of all active rounds of all schedulers.

    tick():   reply where the rule of the mode says so  ->  begin the rounds whose turn it is  ->  one forward, one step

FDFO and SYNC differ only in when a round replies (`_is_over`) and in whether a done row keeps its place in the
forward. A row goes on in place: its ids, mask bits, slot and pages stay where they are from step to step and from
round to round. All of this runs on one thread; executor.py makes it the device thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from common.errors import Refused, ServiceError, Unavailable
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.batch import RowFlags, step
from worker_svc.forward_plan import ForwardPlanner, Plan
from worker_svc.kv.pages import PagePool, PageUsage
from worker_svc.kv.slots import SlotTable
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.replies import RowCopies, copy_rows
from worker_svc.rounds import Deliver, Round, RoundRequest, RoundRow, Session
from worker_svc.rows import Phase, Row, RowName, SlotColumns
from worker_svc.starts import BadStart, StartRules, decode_start

REFUSAL_MEMORY_S = 1.0  # after a start found no space, schedulers share evenly for so long
MAX_SCHEDULERS = 1024  # with a lease at one time
MAX_PAST_SCHEDULERS = 1024  # whose last generation is remembered after their lease


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
        self.sessions: dict[str, Session] = {}
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
        self.columns = SlotColumns(config.num_slots, config.block_size, runner.device, config.early_end)
        self._start_rules = StartRules(config.block_size, runner.vocab_size, config.max_blocks)
        self.clock = clock
        self._planner = self.planner_type(config, self.pool, self.slots, self.columns)
        self._past_generations: dict[str, int] = {}
        self._last_refusal_at = float("-inf")
        self._forward_ended_at = 0.0
        self._unsent: list[tuple[Session, Round, RowCopies, pb.RunRoundResponse]] = []

    # What schedulers ask ----------------------------------------------------------------------------------------

    def submit(self, request: RoundRequest, deliver: Deliver) -> None:
        """Take a round; `deliver` is called once, with its reply or with the error that refuses it."""
        request.arrived_at = request.arrived_at or self.clock()
        if request.worker_epoch != self.epoch:
            return deliver(Refused("EPOCH_CHANGED", f"worker_epoch: this worker is {self.epoch}; ask GetWorkerInfo"))
        if request.fingerprint != self.config.fingerprint:
            return deliver(Refused("OTHER_MODEL", f"fingerprint: this worker serves {self.config.fingerprint}"))
        try:
            session = self.touch(request.scheduler_id, request.generation)
        except ServiceError as refusal:
            return deliver(refusal)
        session.offer(request, deliver, self._draining_error() if self.draining else None)

    def withdraw(self, request: RoundRequest, deliver: Deliver) -> None:
        """The call behind `deliver` was cancelled."""
        session = self.sessions.get(request.scheduler_id)
        if session is not None and session.generation == request.generation:
            session.withdraw(request.round_id, deliver)

    def touch(self, scheduler_id: str, generation: int) -> Session:
        """Renew a scheduler's lease; a higher generation drops its older state. Raises Refused for a lower one, and
        Unavailable for one scheduler too many."""
        session = self.sessions.get(scheduler_id)
        over = session.generation - 1 if session is not None else self._past_generations.get(scheduler_id, -1)
        if generation <= over:
            self.totals.refused_generations += 1
            raise self._stale(generation)
        if session is not None and generation > session.generation:
            self.forget(session, self._stale(session.generation))
            session = None
        if session is None:
            if len(self.sessions) >= MAX_SCHEDULERS:
                raise Unavailable(f"{MAX_SCHEDULERS} schedulers have a lease here; no more are served")
            session = self.sessions[scheduler_id] = Session(scheduler_id, generation)
        session.last_seen = self.clock()
        return session

    def renew(self, scheduler_id: str) -> None:
        """Renew the lease of a scheduler that is known here, whatever its generation."""
        if scheduler_id in self.sessions:
            self.sessions[scheduler_id].last_seen = self.clock()

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

    def state(self) -> LoopState:
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
        """All that is free or cached while nobody was refused in the last second, else an even share of the whole."""
        if self.clock() - self._last_refusal_at < REFUSAL_MEMORY_S:
            num_sessions = len(self.sessions)
            return pb.Allowance(rows=self.slots.num_slots // num_sessions, pages=self.pool.total // num_sessions)
        own_pages = sum(self.slots.num_pages(row.slot) for row in session.rows.values())
        return pb.Allowance(rows=len(session.rows) + self.slots.num_free, pages=own_pages + self.pool.num_available)

    # The loop ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def tick(self) -> bool:
        """One boundary and, if a row is live, one forward. False: nothing to do until someone asks something."""
        self._expire_leases()
        for session in list(self.sessions.values()):
            self._boundary(session)
        rounds = self._active_rounds()
        if not rounds or not self.runner.is_asynchronous:
            self._send_replies()
        if not rounds:
            return False
        plan = self._planner.plan(rounds)
        launched_at = self.clock()
        logits = self.runner.forward(plan.inputs, self.kv)
        self._send_replies()
        rows = plan.batch.rows
        flagged = step(plan.batch, logits, self.columns, self.config.mask_token_id) if rows else []
        device_ms = self.runner.finish()
        self._forward_ended_at = self.clock()
        self._account(plan, launched_at, device_ms)
        for place, flags in flagged:
            self._settle(rows[place], flags)
        self._note_final(plan)
        return True

    def _boundary(self, session: Session) -> None:
        """Reply if the active round is over, then begin the next one; rounds without a live row pass at once."""
        while True:
            if session.active is not None:
                if not self._is_over(session, session.active):
                    return
                self._reply(session, session.active)
            if session.begin_next() is None:
                return
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
        rolling: dict[str, list[Row]] = {}  # by algorithm
        round_.rows += [self._continue(session, name, rolling) for name in round_.request.continues]
        for algorithm, rows in rolling.items():
            self._roll_over(algorithm, rows)
        for entry in round_.rows:
            if entry.row is not None:
                entry.row.entry = entry
        errors = (pb.ROW_STATUS_NO_KV_SPACE, pb.ROW_STATUS_SLOT_MISSING, pb.ROW_STATUS_BAD_STATE)
        round_.eventful = any(entry.status in errors or entry.ends for entry in round_.rows)
        round_.work.allocator_calls += self.pool.num_calls - calls_before
        self._planner.changed()

    def _start(self, session: Session, message: pb.StartRow) -> RoundRow:
        """Take slot and pages for prefix and block at once, or nothing. An older attempt is freed first."""
        try:
            start = decode_start(message, self._start_rules)
        except BadStart as error:
            return RoundRow(None, pb.ROW_STATUS_BAD_STATE, str(error))
        older = session.rows.get(start.name.key)
        if older is not None:
            if start.name.attempt <= older.name.attempt:
                return RoundRow(None, pb.ROW_STATUS_BAD_STATE, f"attempt: must be above {older.name.attempt}")
            self._free(older, pb.ROW_STATUS_RELEASED)
        slot = self.slots.open((start.block_index + 1) * self.config.block_size, start.prefix)
        if slot is None:
            self._last_refusal_at = self.clock()
            return RoundRow(None, pb.ROW_STATUS_NO_KV_SPACE)
        session.ended.pop(start.name.key, None)
        self.columns.write(slot, start)
        cached_tokens = self.slots.num_final(slot)
        cached_blocks = cached_tokens // self.config.block_size
        row = session.rows[start.name.key] = Row.resident(start, session, slot, cached_blocks)
        self._planner.started(row, start)
        return RoundRow(row, cached_tokens=cached_tokens)

    def _continue(self, session: Session, name: RowName, rolling: dict[str, list[Row]]) -> RoundRow:
        """Go on in place. A done row rolls over to its next block, unless that finds no page: then it stays done."""
        ended = session.ended.get(name.key)
        if ended is not None and ended.attempt == name.attempt:
            return RoundRow(None, pb.ROW_STATUS_ENDED, end_reason=ended.reason, end_position=ended.position)
        row = session.rows.get(name.key)
        if row is None or row.name.attempt != name.attempt:
            return RoundRow(None, pb.ROW_STATUS_SLOT_MISSING, "this worker does not hold the row")
        if row.is_withheld:
            row.is_withheld = False
            return RoundRow(row, ends=True, forwards=0)
        if row.phase is Phase.DONE:
            if not self.slots.grow(row.slot, (row.block_index + 2) * self.config.block_size):
                self._last_refusal_at = self.clock()
                return RoundRow(row, pb.ROW_STATUS_NO_KV_SPACE, forwards=0)
            row.block_index += 1
            row.phase = Phase.DENOISE
            rolling.setdefault(row.algorithm, []).append(row)
        return RoundRow(row)

    def _roll_over(self, algorithm: str, rows: list[Row]) -> None:
        """The next blocks of done rows begin; of the blocks that they leave nothing will be written again."""
        slots = torch.tensor([row.slot for row in rows], device=self.columns.device)
        self._keep_blocks(rows, self.columns.ids)
        self.columns.next_blocks(algorithm, slots, self.config.mask_token_id)

    def _keep_blocks(self, rows: list[Row], ids: torch.Tensor) -> None:
        """The KV of the blocks before the rows' own is final; their ids stand in `ids`, int64 [slots, B]."""
        if rows and self.config.enable_prefix_caching:
            slots = torch.tensor([row.slot for row in rows], device=self.columns.device)
            for row, own in zip(rows, ids[slots].cpu().numpy(), strict=True):
                self.slots.finish(row.slot, row.block_index * self.config.block_size, own.tobytes())

    def _active_rounds(self) -> list[Round]:
        return [session.active for session in self.sessions.values() if session.active is not None]

    def _account(self, plan: Plan, launched_at: float, device_ms: float) -> None:
        """Count the forward that just ended, before its rows are settled."""
        self.totals.forwards += 1
        self.totals.device_ms += device_ms
        for round_, num_active, num_waiting in plan.tally:
            if round_.first_forward_at is None:
                round_.first_forward_at = launched_at
                round_.work.begin_ms = (launched_at - round_.begun_at) * 1000
            round_.work.forwards += 1
            round_.work.device_ms += device_ms
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
            return
        round_.eventful = True
        self._planner.changed()
        entry.forwards = round_.work.forwards - entry.joined_after
        if flags.done:
            row.phase = Phase.DONE
            row.is_withheld = entry.committed_block is not None  # a row has one done block in a reply
            entry.ends = flags.ends and not row.is_withheld
            self.totals.blocks_done += 1
        elif flags.bad_numerics:
            entry.error = "logits are not finite"
            self._free(row, pb.ROW_STATUS_BAD_NUMERICS)
        else:
            entry.error = "the block is over its bound of forwards"
            self._free(row, pb.ROW_STATUS_BAD_STATE)

    # Replies and freeing ----------------------------------------------------------------------------------------

    def _reply(self, session: Session, round_: Round) -> None:
        """Answer the active round. The snapshot is copied here, before the next step may write."""
        calls_before = self.pool.num_calls
        copies = copy_rows(round_, self.columns)
        for entry in round_.rows:
            row = entry.row
            if row is not None:
                row.entry = None
                if entry.ends:
                    session.remember_end(row.name, entry)
                    self._free(row, pb.ROW_STATUS_ENDED)
        round_.work.allocator_calls += self.pool.num_calls - calls_before
        session.active = None
        self._unsent.append((session, round_, copies, self._reply_without_rows(session, round_)))
        self._planner.changed()

    def _reply_without_rows(self, session: Session, round_: Round) -> pb.RunRoundResponse:
        self.totals.rounds += 1
        return pb.RunRoundResponse(
            worker_epoch=self.epoch,
            round_id=round_.request.round_id,
            pages=page_usage_message(self.pool.usage()),
            allowance=self.allowance(session),
            work=round_.work,
            draining=self.draining,
        )

    def _send_replies(self) -> None:
        """Build and deliver the replies of the rounds that are over; on an asynchronous device, while it computes."""
        for session, round_, copies, reply in self._unsent:
            reply.rows.CopyFrom(copies.build())
            if round_.first_forward_at is not None:
                reply.work.reply_ms = (self.clock() - self._forward_ended_at) * 1000
            session.finish(round_, reply)
        self._unsent.clear()

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

    def forget(self, session: Session, error: ServiceError) -> None:
        """Forget a scheduler: its rounds are refused, its rows freed."""
        session.refuse_all(error)
        for row in list(session.rows.values()):
            self._free(row, pb.ROW_STATUS_RELEASED)
        del self.sessions[session.scheduler_id]

    def _expire_leases(self) -> None:
        now = self.clock()
        for session in list(self.sessions.values()):
            if session.is_in_use:
                session.last_seen = now
            elif now - session.last_seen > self.config.lease_s:
                self.totals.expired_leases += 1
                self.forget(session, self._stale(session.generation))
                self._past_generations[session.scheduler_id] = session.generation
                while len(self._past_generations) > MAX_PAST_SCHEDULERS:
                    del self._past_generations[next(iter(self._past_generations))]

    @staticmethod
    def _stale(generation: int) -> Refused:
        return Refused("STALE_GENERATION", f"generation: a later one is known here, or {generation} is over")

    @staticmethod
    def _draining_error() -> Refused:
        return Refused("DRAINING", "this worker is shutting down")


def page_usage_message(usage: PageUsage) -> pb.PageUsage:
    return pb.PageUsage(free=usage.free, cached=usage.cached, held=usage.held, total=usage.total)


def run_fdfo(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """The loop with one FDFO round: returns as soon as a row is done."""
    return _run_alone(loop, replace(request, mode=pb.MODE_FDFO))


def run_sync(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """The loop with one SYNC round: returns when every row is done."""
    return _run_alone(loop, replace(request, mode=pb.MODE_SYNC))


def _run_alone(loop: DenoiseLoop, request: RoundRequest) -> pb.RunRoundResponse:
    """Tick until the round replies. Raises the ServiceError that refused it."""
    results: list[pb.RunRoundResponse | ServiceError] = []
    loop.submit(request, results.append)
    while not results:
        if not loop.tick() and not results:
            raise RuntimeError(f"round {request.round_id} waits for a predecessor that is not here")
    if isinstance(results[0], ServiceError):
        raise results[0]
    return results[0]

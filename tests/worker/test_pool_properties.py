"""Slots and pages under random rounds of two schedulers, recounted after every boundary by naive means."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import Refused, ServiceError
from fdfo.worker.v1 import worker_pb2 as pb
from tests.worker.naive_cache import CheckedSlots
from tests.worker.scripted import (
    BAD,
    BLOCK,
    FILL,
    FIRST_EFFORT,
    MASK,
    STOP,
    VOCAB,
    Clock,
    Driver,
    ScriptedRunner,
    start,
)
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.pages import PagePool
from worker_svc.kv.slots import SlotTable
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ForwardInput
from worker_svc.rounds import RoundRequest
from worker_svc.rows import Phase, Row, RowKey, RowName

NUM_SLOTS, CONTEXT = 5, 8 * BLOCK
WRITTEN = [STOP if place == 20 else FILL + place % 8 for place in range(BLOCK)]  # a block as the model writes it
TEXTS = {"written": WRITTEN, "other": [50] * BLOCK}
MAX_WAITING = 5  # rounds on their way, per scheduler


class StampingRunner(ScriptedRunner):
    """Leaves in the KV of every unit a stamp of its tokens and of the stamp before; NaN for a block with BAD."""

    planned: tuple[object, torch.Tensor, torch.Tensor] = ((), torch.empty(0), torch.empty(0))

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        if self.planned[0] is inputs.segments:  # a plan of attention stands as long as the segments do
            assert self.planned[1].equal(kv.page_table[inputs.slots]), "pages changed under the same segments"
            assert self.planned[2].equal(inputs.block_index)
        self.planned = inputs.segments, kv.page_table[inputs.slots], inputs.block_index
        units = zip(inputs.block_index.tolist(), inputs.slots.tolist(), inputs.ids.tolist(), strict=True)
        for block, slot, tokens in sorted(units):
            assert kv.page_table[slot, block * BLOCK // kv.page_size] != 0, "a forward over a position without a page"
            before = int(kv_of(kv, slot, block - 1)[0, 0, 0]) if block else 0
            kv_of(kv, slot, block)[:] = stamp(before, tuple(tokens))
        ids = inputs.ids[inputs.logits_units]
        efforts = (ids[:, :1] - FIRST_EFFORT).where((ids[:, :1] > FIRST_EFFORT) & (ids[:, :1] < FILL), torch.tensor(2))
        a_step = -(-(BLOCK - 1) // (efforts - 1).clamp(min=1))
        masked = ids == MASK
        is_sure = ~masked | (masked.cumsum(1) <= a_step)
        logits = torch.zeros(len(ids), BLOCK, VOCAB)
        tokens = torch.where(torch.arange(BLOCK) == 20, STOP, FILL + torch.arange(BLOCK) % 8)
        values = torch.where(is_sure, 20.0, 1.0)
        logits.scatter_(2, tokens.expand(len(ids), BLOCK)[:, :, None], values[:, :, None])
        logits[(ids == BAD).any(dim=1)] = torch.nan
        return logits


def kv_of(kv: KVStore, slot: int, block: int) -> torch.Tensor:
    """The keys of a block, [B, 1, head dim], to read or to write."""
    first = block * BLOCK % kv.page_size
    return kv.k[0, int(kv.page_table[slot, block * BLOCK // kv.page_size]), first : first + BLOCK]


@cache
def stamp(before: int, tokens: tuple[int, ...]) -> int:
    """What tells a block's tokens and all before them; a number that float32 holds."""
    return 1 + hash((before, tokens)) % ((1 << 24) - 1)


def stamps(tokens: tuple[int, ...]) -> list[int]:
    """Those of whole blocks, from the first position of a request on."""
    result = [0]
    for first in range(0, len(tokens), BLOCK):
        result.append(stamp(result[-1], tokens[first : first + BLOCK]))
    return result[1:]


@dataclass
class Scheduler:
    """What one scheduler sent and knows."""

    driver: Driver
    attempts: dict[str, int] = field(default_factory=dict)  # the last one sent, by request
    sent: dict[int, RoundRequest] = field(default_factory=dict)  # of this generation, by round id
    results: dict[int, list[list[object]]] = field(default_factory=dict)  # one inner list a call
    withdrawn: dict[int, RoundRequest] = field(default_factory=dict)
    acked: int = 0

    def ack(self) -> None:
        """Acknowledge the replies that came without a gap."""
        while any(self.results.get(self.acked + 1, [])):
            self.acked += 1


STARTS = st.lists(
    st.tuples(
        st.integers(0, 7),  # request
        st.integers(1, 5 * BLOCK),  # prompt length
        st.integers(2, 9),  # forwards a block
        st.integers(1, 4 * BLOCK),  # tokens left
        st.sampled_from(["LowConfidence", "JointThreshold"]),
        st.booleans(),  # with a stop token
        st.sampled_from(["written", "written", "other"]),  # what its prompt's whole blocks hold behind the first
        st.sampled_from([False, False, False, True]),  # with logits that are not finite
    ),
    max_size=4,
    unique_by=lambda start: start[0],
)
REQUESTS = st.sets(st.integers(0, 7), max_size=8)


class Rounds(RuleBasedStateMachine):
    """Random rounds against one small worker; the invariants are recounts from the rows themselves."""

    @initialize(
        num_pages=st.integers(6, 24),
        blocks_a_page=st.sampled_from([1, 2]),
        chunk=st.sampled_from([1, 2, 16]),
        fused_commit=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        is_asynchronous=st.booleans(),
    )
    def begin(
        self, num_pages: int, blocks_a_page: int, chunk: int, fused_commit: bool, caching: bool, is_asynchronous: bool
    ) -> None:
        self.clock = Clock()
        page_size = blocks_a_page * BLOCK
        config = LoopConfig(
            "scripted", BLOCK, MASK, CONTEXT, page_size, NUM_SLOTS, num_pages, chunk * BLOCK, fused_commit
        )
        runner = StampingRunner()
        runner.is_asynchronous = is_asynchronous
        self.loop = DenoiseLoop(runner, replace(config, enable_prefix_caching=caching), self.clock)
        self.checked = CheckedSlots(self.loop.kv, self.loop.pool, caching)
        self.loop.slots = self.loop._planner.slots = self.checked
        self.done_ids: dict[Row, dict[int, list[int]]] = {}  # by block index
        self.schedulers = [Scheduler(Driver(self.loop, name)) for name in ("one", "two")]
        self.seen: dict[Row, tuple[list[int], int, Phase]] = {}

    # What schedulers do ------------------------------------------------------------------------------------------

    def submit(self, scheduler: Scheduler, request: RoundRequest) -> None:
        results: list[object] = []
        scheduler.results.setdefault(request.round_id, []).append(results)
        self.loop.submit(request, results.append)

    @rule(
        who=st.integers(0, 1),
        starts=STARTS,
        continues=REQUESTS,
        releases=REQUESTS.filter(lambda requests: len(requests) < 4),
        wrong_attempt=st.sampled_from(["", "", "", "continue", "start"]),
        mode=st.sampled_from([pb.MODE_FDFO, pb.MODE_FDFO, pb.MODE_SYNC]),
        max_forwards=st.sampled_from([0, 0, 1, 3]),
    )
    def send_round(
        self,
        who: int,
        starts: list[tuple[int, int, int, int, str, bool, str, bool]],
        continues: set[int],
        releases: set[int],
        wrong_attempt: str,
        mode: pb.Mode,
        max_forwards: int,
    ) -> None:
        scheduler = self.schedulers[who]
        scheduler.ack()
        if scheduler.withdrawn or scheduler.driver.next_id - scheduler.acked > MAX_WAITING:
            return
        released = [self.name(scheduler, request) for request in releases]
        rows = []
        for request, length, forwards, tokens_left, algorithm, stops, text, is_bad in starts:
            attempt = scheduler.attempts.get(f"r{request}", 0) + (wrong_attempt != "start")
            scheduler.attempts[f"r{request}"] = attempt
            prompt = [WRITTEN[0]] * min(length // BLOCK, 1) * BLOCK
            prompt += TEXTS[text] * (length // BLOCK - 1)
            prompt += [BAD if is_bad else FIRST_EFFORT + forwards] * (length % BLOCK)
            row = start(f"r{request}", prompt, attempt=attempt, tokens_left=tokens_left, algorithm=algorithm)
            row.stop_token_ids.extend([STOP] if stops else [])
            rows.append(row)
        continued = continues - {entry[0] for entry in starts}
        request_ = scheduler.driver.request(
            acked_round_id=scheduler.acked,
            mode=mode,
            max_forwards=max_forwards,
            releases=released,
            starts=rows,
            continues=[self.name(scheduler, request, -(wrong_attempt == "continue")) for request in sorted(continued)],
        )
        scheduler.sent[request_.round_id] = request_
        self.submit(scheduler, request_)

    @rule(
        who=st.integers(0, 1),
        mode=st.sampled_from([pb.MODE_FDFO, pb.MODE_SYNC]),
        rounds=st.integers(1, 3),
        ahead=st.integers(0, 2),
    )
    def go_on(self, who: int, mode: pb.Mode, rounds: int, ahead: int) -> None:
        """What a scheduler does most: continue all its rows, some rounds ahead of the replies."""
        scheduler = self.schedulers[who]
        self.repeat_what_was_cancelled(who)
        for _ in range(rounds):
            self.tick(1000)
            scheduler.ack()
            session = self.loop.sessions.get(scheduler.driver.scheduler_id)
            if session is None:
                return
            resident = [row.name for row in session.rows.values()]
            for _ in range(1 + ahead):
                request = scheduler.driver.request(acked_round_id=scheduler.acked, mode=mode, continues=resident)
                scheduler.sent[request.round_id] = request
                self.submit(scheduler, request)

    @staticmethod
    def name(scheduler: Scheduler, request: int, shift: int = 0) -> RowName:
        return RowName(RowKey(f"r{request}", 0), scheduler.attempts.get(f"r{request}", 1) + shift)

    @rule(who=st.integers(0, 1), back=st.integers(0, 3))
    def repeat_round(self, who: int, back: int) -> None:
        scheduler = self.schedulers[who]
        request = scheduler.sent.get(scheduler.driver.next_id - 1 - back)
        if request is not None and request.round_id > scheduler.acked and not scheduler.withdrawn:
            self.submit(scheduler, request)

    @rule(who=st.integers(0, 1))
    def cancel_last_round(self, who: int) -> None:
        scheduler = self.schedulers[who]
        round_id = scheduler.driver.next_id - 1
        calls = [call for call in scheduler.results.get(round_id, []) if not call]
        request = scheduler.sent.get(round_id)
        if calls and request is not None:
            for call in calls:
                self.loop.withdraw(request, call.append)
                scheduler.results[round_id].remove(call)
            scheduler.withdrawn[round_id] = request

    @rule(who=st.integers(0, 1))
    def repeat_what_was_cancelled(self, who: int) -> None:
        scheduler = self.schedulers[who]
        for request in scheduler.withdrawn.values():
            self.submit(scheduler, request)
        scheduler.withdrawn.clear()

    @rule(who=st.integers(0, 1), requests=REQUESTS)
    def release_outside_rounds(self, who: int, requests: set[int]) -> None:
        scheduler = self.schedulers[who]
        session = self.loop.sessions.get(scheduler.driver.scheduler_id)
        if session is not None:
            self.loop.release(session, [self.name(scheduler, request) for request in requests])

    @precondition(lambda self: self.loop.totals.rounds % 4 == 3)
    @rule(who=st.integers(0, 1))
    def raise_generation(self, who: int) -> None:
        """What the old one waited for is refused, at once; its rows are gone."""
        scheduler = self.schedulers[who]
        waiting = [call for calls in scheduler.results.values() for call in calls if not call]
        self.new_generation(scheduler)
        self.loop.leases.touch(scheduler.driver.scheduler_id, scheduler.driver.generation)
        assert all(isinstance(call[0], Refused) and len(call) == 1 for call in waiting)
        assert not self.loop.sessions[scheduler.driver.scheduler_id].rows

    @staticmethod
    def new_generation(scheduler: Scheduler) -> None:
        scheduler.driver.generation += 1
        scheduler.driver.next_id, scheduler.acked = 1, 0
        for kept in (scheduler.sent, scheduler.results, scheduler.withdrawn, scheduler.attempts):
            kept.clear()

    @precondition(lambda self: self.loop.totals.rounds % 7 == 6)
    @rule()
    def let_leases_run_out(self) -> None:
        """Who is silent loses its rows; who has a round here does not."""
        in_use = {name for name, session in self.loop.sessions.items() if session.is_in_use}
        self.clock.now += 31
        self.loop.tick()
        for scheduler in self.schedulers:
            if scheduler.driver.scheduler_id not in self.loop.sessions:
                self.new_generation(scheduler)
        assert in_use <= set(self.loop.sessions)

    @rule(times=st.integers(1, 6))
    def tick(self, times: int) -> None:
        for _ in range(times):
            busy = self.loop.tick()
            self.recount()
            if not busy:
                return
        assert times < 1000, "rounds never end"

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def recount(self) -> None:
        """Everything the allocator says follows from the resident rows, and no row lost anything it had."""
        loop = self.loop
        rows = [row for session in loop.sessions.values() for row in session.rows.values()]
        usage = loop.pool.usage()
        assert usage.free + usage.cached + usage.held == usage.total == loop.config.num_pages
        assert loop.slots.num_free == NUM_SLOTS - len(rows)
        loop.slots.write_pages()
        table = loop.kv.page_table.tolist()
        given = [page for entry in table for page in entry if page]
        assert len(set(given)) == usage.held
        assert len({(page, place) for entry in table for place, page in enumerate(entry) if page}) == usage.held
        assert len({row.slot for row in rows}) == len(rows)
        assert not any(any(table[slot]) for slot in set(range(NUM_SLOTS)) - {row.slot for row in rows})
        assert not loop.kv.k[:, 0].any(), "the null page was written"
        for row in rows:
            pages = table[row.slot]
            count = pages_of(row, loop)
            assert all(pages[:count]) and not any(pages[count:])
            assert int(loop.columns.block_index[row.slot]) == row.block_index
            if row.entry is not None and row.entry.committed_block is not None:
                committed_ids = loop.columns.committed_ids[row.slot].tolist()
                self.done_ids.setdefault(row, {})[row.entry.committed_block] = committed_ids
            self.compare_with_before(row, pages[:count])
            if row.phase is Phase.DONE:
                self.done_ids.setdefault(row, {})[row.block_index] = loop.columns.ids[row.slot].tolist()
        for tokens, page in self.checked.pages.items():
            expected = torch.tensor(stamps(tokens)[-loop.config.page_size // BLOCK :], dtype=torch.float32)
            assert (loop.kv.k[0, page].view(len(expected), -1) == expected[:, None]).all(), "KV of other tokens"
        self.seen = {row: (table[row.slot][: pages_of(row, loop)], row.block_index, row.phase) for row in rows}

    def compare_with_before(self, row: Row, pages: list[int]) -> None:
        before, block_index, phase = self.seen.get(row, ([], row.block_index, row.phase))
        assert pages[: len(before)] == before, "a row's pages moved or became fewer"
        assert block_index <= row.block_index <= block_index + 1
        if row.block_index > block_index:
            assert phase is not Phase.PREFILL
        if phase is not Phase.PREFILL:
            assert row.phase is not Phase.PREFILL, "a prefix was lost"
        computed = row.prefilled_blocks if row.phase is Phase.PREFILL else row.block_index
        done_ids = self.done_ids.get(row, {})
        known = [row.prefix[b].tolist() if b < len(row.prefix) else done_ids[b] for b in range(computed)]
        for block, expected in enumerate(stamps(tuple(token for tokens in known for token in tokens))):
            assert (kv_of(self.loop.kv, row.slot, block) == expected).all(), "KV of other tokens, or none"

    def teardown(self) -> None:
        """All rounds are answered, once; when all is released nothing is held and every page can be given out."""
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        for who in range(2):
            self.repeat_what_was_cancelled(who)
        self.tick(1000)
        for scheduler in self.schedulers:
            for round_id, calls in scheduler.results.items():
                for call in calls:
                    assert len(call) == 1
                    assert not isinstance(call[0], ServiceError), (round_id, call[0])
        for session in loop.sessions.values():
            for _ in range(2):
                loop.release(session, [row.name for row in list(session.rows.values())])
        self.recount()
        assert loop.pool.usage().held == 0 and loop.slots.num_free == NUM_SLOTS
        pages = loop.pool.take(loop.config.num_pages)
        assert not loop.pool.cache.num_unused
        assert pages is not None and sorted(pages) == list(range(1, loop.config.num_pages + 1))


def pages_of(row: Row, loop: DenoiseLoop) -> int:
    """Pages of the positions up to the end of the row's block."""
    return -(-(row.block_index + 1) * BLOCK // loop.config.page_size)


class TestRounds(Rounds.TestCase):  # type: ignore[misc, valid-type]
    """Whatever two schedulers do, pages and slots add up, no row loses what it had, every call is answered; the prefix
    cache has the pages of the naive one, with the KV of their tokens."""

    settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def make_table(num_pages: int = 6, num_slots: int = 3) -> SlotTable:
    kv = KVStore.allocate(
        num_layers=1,
        num_pages=num_pages,
        page_size=4,
        num_kv_heads=1,
        head_dim=1,
        num_slots=num_slots,
        max_pages_per_slot=5,
        dtype=torch.float32,
        device="cpu",
    )
    return SlotTable(kv, PagePool(num_pages))


def test_close_is_idempotent() -> None:
    """A slot that is closed twice gives its pages back once; one that was never opened gives none."""
    table = make_table()
    slot = table.open(9)
    assert slot is not None and table.pool.num_free == 3 and table.num_free == 2
    for _ in range(2):
        table.close(slot)
        table.write_pages()
        assert table.pool.num_free == 6 and table.num_free == 3 and not table.kv.page_table.any()
    table.close(2)
    assert table.pool.num_free == 6 and table.num_free == 3


def test_open_and_grow_take_all_or_nothing() -> None:
    """Where pages or slots do not suffice nothing is taken and nothing in the table changes."""
    table = make_table()
    slot = table.open(17)
    assert slot is not None and table.num_pages(slot) == 5
    table.write_pages()
    before = table.kv.page_table.clone()
    assert table.open(5) is None and table.pool.num_free == 1 and table.num_free == 2
    other = table.open(1)
    assert other is not None and not table.grow(other, 5)
    assert table.pool.num_free == 0 and table.num_pages(other) == 1
    table.close(other)
    table.write_pages()
    assert torch.equal(table.kv.page_table, before)
    assert table.grow(slot, 20), "what is there already takes no page"
    few = make_table(num_slots=1)
    assert few.open(1) is not None and few.open(1) is None and few.pool.num_free == 5


def test_pages_come_from_1_and_only_held_ones_go_back() -> None:
    """The null page is never given out; a free, foreign or null page that is given back raises."""
    pool = PagePool(4)
    pages = pool.take(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]
    assert pool.take(1) is None and pool.take(0) == []
    pool.give_back(pages[:2])
    for page in (pages[0], 0, 5):
        with pytest.raises(KeyError):
            pool.give_back([page])
    assert pool.usage().free == 2 and pool.usage().held == 2

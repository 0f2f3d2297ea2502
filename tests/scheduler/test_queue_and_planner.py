"""The queue against a sorted list, and the choice of who gives up its place against all other choices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import QueueFull
from scheduler_svc.planner import MAX_PREEMPTIONS, Room, choose_victim, make_way
from scheduler_svc.queue import RequestQueue
from tests.worker.scripted import Clock

PAGE = 32


@dataclass(eq=False)
class Row:
    """What queue and planner look at."""

    priority: int = 0
    pages: int = 1
    attempt: int = 0
    num_preemptions: int = 0
    is_suspect: bool = False
    client: str = ""
    may_start: bool = True
    is_finished: bool = False
    is_parked: bool = False

    @property
    def num_positions(self) -> int:
        return self.pages * PAGE


def make_queue(**limits: Any) -> Any:
    return RequestQueue(**{"max_queued": 1000, "clock": lambda: 0.0, **limits})


def queue_of(*rows: Row) -> Any:
    queue = make_queue()
    for row in rows:
        queue.push([row])
    return queue


class NaiveQueue:
    """The rule of the queue over plain lists."""

    def __init__(self, max_running_per_client: int) -> None:
        self.returned: list[Row] = []
        self.waiting: list[Row] = []
        self.started: list[Row] = []
        self.turns: list[tuple[int, str]] = []  # class and client; who was served last is last
        self.limit = max_running_per_client or 10**9

    def all(self) -> list[Row]:
        return self.returned + self.waiting

    def num_rows(self, client: str) -> int:
        return sum(row.client == client and not row.is_finished for row in self.started)

    def put(self, rows: list[Row], where: str) -> None:
        self.started = [row for row in self.started if row not in rows]
        for row in rows:
            if not any((other.priority, other.client) == (row.priority, row.client) for other in self.waiting):
                self.turns = [turn for turn in self.turns if turn != (row.priority, row.client)]
                self.turns.append((row.priority, row.client))
            if where == "end":
                self.waiting.append(row)
        if where == "held":
            self.waiting = rows + self.waiting
        if where == "front":
            self.returned = rows + self.returned

    def first(self) -> Row | None:
        def may_start(row: Row) -> bool:
            return row.may_start and self.num_rows(row.client) < self.limit

        for priority in sorted({row.priority for row in self.all()}, reverse=True):
            returned = [row for row in self.returned if row.priority == priority and may_start(row)]
            waiting = [row for row in self.waiting if row.priority == priority and may_start(row)]
            if returned:
                return returned[0]
            if waiting:
                return min(
                    waiting, key=lambda row: (self.num_rows(row.client), self.turns.index((priority, row.client)))
                )
        return None

    def start(self, row: Row) -> None:
        self.turns.sort(key=lambda turn: turn == (row.priority, row.client))
        self.forget(row)
        self.started.append(row)

    def forget(self, row: Row) -> None:
        self.returned, self.waiting, self.started = (
            [other for other in rows if other is not row] for rows in (self.returned, self.waiting, self.started)
        )


ROWS_OF_A_REQUEST = st.tuples(st.integers(-1, 1), st.sampled_from("abc"), st.integers(1, 3))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["end", "held"]), ROWS_OF_A_REQUEST),
        st.tuples(st.sampled_from(["pop", "pop", "return"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["finish", "block", "remove"]), st.integers(0, 30)),
    ),
    max_size=50,
)


@given(OPERATIONS, st.integers(0, 3))
@settings(deadline=None, max_examples=300)
def test_the_queue_is_a_naive_one(operations: list[Any], limit: int) -> None:
    """After every operation: the same first, length and positions as by the rule over plain lists; then the same order
    to the end."""
    queue, naive = make_queue(max_running_per_client=limit), NaiveQueue(limit)
    known = [Row()]
    for name, argument in operations:
        if name in ("end", "held"):
            priority, client, count = argument
            rows = [Row(priority, client=client) for _ in range(count)]
            known += rows
            if name == "end":
                assert queue.push(rows) == sum(row.priority >= priority for row in naive.all())
            else:
                queue.push_held(rows)
            naive.put(rows, name)
        elif name == "pop" and (first := naive.first()) is not None:
            assert queue.pop() is first
            naive.start(first)
        elif name == "return":
            rows = [row for row in naive.started if not row.is_finished][:argument]
            queue.push_front(rows)
            naive.put(rows, "front")
        elif name == "finish" and naive.started:
            naive.started[argument % len(naive.started)].is_finished = True
        elif name == "block":
            row = known[argument % len(known)]
            row.may_start = not row.may_start
        elif name == "remove":
            row = known[argument % len(known)]
            queue.remove(row)
            naive.forget(row)
        assert len(queue) == len(naive.all())
        assert queue.first() is naive.first()
    for row in known:
        row.may_start, row.is_finished = True, row in naive.started
    while (row := naive.first()) is not None:
        assert queue.pop() is row
        naive.start(row)
        row.is_finished = True
    assert len(queue) == len(naive.all()) == 0


def test_one_client_is_served_first_in_first_out() -> None:
    """Whatever it runs already, in the order in which its requests came."""
    rows = [Row() for _ in range(20)]
    queue = queue_of(*rows)
    assert [queue.pop() for _ in rows] == rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10), st.integers(2, 4), st.integers(2, 8))
@settings(deadline=None, max_examples=50)
def test_clients_that_wait_have_equal_shares_of_the_rows(lengths: list[int], num_clients: int, num_rows: int) -> None:
    """Whenever all rows are taken no client has two more than another, however long the requests of each are."""
    queue: Any = make_queue()
    clients = "abcd"[:num_clients]
    for number, client in enumerate(clients):
        queue.push([Row(client=client, pages=lengths[(number * place) % len(lengths)]) for place in range(200)])
    running: dict[Any, int] = {}
    for _ in range(25):
        while len(running) < num_rows:
            row = queue.pop()
            running[row] = row.pages
        counts = [sum(row.client == client for row in running) for client in clients]
        assert max(counts) - min(counts) <= 1
        for row in list(running):
            running[row] -= 1
            if not running[row]:
                del running[row]
                row.is_finished = True


def test_a_client_with_a_thousand_waiting_does_not_keep_one_out() -> None:
    """Who has nothing running is next; higher classes and those that lost their place go before."""
    queue, running = make_queue(max_queued=2000), []
    queue.push([Row(client="many") for _ in range(1000)])
    running += [queue.pop() for _ in range(8)]
    one, urgent = Row(client="one"), Row(priority=1, client="many")
    queue.push([one])
    queue.push([urgent])
    queue.push_front(running[:1])
    assert [queue.pop() for _ in range(3)] == [urgent, running[0], one]


def test_a_client_at_its_limit_of_rows_waits_and_holds_back_nobody() -> None:
    """Also in a higher class; when one of its rows ends it goes on."""
    queue: Any = make_queue(max_running_per_client=2)
    queue.push([Row(priority=1, client="a") for _ in range(3)])
    queue.push([Row(client="b")])
    first, _, other = (queue.pop() for _ in range(3))
    assert other.client == "b" and queue.first() is None and len(queue) == 1
    first.is_finished = True
    assert queue.pop().client == "a"


def test_a_full_queue_refuses_new_requests_only() -> None:
    """What was admitted once is never refused; the last request that finds a place brings all its samples."""
    told: list[int] = []
    queue: Any = make_queue(max_queued=2, on_put=lambda: told.append(1))
    queue.push([Row()])
    queue.push([Row(), Row(), Row()])
    with pytest.raises(QueueFull):
        queue.push([Row(priority=9)])
    queue.push_front([Row()])
    assert (len(queue), len(told), queue.num_refused) == (5, 3, 1)


def test_a_client_has_a_part_of_the_queue() -> None:
    """Past it that client alone is refused, and told so; what waits for a place counts."""
    queue: Any = make_queue(max_queued=4, max_queued_per_client=2)
    queue.push([Row(client="a")])
    with queue.place("a"), pytest.raises(QueueFull) as caught:
        queue.push([Row(client="a")])
    assert caught.value.reason == "CLIENT_QUEUE_FULL"
    queue.push([Row(client="a")])
    queue.push([Row(client="b")])
    with queue.place("c"), pytest.raises(QueueFull) as caught:
        queue.push([Row(client="d")])
    assert caught.value.reason == "QUEUE_FULL"


def test_the_retry_hint_is_the_time_that_the_queue_takes() -> None:
    """At the rate at which the last requests left it, in whole seconds from 1 to 60; 1 when nothing has left it yet. A
    client that has filled its part waits for the turns of the others too."""
    clock = Clock()
    queue: Any = make_queue(max_queued=100, max_queued_per_client=30, clock=clock)

    def hint(client: str) -> float:
        with pytest.raises(QueueFull) as caught:
            queue.push([Row(client=client)])
        return caught.value.retry_after_s

    def leave(count: int) -> None:
        for _ in range(count):
            clock.now += 0.25
            queue.pop()

    queue.push([Row(client="a") for _ in range(120)])
    assert hint("b") == 1
    leave(21)
    queue.push([Row(client="b")])
    assert hint("b") == 24  # 100 * 5 s / 21
    leave(60)
    assert hint("a") == 10  # 40 * 15.75 s / 64
    queue.push([Row(client="b")])
    assert hint("a") == 20
    clock.now += 1000
    assert hint("a") == 60
    for _ in range(64):
        queue.push_front([queue.pop()])
    assert hint("a") == 1


def test_the_victim_is_of_the_lowest_class_and_started_last() -> None:
    """Who was preempted three times is spared while others can be chosen, and then chosen by the same order; before
    all goes one whose client does not read."""
    rows: list[Any] = [Row(0, attempt=1), Row(0, attempt=5), Row(-1, attempt=2), Row(-1, attempt=4), Row(1, attempt=6)]
    assert choose_victim(rows) is rows[3]
    rows[3].num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(rows) is rows[2]
    for row in rows:
        row.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(rows) is rows[3]
    rows[4].is_parked = True
    assert choose_victim(rows) is rows[4]


ROWS = st.lists(
    st.builds(Row, st.integers(-1, 2), st.integers(1, 5), st.integers(1, 99), st.integers(0, 4)), max_size=6
)


@given(ROWS, st.integers(1, 9), st.integers(0, 2), st.integers(-2, 9))
@settings(deadline=None, max_examples=300)
def test_lower_classes_make_way_when_that_helps_and_no_more_than_needed(
    running: list[Any], pages: int, free_rows: int, free_pages: int
) -> None:
    """The first fits then; without any one of the victims it would not; none if no choice of lower rows helps."""
    first: Any = Row(priority=1, pages=pages)

    def fits(victims: list[Any]) -> bool:
        room = Room(free_rows, free_pages, PAGE)
        for victim in victims:
            room.give_back(victim)
        return room.fits(first, len(running) - len(victims))

    lower = [row for row in running if row.priority < 1]
    victims = make_way(first, Room(free_rows, free_pages, PAGE), running, len(running))
    helps = any(fits(list(some)) for size in range(len(lower) + 1) for some in itertools.combinations(lower, size))
    assert all(victim in lower for victim in victims)
    assert fits(victims) == helps
    if not helps or fits([]):
        assert victims == []
    assert not any(fits([other for other in victims if other is not victim]) for victim in victims)

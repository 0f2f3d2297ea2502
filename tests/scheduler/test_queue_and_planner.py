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

PAGE = 32


@dataclass(eq=False)
class Row:
    """What queue and planner look at."""

    priority: int = 0
    pages: int = 1
    attempt: int = 0
    num_preemptions: int = 0
    is_suspect: bool = False

    @property
    def num_positions(self) -> int:
        return self.pages * PAGE


def queue_of(*rows: Row) -> Any:
    queue: Any = RequestQueue(max_queued=1000)
    for row in rows:
        queue.push([row])
    return queue


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2), st.integers(1, 3)),
        st.tuples(st.just("front"), st.lists(st.integers(-2, 2), max_size=4), st.none()),
        st.tuples(st.just("pop"), st.none(), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 30), st.none()),
    ),
    max_size=40,
)


@given(OPERATIONS)
@settings(deadline=None, max_examples=200)
def test_the_queue_is_a_list_that_is_sorted_by_class(operations: list[Any]) -> None:
    """After every operation: the same order, length and positions as a list kept in order by naive means."""
    queue, known = queue_of(), [Row()]
    naive: list[Row] = []
    for name, argument, count in operations:
        if name == "push":
            rows = [Row(argument) for _ in range(count)]
            assert queue.push(rows) == sum(row.priority >= argument for row in naive)
            naive = sorted(naive + rows, key=lambda row: -row.priority)
            known += rows
        elif name == "front":
            rows = [Row(priority) for priority in argument]
            queue.push_front(rows)
            naive = sorted(rows + naive, key=lambda row: -row.priority)
            known += rows
        elif name == "pop" and naive:
            assert queue.pop() is naive.pop(0)
        elif name == "remove":
            row = known[argument % len(known)]
            queue.remove(row)
            naive = [other for other in naive if other is not row]
        assert len(queue) == len(naive)
        assert queue.first() is (naive[0] if naive else None)
    assert [queue.pop() for _ in naive] == naive


def test_a_full_queue_refuses_new_requests_only() -> None:
    """What was admitted once is never refused; the last request that finds a place brings all its samples."""
    told: list[int] = []
    queue: Any = RequestQueue(max_queued=2, on_put=lambda: told.append(1))
    queue.push([Row()])
    queue.push([Row(), Row(), Row()])
    with pytest.raises(QueueFull):
        queue.push([Row(priority=9)])
    queue.push_front([Row()])
    assert (len(queue), len(told)) == (5, 3)


def test_the_victim_is_of_the_lowest_class_and_started_last() -> None:
    """Who was preempted three times is spared while others can be chosen, and then chosen by the same order."""
    rows: list[Any] = [Row(0, attempt=1), Row(0, attempt=5), Row(-1, attempt=2), Row(-1, attempt=4), Row(1, attempt=6)]
    assert choose_victim(rows) is rows[3]
    rows[3].num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(rows) is rows[2]
    for row in rows:
        row.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(rows) is rows[3]


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

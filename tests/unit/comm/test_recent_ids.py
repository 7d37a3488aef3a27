"""Ids that are remembered: those that were put in last, in about as much memory as they need."""

from __future__ import annotations

import sys
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.ended_rollouts import GENERATIONS, RecentIds

PUT, POP = "put", "pop"
V = TypeVar("V", bound=object)


def items(remembered: RecentIds[V]) -> list[tuple[str, V]]:
    """All ids and values, the oldest first."""
    return [item for generation in reversed(remembered._generations) for item in generation.items()]


def test_the_oldest_are_forgotten() -> None:
    remembered: RecentIds[int] = RecentIds(2)
    for value, key in enumerate("abc"):
        remembered.put(key, value)
    assert [remembered.get(key) for key in "abc"] == [None, 1, 2]
    assert ["a" in remembered, "c" in remembered] == [False, True]


def test_what_is_put_in_again_is_new_and_has_its_new_value() -> None:
    remembered: RecentIds[str] = RecentIds(2)
    for key, value in ("a", "first"), ("b", ""), ("a", "second"), ("c", ""):
        remembered.put(key, value)
    assert items(remembered) == [("a", "second"), ("c", "")]


@given(
    st.integers(1, 60), st.lists(st.tuples(st.sampled_from([PUT, PUT, PUT, POP]), st.integers(0, 150)), max_size=1_000)
)
def test_the_last_ones_are_remembered_in_their_order_and_few_more(at_least: int, calls: list[tuple[str, int]]) -> None:
    remembered: RecentIds[int] = RecentIds(at_least)
    all_there_were: dict[str, int] = {}
    for number, (operation, which) in enumerate(calls):
        key = str(which)
        former = all_there_were.pop(key, None)
        if operation == PUT:
            remembered.put(key, number)
            all_there_were[key] = number
        else:
            assert remembered.pop(key) in (former, None)
        held = items(remembered)
        assert len(held) == len(remembered)
        assert held == list(all_there_were.items())[-len(held) :] or not held
        assert len(held) >= min(at_least, len(all_there_were))
        assert len(held) < at_least + 2 * -(-at_least // GENERATIONS)
        assert len(remembered._generations) <= 2 * GENERATIONS + 4
        all_there_were = dict(held)


def test_all_is_forgotten_at_once() -> None:
    remembered: RecentIds[int] = RecentIds(100)
    for number in range(50):
        remembered.put(str(number), number)
    remembered.clear()
    assert (len(remembered), remembered.get("49")) == (0, None)


def test_its_tables_stay_as_large_as_they_were_when_it_was_full() -> None:
    full = 8_000
    remembered: RecentIds[bool] = RecentIds(full)
    taken = []
    for number in range(10 * full):
        remembered.put(str(number), True)
        taken.append(sum(map(sys.getsizeof, remembered._generations)))
    assert max(taken[2 * full :]) == max(taken[full : 2 * full])
    assert min(taken[2 * full :]) > 0.85 * max(taken)


def test_where_much_was_forgotten_of_full_generations_it_does_not_grow() -> None:
    at_least = 800
    each = at_least // GENERATIONS
    remembered: RecentIds[bool] = RecentIds(at_least)
    counts = []
    for number in range(60 * each):
        remembered.put(str(number), True)
        if number < 30 * each and number % each < each // 2 - 1:  # just too few for neighbours to become one
            remembered.pop(str(number - each))
        counts.append(len(remembered))
    assert min(counts[30 * each :]) >= at_least
    assert max(counts) < at_least + 2 * each

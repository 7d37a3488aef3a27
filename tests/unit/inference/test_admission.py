"""Admission and the extent of the KV cache: what is bounded stays bounded, for any order of events."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.embedded.cache import LENGTH_STEP, plan_length
from asyncrl.inference.embedded.scheduler import AdmissionQueue


@dataclass(frozen=True)
class Item:
    arrival: int
    reserved_tokens: int


def queue_of(lengths: list[int], max_running: int, max_total: int) -> AdmissionQueue:
    queue = AdmissionQueue(max_running, max_total)
    queue.waiting.extend(Item(index, length) for index, length in enumerate(lengths))
    return queue


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    max_running=st.integers(1, 8),
    max_total=st.integers(40, 200),
    data=st.data(),
)
def test_everything_runs_in_order_of_arrival_within_both_bounds(
    lengths: list[int], max_running: int, max_total: int, data: st.DataObject
) -> None:
    queue = queue_of(lengths, max_running, max_total)
    running: list[Item] = []
    started: list[Item] = []
    while queue.waiting or running:
        admitted = queue.admit(running)
        running, started = running + admitted, started + admitted
        assert len(running) <= max_running
        assert len(running) * max(item.reserved_tokens for item in running) <= max_total
        leaving = data.draw(st.integers(1, len(running)))
        running = running[leaving:]
    assert [item.arrival for item in started] == list(range(len(lengths)))


def test_a_barrier_holds_later_arrivals_only() -> None:
    queue = queue_of([1, 1, 1, 1], 8, 100)
    queue.barrier = 2
    assert [item.arrival for item in queue.admit([])] == [0, 1]
    assert not queue.has_admissible()
    queue.barrier = None
    assert queue.has_admissible()
    assert [item.arrival for item in queue.admit([])] == [2, 3]


@given(current=st.integers(0, 600), needed=st.integers(1, 500), slack=st.integers(0, 1000))
def test_slot_length_fits_stays_bounded_and_wastes_little(current: int, needed: int, slack: int) -> None:
    most = needed + slack
    planned = plan_length(current, needed, most)
    assert needed <= planned <= most
    assert planned - needed <= 2 * max(LENGTH_STEP, needed // 16)
    assert plan_length(planned, needed, most) == planned


@given(start=st.integers(1, 400))
def test_slot_length_changes_rarely_while_samples_grow(start: int) -> None:
    lengths = [start]
    for needed in range(start, start + 160):
        lengths.append(plan_length(lengths[-1], needed, 10_000))
    assert len(set(lengths)) <= 160 // LENGTH_STEP + 2


def test_a_slot_length_beyond_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_total_tokens"):
        plan_length(0, 11, 10)

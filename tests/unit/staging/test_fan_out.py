"""Hosts fetch folders from each other in rounds that grow with the logarithm of the hosts, whatever fails."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.staging.fan_out import ORIGIN, UPLOADS, FanOut, Fetch
from tests.examples import examples


def fan_of(hosts: int, *folders: str) -> FanOut:
    fan = FanOut()
    for host in range(hosts):
        fan.added(host)
    fan.want(*folders)
    return fan


def staged_at_the_origin(hosts: int, folder: str = "v1") -> FanOut:
    fan = fan_of(hosts, folder)
    (order,) = fan.poll(0.0)
    assert order == Fetch(ORIGIN, folder, None)
    assert fan.succeeded(order)
    return fan


def test_nobody_fetches_before_the_origin_has_it() -> None:
    fan = fan_of(3, "v1")
    assert fan.poll(0.0) == [Fetch(ORIGIN, "v1", None)]
    assert fan.poll(1.0) == []


@pytest.mark.parametrize(("hosts", "needed"), [(2, 1), (3, 1), (10, 3), (512, 6)])
def test_the_rounds_grow_with_the_logarithm_and_no_host_sends_more_than_two_at_a_time(hosts: int, needed: int) -> None:
    fan = staged_at_the_origin(hosts)
    rounds, sent = 0, Counter[int | None]()
    while orders := fan.poll(0.0):
        at_a_time = Counter(order.source for order in orders)
        assert max(at_a_time.values()) <= 2
        sent += at_a_time
        rounds += 1
        assert all(fan.succeeded(order) for order in orders)
    assert sent.total() == hosts - 1  # once for each host
    assert rounds == needed
    assert max(sent.values()) <= 2 * rounds


def test_a_host_gets_what_it_needs_alone_and_need_not_have_the_rest_first() -> None:
    fan = FanOut(lambda host, folder: host == ORIGIN or (folder == "inputs") == (host == 2))
    for host in range(4):
        fan.added(host)
    fan.want("inputs", "model", "v1")
    fetched = []
    while orders := fan.poll(0.0):
        fetched += orders
        assert all(fan.succeeded(order) for order in orders)
    of = {host: [order.folder for order in fetched if order.host == host] for host in range(4)}
    assert of == {ORIGIN: ["inputs", "model", "v1"], 1: ["model", "v1"], 2: ["inputs"], 3: ["model", "v1"]}
    assert {order.source for order in fetched if order.folder != "inputs"} <= {None, ORIGIN, 1, 3}
    assert fan.next_due(0.0) is None


def test_a_host_that_has_it_is_a_source_at_once_and_the_origin_is_asked_last() -> None:
    fan = staged_at_the_origin(5)
    one, two = fan.poll(0.0)
    assert (one.source, two.source) == (ORIGIN, ORIGIN)
    fan.succeeded(one)
    assert {order.source for order in fan.poll(0.0)} == {one.host}
    assert fan.sends(ORIGIN) == {"v1"}


def test_a_dead_source_is_left_for_the_next_one_and_asked_again_later() -> None:
    fan = staged_at_the_origin(3)
    first, second = fan.poll(0.0)
    fan.succeeded(first)
    fan.failed(second, 1.0, source_failed=True)
    (again,) = fan.poll(1.0)
    assert (again.host, again.source) == (second.host, first.host)
    fan.failed(again, 2.0, source_failed=True)
    (third,) = fan.poll(2.0)
    assert third.source == ORIGIN  # half a second is over
    fan.failed(third, 2.0, source_failed=True)
    assert fan.poll(2.0) == []
    due = fan.next_due(2.0)
    assert due == 2.5
    assert fan.next_due(due) == 3.0, "what is due now is no later time"
    assert fan.poll(due)


def test_a_host_that_cannot_keep_it_is_asked_again_later_and_longer_each_time() -> None:
    fan = staged_at_the_origin(2)
    now, waits = 0.0, []
    for _ in range(8):
        (order,) = fan.poll(now)
        fan.failed(order, now, source_failed=False)
        assert fan.poll(now) == []
        due = fan.next_due(now)
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    (order,) = fan.poll(now)
    fan.succeeded(order)
    fan.want("v2")
    fan.succeeded(*fan.poll(now))
    (order,) = fan.poll(now)
    fan.failed(order, now, source_failed=False)
    assert fan.next_due(now) == now + 0.5, "it has kept one since"
    fan.added(2)
    assert fan.poll(now) == [Fetch(2, "v2", ORIGIN)], "another host need not wait for it"


def test_a_source_that_has_sent_again_is_trusted_as_if_it_had_never_failed() -> None:
    fan, now = staged_at_the_origin(2), 0.0
    for failures in (2, 1):
        for failure in range(failures):
            (order,) = fan.poll(now)
            fan.failed(order, now, source_failed=True)
            assert fan.next_due(now) == now + 0.5 * 2**failure
            now = fan.next_due(now) or now
        (order,) = fan.poll(now)
        fan.succeeded(order)
        fan.want(f"v{failures}0")
        fan.succeeded(*fan.poll(now))


def test_an_origin_whose_own_folder_is_gone_is_asked_again_later() -> None:
    fan = fan_of(1, "v1")
    (order,) = fan.poll(0.0)
    fan.failed(order, 0.0, source_failed=True)
    assert fan.poll(0.0) == []
    assert fan.poll(0.5) == [order]


def test_the_model_comes_first_and_then_the_newest_version_alone() -> None:
    fan = fan_of(1, "model", "v1")
    (order,) = fan.poll(0.0)
    assert order.folder == "model"
    fan.succeeded(order)
    fan.want("model", "v3")
    assert [order.folder for order in fan.poll(0.0)] == ["v3"]


def test_what_is_under_way_when_a_newer_version_comes_is_seen_to_its_end() -> None:
    fan = staged_at_the_origin(2)
    (slow,) = fan.poll(0.0)
    fan.want("v2")
    (origin,) = fan.poll(0.0)
    assert origin == Fetch(ORIGIN, "v2", None)
    fan.succeeded(origin)
    assert fan.poll(0.0) == []
    assert fan.sends(ORIGIN) == {"v1"}
    assert fan.succeeded(slow)
    assert fan.poll(0.0) == [Fetch(1, "v2", ORIGIN)]


def test_a_host_that_began_again_has_nothing_and_its_former_order_is_nobodys() -> None:
    fan = staged_at_the_origin(2)
    (before,) = fan.poll(0.0)
    fan.added(1)
    assert fan.sends(ORIGIN) == set()
    assert not fan.succeeded(before)
    assert fan.poll(0.0) == [Fetch(1, "v1", ORIGIN)]


def test_an_origin_that_began_again_is_no_source_before_it_has_it_again() -> None:
    fan = staged_at_the_origin(2)
    (before,) = fan.poll(0.0)
    fan.added(ORIGIN)
    fan.failed(before, 0.0, source_failed=True)
    assert fan.poll(0.0) == [Fetch(ORIGIN, "v1", None)]


@settings(max_examples=examples(40))
@given(st.integers(2, 12), st.data())
def test_all_have_it_in_the_end_whatever_fails_and_in_whatever_order(hosts: int, data: st.DataObject) -> None:
    fan, now, under_way = staged_at_the_origin(hosts), 0.0, list[Fetch]()
    have, failures = {ORIGIN}, data.draw(st.integers(0, 20))
    while len(have) < hosts:
        under_way += fan.poll(now)
        assert max(Counter(order.source for order in under_way).values(), default=0) <= UPLOADS
        if not under_way:
            due = fan.next_due(now)
            assert due is not None
            now = due
            continue
        order = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        assert order.source in have
        if failures and data.draw(st.booleans()):
            failures -= 1
            fan.failed(order, now, source_failed=data.draw(st.booleans()))
        else:
            assert fan.succeeded(order)
            have.add(order.host)
    assert fan.poll(now) == []
    assert fan.next_due(now) is None

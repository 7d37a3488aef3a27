"""Each server's way to the newest weights, in every kind of failure."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.inference.client import MemoryTag
from asyncrl.manager.fleet.decisions import BACKOFF, LONGEST_UPDATES, FleetDecisions, UpdateMode
from asyncrl.manager.fleet.servers import (
    BeginUpdate,
    CancelUpdate,
    CheckHealth,
    FleetServer,
    Order,
    ServerTargets,
    Target,
)
from asyncrl.manager.messages import ServerState
from tests.examples import examples

LIMIT_S = 10.0
NOTHING: dict[int, int] = {}


def fleet_of(servers: int = 1, mode: UpdateMode = "interrupt", version: int = 0) -> FleetDecisions:
    fleet = FleetDecisions(mode, LIMIT_S)
    for index in range(servers):
        fleet.register(index, f"http://{index}", version, 0.0)
    return fleet


def record_of(fleet: FleetDecisions, index: int = 0) -> FleetServer:
    return next(record for record in fleet.servers if record.index == index)


def updates(orders: list[Order]) -> dict[int, BeginUpdate]:
    return {order.server: order for order in orders if isinstance(order, BeginUpdate)}


def target(version: int) -> Target:
    return Target(version, f"/weights/v{version}")


def test_a_server_at_the_initial_model_serves_at_once() -> None:
    fleet = fleet_of(2)
    assert fleet.served_version == 0
    assert fleet.poll(0.0, NOTHING) == []


def test_every_server_is_brought_to_a_published_version_by_itself() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(1))
    orders = updates(fleet.poll(0.0, {0: 5}))
    assert orders[0].target == target(1)
    assert orders[0].pause == "abort"
    assert fleet.served_version is None
    fleet.succeeded(0, orders[0].attempt)
    assert fleet.served_version == 1
    assert record_of(fleet, 1).state is ServerState.UPDATING


def test_servers_are_updated_in_the_order_of_their_indices() -> None:
    fleet = FleetDecisions("interrupt", LIMIT_S, 0.5)
    for index in (2, 0, 1, 3):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.targets.publish(target(1))
    assert list(updates(fleet.poll(0.0, NOTHING))) == [0, 1]


def test_a_server_is_expected_to_report_the_version_that_it_serves_if_that_is_known() -> None:
    fleet = fleet_of(version=3)
    who = ((0, "http://0"), (0, "http://1"), (1, "http://1"))
    assert [fleet.expected_version(*each) for each in who] == [3, None, None]
    fleet.targets.publish(target(4))
    fleet.poll(0.0, NOTHING)
    assert fleet.expected_version(0, "http://0") is None


def test_versions_may_be_skipped() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    first = updates(fleet.poll(0.0, NOTHING))[0]
    for version in (2, 3, 7):
        fleet.targets.publish(target(version))
    fleet.targets.publish(target(5))
    assert fleet.poll(1.0, NOTHING) == []
    fleet.succeeded(0, first.attempt)
    assert fleet.served_version == 1
    assert updates(fleet.poll(2.0, NOTHING))[0].target.version == 7


def test_a_version_is_published_once_and_the_one_before_it_stays_the_one_before() -> None:
    targets = ServerTargets()
    for version in (1, 2, 2):
        targets.publish(target(version))
    record = FleetServer(0, "http://0", None, ServerState.ASLEEP, damaged=2, released=frozenset(MemoryTag))
    assert targets.goal(record) == target(1)


def test_a_host_that_fetched_a_version_again_has_the_new_copy_and_no_older_one_takes_its_place() -> None:
    targets = ServerTargets(staged=True)
    record = FleetServer(0, "https://10.0.0.0:5000", 0, ServerState.SERVING)
    for arrived in (Target(2, "/v2", "/disk"), Target(2, "/v2", "/disk/again"), Target(1, "/v1", "/disk")):
        targets.arrived("10.0.0.0", arrived)
    assert targets.available(record) == Target(2, "/v2", "/disk/again")
    targets.arrived("10.0.0.1", at(1, 1))
    assert (targets.on_host("10.0.0.1"), targets.on_host()) == ({1}, {1, 2})


def test_versions_that_are_served_or_loaded_are_in_use() -> None:
    fleet = fleet_of(2)
    assert fleet.versions_in_use() == {0}
    fleet.targets.publish(target(1))
    orders = updates(fleet.poll(0.0, NOTHING))
    fleet.succeeded(0, orders[0].attempt)
    fleet.targets.publish(target(2))
    assert updates(fleet.poll(1.0, NOTHING)).keys() == {0}
    assert fleet.versions_in_use() == {1, 2}  # server 1 loads v1 still
    fleet.deregister(1)
    assert fleet.versions_in_use() == {2}


def test_a_server_that_refused_a_damaged_version_serves_the_one_it_had_until_the_next() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(1))
    orders = updates(fleet.poll(0.0, NOTHING))
    assert [order.had for order in orders.values()] == [0, 0]
    fleet.succeeded(1, orders[1].attempt)
    assert fleet.refused(0, orders[0].attempt, "a file is damaged", 1.0)
    record = record_of(fleet)
    assert (record.state, record.version, record.reason) == (ServerState.SERVING, 0, "a file is damaged")
    assert fleet.served_version == 0
    assert not fleet.refused(0, orders[0].attempt, "late", 1.0)
    assert not fleet.unhealthy(0, "http://0", "late", 1.0, gone=False)
    assert fleet.poll(2.0, NOTHING) == []  # it is not read again
    fleet.targets.publish(target(2))
    assert updates(fleet.poll(3.0, NOTHING)).keys() == {0, 1}


def test_a_quarantined_server_that_refuses_a_damaged_version_serves_nothing() -> None:
    """Nobody knows what it has."""
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    fleet.failed(0, updates(fleet.poll(0.0, NOTHING))[0].attempt, "no", 0.0)
    again = updates(fleet.poll(BACKOFF.last_s, NOTHING))[0]
    assert again.had is None
    assert not fleet.refused(0, again.attempt, "a file is damaged", BACKOFF.last_s)
    assert record_of(fleet).state is ServerState.QUARANTINED
    assert fleet.served_version is None


def staged_fleet() -> FleetDecisions:
    """Servers 0 and 1 on two hosts that share no folder."""
    fleet = FleetDecisions("interrupt", LIMIT_S, targets=ServerTargets(staged=True))
    for index in range(2):
        fleet.register(index, f"https://10.0.0.{index}:5000", 0, 0.0)
    return fleet


def at(version: int, host: int) -> Target:
    return Target(version, f"/weights/v{version}", f"/disk{host}/v{version}")


def test_where_hosts_share_no_folder_a_server_is_brought_to_what_is_on_its_host() -> None:
    fleet = staged_fleet()
    fleet.targets.publish(target(1))
    assert fleet.poll(0.0, NOTHING) == []
    assert fleet.served_version == 0  # both serve while their hosts fetch
    fleet.targets.arrived("10.0.0.1", at(1, 1))
    orders = updates(fleet.poll(1.0, NOTHING))
    assert orders.keys() == {1}
    assert (orders[1].target.read_at, orders[1].target.path) == ("/disk1/v1", "/weights/v1")
    assert fleet.read_on("10.0.0.1") == {1}
    assert fleet.read_on("10.0.0.0") == set()
    fleet.succeeded(1, orders[1].attempt)
    assert fleet.served_version == 0
    fleet.targets.publish(target(3))
    fleet.targets.arrived("10.0.0.0", at(2, 0))  # it was under way when v3 was published
    assert {index: order.target.version for index, order in updates(fleet.poll(2.0, NOTHING)).items()} == {0: 2}
    assert fleet.read_on() == {1, 2}


def test_a_quarantined_server_waits_for_weights_on_its_host_without_a_deadline() -> None:
    fleet = staged_fleet()
    fleet.targets.publish(target(1))
    fleet.unhealthy(0, "https://10.0.0.0:5000", "gone", 0.0, gone=True)
    assert fleet.poll(BACKOFF.last_s, NOTHING) == []
    assert fleet.next_due() is None
    fleet.targets.arrived("10.0.0.0", at(1, 0))
    assert fleet.next_due() is not None
    assert updates(fleet.poll(BACKOFF.last_s, NOTHING)).keys() == {0}


def test_a_host_that_lost_its_copies_has_its_servers_go_on_with_what_they_have() -> None:
    fleet = staged_fleet()
    fleet.targets.publish(target(2))
    fleet.targets.arrived("10.0.0.0", at(1, 0))
    fleet.targets.lost("10.0.0.0")
    assert fleet.poll(0.0, NOTHING) == []
    assert fleet.served_version == 0


def test_a_failed_update_quarantines_with_growing_back_off() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(1))
    now, waits = 0.0, []
    for other in updates(fleet.poll(now, NOTHING)).values():
        if other.server == 1:
            fleet.succeeded(1, other.attempt)
    for _ in range(9):
        record = record_of(fleet)
        assert record.version is None
        fleet.failed(0, record.attempt, "no", now)
        assert record.state is ServerState.QUARANTINED
        assert record.reason == "no"
        assert fleet.served_version == 1
        due = fleet.next_due()
        assert due is not None
        assert fleet.poll(due - 0.01, NOTHING) == []
        waits.append(due - now)
        now = due
        assert updates(fleet.poll(now, NOTHING))[0].pause == "abort"
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0])


def test_servers_of_which_none_ever_agrees_are_told_from_one_that_disagrees_alone() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(1))

    def updated(now: float, *disagreeing: int, why: str = "differs") -> float:
        for order in updates(fleet.poll(now, NOTHING)).values():
            if order.server in disagreeing:
                fleet.failed(order.server, order.attempt, f"{order.server} {why}", now, disagrees=why == "differs")
            else:
                fleet.succeeded(order.server, order.attempt)
        return fleet.next_due() or now

    now = updated(0.0, 0, 1)
    now = updated(now, 0, 1, why="hangs")
    for _ in range(3):
        assert not fleet.never_agree()
        now = updated(now, 0, 1)
    assert not fleet.never_agree(), "one of the failures was another"
    now = updated(now, 0)
    assert not fleet.never_agree(), "server 1 agrees"
    fleet.targets.publish(target(2))
    for _ in range(5):
        assert not fleet.never_agree()
        now = max(record.due for record in fleet.servers)
        updated(now, 0, 1)
    assert fleet.never_agree().startswith("0 differs. So it was after ")
    assert not FleetDecisions("interrupt", LIMIT_S).never_agree()


def test_servers_that_fail_for_other_reasons_are_not_said_to_disagree() -> None:
    fleet, now = fleet_of(), 0.0
    fleet.targets.publish(target(1))
    for _ in range(6):
        fleet.failed(0, updates(fleet.poll(now, NOTHING))[0].attempt, "no", now)
        now = record_of(fleet).due
        attempt = updates(fleet.poll(now, NOTHING))[0].attempt
        fleet.succeeded(0, attempt)
        assert fleet.contradicted(0, attempt, "unreadable", now)
        assert record_of(fleet).disagreements == 0
        now = record_of(fleet).due


def test_a_quarantined_server_is_retried_with_the_newest_version() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    fleet.failed(0, updates(fleet.poll(0.0, NOTHING))[0].attempt, "no", 0.0)
    fleet.targets.publish(target(2))
    order = updates(fleet.poll(BACKOFF.first_s, NOTHING))[0]
    assert order.target.version == 2
    fleet.succeeded(0, order.attempt)
    assert fleet.served_version == 2
    assert record_of(fleet).failures == 0


def test_a_server_that_failed_gets_no_requests_though_it_had_the_version_before() -> None:
    """Weights may be replaced although the reply was 400: only a whole update makes them known again."""
    fleet = fleet_of(version=1)
    fleet.targets.publish(target(2))
    fleet.failed(0, updates(fleet.poll(0.0, NOTHING))[0].attempt, "400", 0.0)
    assert fleet.healthy(0, "http://0") is False
    assert fleet.served_version is None


def test_a_hanging_update_is_given_up_and_its_late_outcome_ignored() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    order = updates(fleet.poll(0.0, NOTHING))[0]
    assert fleet.next_due() == LIMIT_S
    reason = "no sign of life for 10 s (manager.update_timeout_s) in its update to v1, which began 10 s ago"
    assert fleet.poll(LIMIT_S, NOTHING) == [CancelUpdate(0, order.attempt, reason)]
    assert record_of(fleet).reason == reason
    assert fleet.succeeded(0, order.attempt) is False
    assert fleet.served_version is None
    again = updates(fleet.poll(LIMIT_S + BACKOFF.first_s, NOTHING))[0]
    assert fleet.failed(0, order.attempt, "late", 20.0) is False
    assert fleet.succeeded(0, again.attempt)


def test_an_update_may_take_long_while_the_server_works_and_fails_once_it_is_silent() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(1))
    fleet.poll(0.0, NOTHING)
    cancelled = []
    for now in range(1, 47):
        if now % 9 == 0 and now < 40:
            fleet.worked(0, float(now))
        orders = fleet.poll(float(now), NOTHING)
        cancelled += [(order.server, now) for order in orders if isinstance(order, CancelUpdate)]
    assert cancelled[0] == (1, LIMIT_S)
    assert [now for server, now in cancelled if server == 0] == [36 + LIMIT_S]
    assert record_of(fleet, 0).reason.endswith("in its update to v1, which began 46 s ago")


def test_an_update_that_never_ends_fails_however_much_the_server_works() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    fleet.poll(0.0, NOTHING)
    for now in range(int(LONGEST_UPDATES * LIMIT_S)):
        fleet.worked(0, float(now))
        assert not fleet.poll(float(now), NOTHING)
    (cancelled,) = fleet.poll(LONGEST_UPDATES * LIMIT_S, NOTHING)
    assert isinstance(cancelled, CancelUpdate)
    assert cancelled.reason == "its update to v1 took 150 s (15 times manager.update_timeout_s)"


def test_signs_of_life_of_a_server_that_is_not_updated_change_nothing() -> None:
    fleet = fleet_of()
    fleet.worked(0, 5.0)
    fleet.worked(7, 5.0)
    assert fleet.next_due() is None
    fleet.targets.publish(target(1))
    order = updates(fleet.poll(0.0, NOTHING))[0]
    fleet.failed(0, order.attempt, "400", 0.0)
    due = record_of(fleet).due
    fleet.worked(0, 5.0)
    assert record_of(fleet).due == due


def test_a_restarted_server_begins_at_the_version_of_its_registration() -> None:
    fleet = fleet_of(2)
    fleet.targets.publish(target(3))
    for order in updates(fleet.poll(0.0, NOTHING)).values():
        fleet.succeeded(order.server, order.attempt)
    assert fleet.register(0, "http://new", 0, 5.0)
    assert record_of(fleet).reason == "new at version 0"
    assert fleet.served_version == 3
    order = updates(fleet.poll(5.0, NOTHING))[0]
    assert (order.url, order.target.version) == ("http://new", 3)


def test_a_restart_during_an_update_gives_the_update_up() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    old = updates(fleet.poll(0.0, NOTHING))[0]
    fleet.register(0, "http://new", 0, 1.0)
    orders = fleet.poll(1.0, NOTHING)
    assert CancelUpdate(0, old.attempt, "the server is gone") in orders
    assert fleet.poll(1.0, NOTHING) == [], "it is told once"
    assert fleet.succeeded(0, old.attempt) is False
    assert fleet.succeeded(0, updates(orders)[0].attempt)


def test_the_same_registration_is_no_news() -> None:
    fleet = fleet_of()
    assert fleet.register(0, "http://0", 0, 1.0) is False


def test_a_server_whose_registration_is_gone_is_forgotten() -> None:
    fleet = fleet_of(2)
    assert fleet.deregister(0)
    assert not fleet.deregister(0)
    assert [record.index for record in fleet.servers] == [1]


def test_one_late_answer_to_a_health_check_is_forgiven_two_in_a_row_are_not() -> None:
    fleet = fleet_of(2)
    assert not fleet.unhealthy(0, "http://0", "late", 0.0, gone=False)
    fleet.healthy(0, "http://0")
    assert not fleet.unhealthy(0, "http://0", "late", 1.0, gone=False)
    assert fleet.unhealthy(0, "http://0", "late", 2.0, gone=False)
    assert record_of(fleet).state is ServerState.QUARANTINED


def test_a_server_that_refuses_connections_leaves_at_once_and_comes_back_healthy() -> None:
    fleet = fleet_of()
    assert fleet.unhealthy(0, "http://0", "refused", 0.0, gone=True)
    assert fleet.served_version is None
    (check,) = fleet.poll(BACKOFF.first_s, NOTHING)
    assert isinstance(check, CheckHealth)
    assert fleet.poll(BACKOFF.first_s, NOTHING) == []
    assert not fleet.unhealthy(0, "http://0", "refused", 1.0, gone=True), "it has left already"
    assert not fleet.unhealthy(0, "http://0", "refused", 1.0, gone=True)
    (check,) = fleet.poll(1.0 + 2 * BACKOFF.first_s, NOTHING)
    assert fleet.healthy(0, "http://0")
    assert fleet.served_version == 0
    assert fleet.unhealthy(0, "http://0", "refused", 5.0, gone=True)
    assert fleet.next_due() == 5.0 + BACKOFF.first_s, "it was well between"


def test_a_server_that_is_checked_as_a_version_is_published_waits_for_the_version() -> None:
    fleet = fleet_of()
    fleet.unhealthy(0, "http://0", "refused", 0.0, gone=True)
    assert [type(order) for order in fleet.poll(BACKOFF.first_s, NOTHING)] == [CheckHealth]
    assert fleet.next_due() is None, "the check has a limit of its own"
    fleet.targets.publish(target(1))
    assert not fleet.healthy(0, "http://0")
    assert fleet.served_version is None
    assert updates(fleet.poll(BACKOFF.first_s, NOTHING))[0].target == target(1)


def test_an_unhealthy_server_comes_back_through_a_whole_update_where_weights_are_published() -> None:
    fleet = fleet_of()
    fleet.targets.publish(target(1))
    fleet.succeeded(0, updates(fleet.poll(0.0, NOTHING))[0].attempt)
    fleet.unhealthy(0, "http://0", "refused", 1.0, gone=True)
    order = updates(fleet.poll(1.0 + BACKOFF.first_s, NOTHING))[0]
    assert order.pause == "abort"
    fleet.succeeded(0, order.attempt)
    assert fleet.served_version == 1


def test_health_reports_about_a_former_life_are_ignored() -> None:
    fleet = fleet_of()
    fleet.register(0, "http://new", 0, 1.0)
    assert not fleet.unhealthy(0, "http://0", "refused", 1.0, gone=True)
    assert fleet.served_version == 0
    fleet.unhealthy(0, "http://new", "refused", 1.0, gone=True)
    fleet.poll(1.0 + BACKOFF.first_s, NOTHING)
    assert not fleet.healthy(0, "http://0")
    assert not fleet.healthy(1, "http://1")
    assert not fleet.unhealthy(1, "http://1", "refused", 1.0, gone=True)
    assert fleet.served_version is None


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_what_is_kept_is_not_waited_for(mode: UpdateMode) -> None:
    fleet = fleet_of(2, mode=mode)
    fleet.targets.publish(target(1))
    orders = list(updates(fleet.poll(0.0, {0: 5, 1: 5})).values())
    assert [order.pause for order in orders] == [mode, mode]
    assert all(order.keeps_requests for order in orders)
    assert [order.keeps_cache for order in orders] == [mode == "in_place"] * 2
    assert not any(order.frozen or order.slept for order in orders)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_nothing_is_kept_of_a_server_whose_weights_are_unknown(mode: UpdateMode) -> None:
    fleet = fleet_of(mode=mode)
    fleet.targets.publish(target(1))
    fleet.failed(0, updates(fleet.poll(0.0, {0: 5}))[0].attempt, "no", 0.0)
    again = updates(fleet.poll(BACKOFF.first_s, {0: 5}))[0]
    assert (again.pause, again.frozen) == ("abort", mode == "in_place")


def test_a_late_contradiction_quarantines_unless_the_weights_were_replaced_since() -> None:
    fleet = fleet_of(mode="retract")
    fleet.targets.publish(target(1))
    first = updates(fleet.poll(0.0, NOTHING))[0]
    assert not fleet.contradicted(0, first.attempt, "differs", 0.0)  # not there yet
    fleet.succeeded(0, first.attempt)
    fleet.targets.publish(target(2))
    second = updates(fleet.poll(1.0, NOTHING))[0]
    assert not fleet.contradicted(0, first.attempt, "differs", 1.0)
    fleet.succeeded(0, second.attempt)
    assert not fleet.contradicted(0, first.attempt, "differs", 2.0)
    assert fleet.served_version == 2
    assert fleet.contradicted(0, second.attempt, "differs", 2.0)
    assert (record_of(fleet).state, record_of(fleet).version, record_of(fleet).reason) == (
        ServerState.QUARANTINED,
        None,
        "differs",
    )


def test_contradictions_in_a_row_are_disagreements_also_of_a_server_that_is_drained() -> None:
    fleet = fleet_of(mode="finish")
    fleet.targets.publish(target(1))
    attempt = updates(fleet.poll(0.0, NOTHING))[0].attempt
    fleet.succeeded(0, attempt)
    fleet.targets.publish(target(2))
    assert fleet.poll(1.0, {0: 1}) == []
    assert record_of(fleet).state is ServerState.DRAINING
    assert fleet.contradicted(0, attempt, "differs", 1.0, disagrees=True)
    for _ in range(4):
        assert not fleet.never_agree()
        now = record_of(fleet).due
        fleet.failed(0, updates(fleet.poll(now, NOTHING))[0].attempt, "differs", now, disagrees=True)
    assert fleet.never_agree() == "differs. So it was after 5 updates in a row, and no server agrees"


def test_finish_lets_running_requests_end_first() -> None:
    fleet = fleet_of(mode="finish")
    fleet.targets.publish(target(1))
    assert fleet.poll(0.0, {0: 3}) == []
    assert record_of(fleet).state is ServerState.DRAINING
    assert fleet.poll(500.0, {0: 1}) == []
    order = updates(fleet.poll(501.0, {0: 0}))[0]
    assert order.pause == "abort"  # nothing runs; what arrives in spite of that must not
    fleet.succeeded(0, order.attempt)
    assert fleet.served_version == 1


def test_finish_keeps_one_server_serving_until_another_is_back() -> None:
    fleet = fleet_of(2, mode="finish")
    fleet.targets.publish(target(1))
    assert fleet.poll(0.0, {0: 1, 1: 1}) == []
    assert [record.state for record in fleet.servers] == [ServerState.DRAINING, ServerState.SERVING]
    order = updates(fleet.poll(1.0, {1: 1}))[0]
    assert record_of(fleet, 1).state is ServerState.SERVING
    fleet.succeeded(0, order.attempt)
    assert fleet.poll(2.0, {1: 1}) == []
    assert record_of(fleet, 1).state is ServerState.DRAINING


def test_finish_does_not_wait_for_a_quarantined_server() -> None:
    fleet = fleet_of(2, mode="finish")
    fleet.targets.publish(target(1))
    order = updates(fleet.poll(0.0, {1: 1}))[0]
    fleet.failed(0, order.attempt, "no", 1.0)
    fleet.poll(1.0, {1: 1})
    assert record_of(fleet, 1).state is ServerState.DRAINING


@pytest.mark.parametrize("mode", ["interrupt", "retract", "in_place", "finish"])
def test_a_rolling_update_takes_a_fraction_at_a_time(mode: UpdateMode) -> None:
    fleet = FleetDecisions(mode, LIMIT_S, 0.25)
    for index in range(10):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.targets.publish(target(1))
    updated: list[int] = []
    for _ in range(5):
        orders = updates(fleet.poll(0.0, NOTHING))
        assert fleet.poll(0.0, NOTHING) == []
        assert len([record for record in fleet.servers if record.state is ServerState.SERVING]) >= 8
        assert fleet.served_version == 0 or len(updated) >= 8
        updated += orders
        for index, order in orders.items():
            assert len(orders) == 2
            fleet.succeeded(index, order.attempt)
    assert updated == list(range(10))
    assert fleet.served_version == 1


def test_servers_that_fail_do_not_hold_up_a_rolling_update() -> None:
    fleet = FleetDecisions("interrupt", LIMIT_S, 0.1)
    for index in range(10):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.targets.publish(target(1))
    now = 0.0
    for _ in range(10):
        for index, order in updates(fleet.poll(now, NOTHING)).items():
            if index < 3:
                fleet.failed(index, order.attempt, "no", now)
            else:
                fleet.succeeded(index, order.attempt)
    assert [record.version for record in fleet.servers if record.index >= 3] == [1] * 7


def test_the_least_fraction_updates_one_server_at_a_time() -> None:
    fleet = FleetDecisions("interrupt", LIMIT_S, 0.0)
    for index in range(3):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.targets.publish(target(1))
    assert list(updates(fleet.poll(0.0, NOTHING))) == [0]


class AnyFaults(RuleBasedStateMachine):
    """Servers fail, hang, restart and vanish in any order while versions are published."""

    @initialize(
        mode=st.sampled_from(["interrupt", "retract", "in_place", "finish"]), fraction=st.sampled_from([0.0, 0.5, 1.0])
    )
    def begin(self, mode: UpdateMode, fraction: float) -> None:
        self.fleet = FleetDecisions(mode, LIMIT_S, fraction)
        self.now = 0.0
        self.version = 0
        self.starts = 0
        self.orders: list[BeginUpdate] = []
        self.checks: list[CheckHealth] = []
        self.weights: dict[str, int | None] = {}

    @rule(index=st.integers(0, 2))
    def register(self, index: int) -> None:
        self.starts += 1
        url = f"http://{index}/{self.starts}"
        self.fleet.register(index, url, 0, self.now)
        self.weights[url] = 0

    @rule(index=st.integers(0, 2))
    def vanish(self, index: int) -> None:
        self.fleet.deregister(index)

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.fleet.targets.publish(target(self.version))

    @rule(wait=st.floats(0.0, 12.0), busy=st.sets(st.integers(0, 2)))
    def poll(self, wait: float, busy: set[int]) -> None:
        self.now += wait
        for order in self.fleet.poll(self.now, dict.fromkeys(busy, 1)):
            if isinstance(order, BeginUpdate):
                self.orders.append(order)
                self.weights[order.url] = None
            elif isinstance(order, CheckHealth):
                self.checks.append(order)

    @rule(pick=st.integers(0, 100), success=st.booleans())
    def outcome(self, pick: int, success: bool) -> None:
        """End any update that was ever ordered, so also late and repeatedly."""
        if not self.orders:
            return
        order = self.orders[pick % len(self.orders)]
        if not success:
            self.fleet.failed(order.server, order.attempt, "no", self.now)
        elif self.fleet.succeeded(order.server, order.attempt):
            self.weights[order.url] = order.target.version

    @rule(pick=st.integers(0, 100))
    def contradict(self, pick: int) -> None:
        """A late look at any update ever ordered."""
        if self.orders:
            order = self.orders[pick % len(self.orders)]
            self.fleet.contradicted(order.server, order.attempt, "differs", self.now)

    @rule(index=st.integers(0, 2), well=st.booleans(), gone=st.booleans())
    def health(self, index: int, well: bool, gone: bool) -> None:
        record = next((record for record in self.fleet.servers if record.index == index), None)
        if record is not None and well:
            self.fleet.healthy(index, record.url)
        elif record is not None:
            self.fleet.unhealthy(index, record.url, "late", self.now, gone=gone)

    @invariant()
    def served_weights_are_known(self) -> None:
        for record in self.fleet.servers:
            if record.state in (ServerState.SERVING, ServerState.DRAINING):
                assert record.version == self.weights[record.url]

    @invariant()
    def nothing_happens_by_itself_before_what_is_due_next(self) -> None:
        settled = copy.deepcopy(self.fleet)
        while settled.poll(self.now, NOTHING):
            pass
        states = [record.state for record in settled.servers]
        due = settled.next_due()
        assert due is None or due > self.now
        assert settled.poll(self.now + 1e6 if due is None else (self.now + due) / 2, NOTHING) == []
        assert [record.state for record in settled.servers] == states
        assert due is None or settled.poll(due, NOTHING)

    @invariant()
    def something_is_due_for_every_server_that_is_behind(self) -> None:
        for record in self.fleet.servers:
            if record.state in (ServerState.UPDATING, ServerState.QUARANTINED) and not record.checking:
                assert record.due - self.now <= max(LIMIT_S, BACKOFF.last_s)

    def teardown(self) -> None:
        """Once all updates succeed, every server serves the newest version."""
        for _ in range(20):
            self.now += BACKOFF.last_s
            for order in self.fleet.poll(self.now, NOTHING):
                if isinstance(order, BeginUpdate):
                    self.fleet.succeeded(order.server, order.attempt)
            for record in self.fleet.servers:
                self.fleet.healthy(record.index, record.url)
        assert all(record.state is ServerState.SERVING for record in self.fleet.servers)
        assert all(record.version == self.version for record in self.fleet.servers)


AnyFaults.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_every_server_gets_to_the_newest_version_after_any_faults = AnyFaults.TestCase

"""What becomes of online sessions, without processes: a program comes, plays, falls silent, reports late or twice."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.rollout.online.sessions import LOST, End, OnlineSession, Sessions


def opened(sessions: Sessions, rollout_id: str = "r", now: float = 0.0, name: str = "s") -> OnlineSession:
    """A session of a client that has asked, and of a rollout that was admitted for it."""
    client = int(now) + len(sessions) + 100
    sessions.ask(client, now)
    sessions.admit(rollout_id)
    assert sessions.client_of(rollout_id) == client
    return sessions.open(name, rollout_id, "key", now)


def test_an_admitted_rollout_is_for_the_client_that_has_waited_longest() -> None:
    sessions = Sessions(wait_s=10.0)
    for client, now in ((1, 0.0), (2, 1.0), (3, 2.0)):
        sessions.ask(client, now)
    assert (sessions.waiting, sessions.patience_s(4.0)) == (3, 6.0)
    assert sessions.leave(1) == []
    assert (sessions.waiting, sessions.patience_s(20.0)) == (2, 0.0)
    for rollout_id in ("a", "b", "c"):
        sessions.admit(rollout_id)
    assert [sessions.client_of(rollout_id) for rollout_id in "abc"] == [2, 3, None]
    assert sessions.waiting == 0


def test_the_sessions_of_a_client_that_leaves_end() -> None:
    sessions = Sessions()
    sessions.ask(1, 0.0)
    sessions.admit("a")
    mine, other = sessions.open("s", "a", "key", 0.0), opened(sessions, "b", name="t")
    assert sessions.leave(1) == [mine]
    assert (mine.end, other.end, sessions.client_of("a")) == (End.client_left, None, None)


def test_a_reward_counts_once_and_a_repeated_one_is_no_other() -> None:
    sessions = Sessions()
    session = opened(sessions)
    assert sessions.reward(session, 1.0, {"tests": 3.0})
    assert (session.end, session.reward, session.metrics) == (End.rewarded, 1.0, {"tests": 3.0})
    assert sessions.reward(session, 1.0, {"tests": 3.0}), "the reply was lost"
    assert not sessions.reward(session, 0.0, {"tests": 3.0})
    assert not sessions.reward(session, 1.0, {})
    assert session.reward == 1.0
    assert sessions.get("s") is session
    assert len(sessions) == 0


@pytest.mark.parametrize("end", [end for end in End if end is not End.rewarded])
def test_no_reward_counts_after_another_end(end: End) -> None:
    sessions = Sessions()
    session = opened(sessions)
    sessions.end(session, end)
    assert not sessions.reward(session, 1.0, {})
    sessions.end(session, End.rejected)
    assert session.end is end
    assert (end in LOST) is (end in (End.silent, End.over_age, End.client_left))


def test_each_call_renews_the_lease_and_none_runs_out_during_a_call() -> None:
    sessions = Sessions(lease_s=10.0)
    session, silent = opened(sessions, "a", name="s"), opened(sessions, "b", name="t")
    sessions.begin_call(session)
    sessions.begin_call(session)
    sessions.end_call(session, 7.0)
    assert sessions.end_silent(10.0) == []
    assert sessions.end_silent(10.5) == [silent]
    assert sessions.end_silent(100.0) == [], "a call still runs"
    sessions.end_call(session, 100.0)
    assert sessions.end_silent(110.0) == []
    assert sessions.end_silent(110.5) == [session]
    assert session.end is silent.end is End.silent


def test_a_rollout_may_keep_a_step_waiting_for_so_long_and_no_longer() -> None:
    sessions = Sessions(hold_s=10.0)
    session, other = opened(sessions, "a", name="s"), opened(sessions, "b", name="t")
    assert sessions.end_over_age(["a"], 0.0) == []
    assert sessions.end_over_age(["a", "unknown"], 9.0) == []
    assert sessions.end_over_age([], 9.5) == [], "the step went on"
    assert sessions.end_over_age(["a"], 12.0) == []
    assert sessions.end_over_age(["a", "b"], 22.0) == [session]
    assert (session.end, other.end) == (End.over_age, None)


def test_sessions_of_a_rollout_that_is_over_end_with_it() -> None:
    sessions = Sessions()
    session = opened(sessions)
    assert sessions.close("r") == [session]
    assert session.end is End.closed
    assert sessions.client_of("r") is None


def test_what_ended_is_remembered_for_a_while() -> None:
    sessions = Sessions(remembered=8)
    for number in range(100):
        sessions.end(opened(sessions, f"r{number}", name=f"s{number}"), End.rejected)
    assert sessions.get("s99") is not None
    assert sessions.get("s0") is None


@pytest.mark.parametrize("given", [{"lease_s": 0}, {"hold_s": -1.0}, {"wait_s": float("inf")}, {"lease_s": "5"}])
def test_times_are_positive(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Sessions(**given)

"""The staleness gate, example by example; `test_staleness_gate_properties.py` has the interleavings."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.comm.ended_rollouts import RecentIds
from asyncrl.manager.rollouts.staleness_gate import (
    ABANDONED,
    GONE,
    LOST_AND_OVER,
    TRAINED,
    WORKER_LOST,
    LiveRollout,
    StalenessGate,
)
from tests.examples import examples


def start(gate: StalenessGate, *names: str, owner: str = "w0") -> list[int | None]:
    return [gate.start(LiveRollout(name, owner, prompt_id=f"p-{name}")) for name in names]


def test_the_worked_example_of_the_docstring() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=1)
    assert start(gate, "1", "2", "3", "4", "5") == [0, 0, 0, 0, None]
    gate.finish("1")
    gate.finish("3")
    gate.train(1, ["1", "3"])
    assert start(gate, "5") == [None]
    gate.advance(1)
    assert start(gate, "5", "6", "7") == [1, 1, None]


def test_eta_zero_admits_exactly_one_batch_per_version() -> None:
    gate = StalenessGate(batch_size=3, max_staleness=0)
    assert start(gate, "a", "b", "c", "d") == [0, 0, 0, None]
    gate.train(1, ["a", "b", "c"])
    assert start(gate, "d") == [None]
    gate.advance(1)
    assert start(gate, "d", "e", "f", "g") == [1, 1, 1, None]


def test_a_repeated_start_is_answered_as_before() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0)
    assert start(gate, "a") == [0]
    gate.advance(1)
    assert start(gate, "a") == [0]
    assert gate.counts().submitted == 1


def test_an_id_that_left_the_count_cannot_start_again() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0)
    start(gate, "a")
    gate.drop("a", "rejected")
    with pytest.raises(ValueError, match="already rejected; give each attempt an id of its own"):
        start(gate, "a")


def test_a_drop_makes_room_and_returns_the_ticket_once() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0)
    start(gate, "a")
    ticket = gate.drop("a", "rejected")
    assert ticket is not None
    assert ticket.prompt_id == "p-a"
    assert gate.drop("a", "rejected") is None
    assert gate.counts().dropped == {"rejected": 1}
    assert start(gate, "b") == [0]


def test_a_train_report_may_overtake_the_finish() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=1)
    start(gate, "a")
    gate.train(1, ["a"])
    assert gate.finish("a") is None
    counts = gate.counts()
    assert (counts.trained, counts.running, counts.finished_untrained) == (1, 0, 0)


def leave(gate: StalenessGate, outcome: str) -> None:
    """Take the one live rollout, "a", out of the count."""
    if outcome == TRAINED:
        gate.train(1, ["a"])
    elif outcome == ABANDONED:
        gate.abandon()
    else:
        assert (dropped := gate.drop("a", outcome)) is not None
        assert (dropped.rollout_id, dropped.owner, dropped.prompt_id) == ("a", "w0", "p-a")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("outcome", ["stale", TRAINED, *GONE])
def test_what_left_the_count_does_not_come_back_whatever_is_said_of_it(outcome: str, finished: bool) -> None:
    gate = StalenessGate(batch_size=1, max_staleness=1)
    start(gate, "a")
    if finished:
        gate.finish("a")
    leave(gate, outcome)
    gate.train(1, [])
    before = gate.counts()
    assert (before.submitted, before.running, before.finished_untrained, before.balanced) == (1, 0, 0, True)
    for _ in range(2):
        assert gate.finish("a") is None
        assert gate.drop("a", "failed") is None
        gate.train(1, ["a"])
        assert gate.abandon() == []
    assert (gate.counts(), gate.outcome("a")) == (before, outcome)
    assert "a" not in gate.live
    assert gate.admitted_at("a") is None


def test_the_place_of_a_lost_rollout_is_given_once() -> None:
    """Its worker may deliver it after all: no third place comes of it, and none is missing."""
    gate = StalenessGate(batch_size=1, max_staleness=0)
    start(gate, "a")
    gate.drop("a", WORKER_LOST)
    assert start(gate, "b", "c") == [0, None]
    gate.finish("a")
    gate.train(0, ["a"])
    assert start(gate, "c") == [None]
    gate.drop("b", "failed")
    assert start(gate, "c", "d") == [0, None]


def test_a_drop_of_what_was_trained_changes_nothing() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0)
    start(gate, "a")
    gate.train(1, ["a"])
    assert gate.drop("a", "stale") is None
    gate.train(1, ["a"])
    assert (gate.counts().trained, gate.outcome("a")) == (1, TRAINED)


def test_a_rollout_has_ended_once_it_finished_or_left_unless_it_was_given_up() -> None:
    """The worker of what was given up may play it on, and still gets servers for it."""
    gate = StalenessGate(batch_size=4, max_staleness=1)
    start(gate, *"abcdefg")
    assert not any(map(gate.has_ended, [*"abcdefg", "unknown"]))
    gate.finish("a")
    gate.drop("b", "rejected")
    gate.drop("c", "stale")
    gate.drop("d", WORKER_LOST)
    gate.train(1, ["e"])
    assert [gate.has_ended(name) for name in "abcdefg"] == [True, True, True, False, True, False, False]
    gate.abandon()
    assert not any(map(gate.has_ended, "fg"))


def test_a_lost_rollout_is_over_once_its_worker_reports_its_end() -> None:
    """Late calls of it are void from then on; its worker knows."""
    gate = StalenessGate(batch_size=4, max_staleness=0)
    start(gate, *"abc")
    gate.drop("a", WORKER_LOST)
    gate.train(1, ["b"])
    before = gate.counts()
    for name in ("a", "b", "c", "unknown"):
        gate.over(name)
    assert [gate.outcome(name) for name in ("a", "b", "c", "unknown")] == [LOST_AND_OVER, TRAINED, None, LOST_AND_OVER]
    assert [gate.has_ended(name) for name in ("a", "b", "c", "unknown")] == [True, True, False, True]
    assert gate.counts() == before
    gate.drop("c", "failed")
    gate.over("c")
    assert gate.outcome("c") == "failed"


def test_what_may_not_be_trained_does_not_count_when_its_worker_reports_it_later() -> None:
    gate = StalenessGate(batch_size=4, max_staleness=0)
    start(gate, "a")
    gate.drop("a", "stale")
    before = gate.counts()
    for name in ("a", "unknown"):
        gate.refuse(name)
    assert [gate.outcome(name) for name in ("a", "unknown")] == ["stale", WORKER_LOST]
    assert not gate.has_ended("unknown"), "its worker may play on, until it reports the end"
    assert gate.counts() == before


def test_a_repeated_train_report_counts_once() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=1)
    start(gate, "a")
    gate.train(1, ["a"])
    gate.train(1, ["a"])
    assert gate.counts().trained == 1


def test_what_was_never_admitted_is_not_counted_whatever_is_said_of_it() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    before = gate.counts()
    assert gate.finish("x") is None
    assert gate.drop("x", "stale") is None
    gate.train(0, ["x", "y"])
    assert (gate.counts(), gate.outcome("x"), gate.capacity) == (before, None, 2)


def test_a_resumed_run_starts_at_its_version() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    gate.resume(5, {})
    assert start(gate, "a") == [None]
    gate.advance(5)
    assert start(gate, "a", "b", "c") == [5, 5, None]
    assert gate.counts().balanced


def test_what_was_dropped_up_to_the_checkpoint_stays_in_the_counts_and_takes_no_room() -> None:
    gate = StalenessGate(2, 1)
    gate.resume(3, {"failed": 2, "zero_variance": 1})
    gate.advance(3)
    counts = gate.counts()
    assert (counts.submitted, counts.trained, counts.dropped) == (9, 6, {"failed": 2, "zero_variance": 1})
    assert counts.balanced
    assert gate.capacity == 4


def test_resuming_after_the_first_start_is_refused() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    start(gate, "a")
    with pytest.raises(ValueError, match="1 rollouts are already submitted"):
        gate.resume(5, {})


def test_the_version_never_goes_back() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    assert gate.advance(3)
    assert not gate.advance(2)
    assert not gate.advance(3), "nothing changed"
    assert gate.version == 3
    gate.train(2, [])
    gate.train(1, [])
    assert gate.trained_version == 2


def test_abandon_closes_and_accounts_for_everything() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=1)
    start(gate, "a", "b", "c")
    gate.finish("b")
    assert gate.abandon() == ["a", "b", "c"]
    counts = gate.counts()
    assert (counts.abandoned, counts.running, counts.finished_untrained) == (3, 0, 0)
    assert counts.balanced
    assert start(gate, "d") == [None]


def test_wait_holds_a_step_before_two_rollouts_fall_due_at_once() -> None:
    """The counterexample of the docstring: waiting only for what is due now would be one step too late."""
    gate = StalenessGate(batch_size=1, max_staleness=2)
    start(gate, "1", "2", "3")
    gate.finish("1")
    assert gate.blocking(0) == []
    gate.train(1, ["1"])
    gate.advance(1)
    start(gate, "4")
    gate.finish("4")
    assert gate.blocking(1) == ["2", "3"]
    gate.finish("3")
    assert gate.blocking(1) == []


def test_a_due_rollout_that_runs_blocks_its_step() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    start(gate, "a", "b")
    gate.finish("a")
    assert gate.blocking(0) == ["b"]
    gate.finish("b")
    assert gate.blocking(0) == []


def test_with_more_rollouts_than_the_limit_none_is_admitted() -> None:
    """Each was admitted by an earlier gate, of a run that resumes with smaller settings."""
    gate = StalenessGate(batch_size=1, max_staleness=0)
    for name in ("a", "b", "c"):
        gate.enter(LiveRollout(name, "w0"))
    assert (gate.capacity, gate.counted, gate.counts().submitted) == (0, 3, 3)
    assert start(gate, "d") == [None]


def test_what_an_earlier_gate_counted_is_known_and_not_counted_again() -> None:
    gate, outcomes = StalenessGate(batch_size=2, max_staleness=1), ["rejected", TRAINED, *GONE]
    ended: RecentIds[str] = RecentIds(10)
    for outcome in outcomes:
        ended.put(f"{outcome} before", outcome)
    gate.resume(1, {"rejected": 1, WORKER_LOST: 1}, ended)
    before = gate.counts()
    assert (before.submitted, before.trained, before.balanced) == (4, 2, True)
    assert [gate.outcome(f"{outcome} before") for outcome in outcomes] == outcomes
    for outcome in outcomes:
        assert gate.finish(f"{outcome} before") is None
        assert gate.drop(f"{outcome} before", "stale") is None
        assert gate.admitted_at(f"{outcome} before") is None
        gate.train(1, [f"{outcome} before"])
        with pytest.raises(ValueError, match=f"already {outcome}"):
            start(gate, f"{outcome} before")
    assert gate.counts() == before
    start(gate, "later")
    gate.drop("later", "failed")
    assert (gate.outcome("later"), gate.outcome("rejected before")) == ("failed", "rejected")


def test_running_of_names_the_running_rollouts_of_one_worker() -> None:
    gate = StalenessGate(batch_size=4, max_staleness=0)
    start(gate, "a", "b", owner="w0")
    start(gate, "c", owner="w1")
    gate.finish("a")
    assert [each.rollout_id for each in gate.live.running_of("w0")] == ["b"]
    assert gate.admitted_at("b") == 0
    assert gate.admitted_at("a") is None


def test_memory_is_bounded_and_forgotten_rollouts_change_nothing() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0, retired_kept=10)
    for version in range(1000):
        start(gate, str(version))
        gate.train(version + 1, [str(version)])
        gate.advance(version + 1)
    assert 10 <= len(gate._retired) < 12
    before = gate.counts()
    assert gate.finish("3") is None
    assert gate.drop("3", "stale") is None
    gate.train(1000, ["3"])
    assert gate.counts() == before


@settings(max_examples=examples(60), deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_what_it_tells_of_owners_and_blocking_is_what_a_look_at_every_rollout_finds(chance: Random) -> None:
    gate = StalenessGate(2, 2)
    for number in range(60):
        known = [row[0] for row in live_rows(gate)]
        turn = chance.random()
        if turn < 0.4:
            gate.start(LiveRollout(f"r{number}", chance.choice(["w0", "w1"]), f"p{chance.randrange(9)}", number))
        elif turn < 0.7 and known:
            gate.finish(chance.choice(known))
        elif turn < 0.8 and known:
            gate.drop(chance.choice(known), "rejected")
        elif turn < 0.9:
            gate.train(gate.trained_version + 1, [row[0] for row in live_rows(gate) if row[-1]][:2])
        else:
            gate.advance(gate.version + 1)
        live = live_rows(gate)
        for owner in ("w0", "w1", "w2"):
            running = [each.rollout_id for each in gate.live.running_of(owner)]
            assert running == [row[0] for row in live if row[1] == owner and not row[-1]]
        for step in range(gate.version, gate.version + 4):
            assert sorted(gate.blocking(step)) == sorted(blocking_by_hand(gate, step))
            assert gate.is_blocked(step) == bool(gate.blocking(step))


def live_rows(gate: StalenessGate) -> list[tuple[str, str, int, bool]]:
    """Rollout, owner, version of admission, and True if it is finished, of all live rollouts."""
    return [(key, live.owner, live.version, live.finished) for key, live in gate.live._by_id.items()]


def blocking_by_hand(gate: StalenessGate, step: int) -> list[str]:
    """By (H) of the module's docstring, for every version of admission."""
    live = live_rows(gate)
    blocked_to = -1
    for version in {row[2] for row in live}:
        older = [row for row in live if row[2] <= version]
        finished = sum(row[-1] for row in older)
        if len(older) - min(finished, gate.batch_size) > max(0, version + gate.max_staleness - step) * gate.batch_size:
            blocked_to = max(blocked_to, version)
    return [row[0] for row in live if not row[-1] and row[2] <= blocked_to]


def test_whether_a_step_is_blocked_looks_at_versions_and_not_at_rollouts() -> None:
    gate = StalenessGate(1_000, 3)
    for number in range(4_000):
        gate.start(LiveRollout(f"r{number}", f"w{number % 7}", f"p{number}", number))
    looked = []

    class Untouchable(dict[str, Any]):
        def values(self) -> Any:
            looked.append(1)
            return super().values()

    gate.live._by_id = Untouchable(gate.live._by_id)
    assert gate.is_blocked(1)
    assert not looked
    assert len(gate.blocking(1)) == 4_000
    assert looked


def test_a_gate_of_a_run_with_an_end_admits_no_more_than_it_trains() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=3, most=4)
    assert start(gate, "0", "1", "2", "3", "4") == [0, 0, 0, 0, None], "by staleness alone, 8 were allowed"
    gate.drop("0", "failed")
    assert start(gate, "5", "6") == [0, None], "in its place"

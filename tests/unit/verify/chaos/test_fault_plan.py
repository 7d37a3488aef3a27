"""The plan of a chaos run: same seed, same plan; all kinds in turn; all of it within the run; and its clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.verify.chaos.faults import FIRST_STEP, LAST_STEPS, SECONDS, Fault, FaultKind, PlanClock, make_plan

PROCESSES = {
    "generation_server": ["generation_server/0", "generation_server/1"],
    "rollout_worker": ["rollout_worker/0", "rollout_worker/1", "rollout_worker/2"],
    "gserver_manager": ["gserver_manager/0"],
    "launcher": ["launcher"],
}
TARGETS = {
    FaultKind.kill: PROCESSES,
    FaultKind.pause: PROCESSES,
    FaultKind.cut: {"gserver_manager": ["gserver_manager/0"]},
    FaultKind.full_disk: {"disk": ["disk"]},
}


def plan(seed: int = 7, steps: int = 100, every: int | None = None, **counts: int) -> tuple[Fault, ...]:
    return make_plan(
        TARGETS, {FaultKind[kind]: count for kind, count in counts.items()}, steps=steps, seed=seed, every=every
    )


def test_a_seed_is_a_plan() -> None:
    assert plan(kill=20, pause=3) == plan(kill=20, pause=3)
    assert plan(kill=20, pause=3) != plan(seed=8, kill=20, pause=3)


def test_every_kind_of_process_has_its_turn() -> None:
    kills = Counter(fault.target.partition("/")[0] for fault in plan(kill=20))
    assert kills == dict.fromkeys(PROCESSES, 5)
    few = Counter(fault.target.partition("/")[0] for fault in plan(kill=6))
    assert set(few) == set(PROCESSES)
    assert max(few.values()) == 2


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    steps=st.integers(FIRST_STEP + LAST_STEPS, 60),
    kills=st.integers(0, 40),
    pauses=st.integers(0, 5),
    disks=st.integers(0, 2),
)
def test_a_plan_has_what_was_asked_for_in_order_and_within_the_run(
    seed: int, steps: int, kills: int, pauses: int, disks: int
) -> None:
    faults = plan(seed, steps, kill=kills, pause=pauses, full_disk=disks)
    assert Counter(fault.kind for fault in faults) == Counter(
        {FaultKind.kill: kills, FaultKind.pause: pauses, FaultKind.full_disk: disks}
    )
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    for fault in faults:
        assert FIRST_STEP <= fault.step <= steps - LAST_STEPS
        assert 0 <= fault.offset <= 1
        least, most = SECONDS[fault.kind]
        assert least <= fault.seconds <= most


def test_steps_between_faults_can_be_given() -> None:
    assert [fault.step for fault in plan(kill=4, steps=20, every=5)] == [1, 6, 11, 16]


@pytest.mark.parametrize(("steps", "every", "needed"), [(19, 5, "19"), (3, None, "4")])
def test_faults_that_do_not_fit_the_run_are_refused(steps: int, every: int | None, needed: str) -> None:
    if every is None:
        with pytest.raises(ValueError, match=f"total_train_steps={steps}: 4 faults need {needed} at least"):
            plan(kill=4, steps=steps)
    else:
        assert plan(kill=4, steps=steps, every=every)[-1].step == 16
        with pytest.raises(ValueError, match="one every 5 steps, need 19 at least"):
            plan(kill=4, steps=steps - 1, every=every)


def test_what_there_is_nothing_to_do_it_to_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 'delay': this run has no target"):
        plan(delay=1)


def fault(number: int, step: int, offset: float = 0.0) -> Fault:
    return Fault(number, FaultKind.kill, "rollout_worker/0", step, offset, 0.0)


def test_a_fault_is_due_a_part_of_a_typical_step_after_its_step() -> None:
    clock = PlanClock([fault(1, 3, offset=0.5)])
    for step, now in [(1, 10.0), (2, 14.0), (3, 18.0)]:
        assert clock.due(now) is None
        clock.step_done(step, now)
    assert clock.due(19.9) is None
    due = clock.due(20.0)
    assert due is not None
    assert due.number == 1
    assert clock.due(100.0) is None
    assert clock.left == ()


def test_faults_of_one_step_are_due_one_after_the_other() -> None:
    clock = PlanClock([fault(1, 2), fault(2, 2), fault(3, 4)])
    clock.step_done(2, 5.0)
    due = [clock.due(5.0) for _ in range(3)]
    assert [None if each is None else each.number for each in due] == [1, 2, None]
    assert [each.number for each in clock.left] == [3]


def test_a_fault_waits_for_its_step_where_a_killed_launcher_took_steps_back() -> None:
    clock = PlanClock([fault(1, 4), fault(2, 6)])
    clock.step_done(5, 1.0)
    assert clock.due(1.0) is not None
    for step in (3, 4, 5):
        clock.step_done(step, 10.0 + step)
        assert clock.due(100.0) is None
    clock.step_done(6, 20.0)
    assert clock.due(20.0) is not None


def test_a_step_passed_over_by_a_burst_of_rows_counts_as_done() -> None:
    clock = PlanClock([fault(1, 2)])
    clock.step_done(7, 1.0)
    assert clock.due(1.0) is not None


def test_a_fault_does_not_wait_any_longer_once_another_step_is_done() -> None:
    clock = PlanClock([fault(1, 2, offset=1.0)])
    for step in (1, 2):
        clock.step_done(step, 10.0 * step)
    assert clock.due(20.5) is None
    clock.step_done(3, 20.6)
    assert clock.due(20.6) is not None

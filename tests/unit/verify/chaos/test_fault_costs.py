"""When a run went on after each fault, and what the fault cost, by the run's files."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.comm.ended_rollouts import (
    Admitted,
    Begin,
    Dropped,
    Finished,
    Line,
    PromptFate,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.verify.audit.ledger_files import Entry
from asyncrl.verify.chaos.faults import LAUNCHER, Fault, FaultKind, InjectedFault, add_costs, complete, find_work

SETTINGS = RunSettings(1, 1, "drop", 1, 0)


def kill(number: int, target: str, at: float) -> InjectedFault:
    return InjectedFault(Fault(number, FaultKind.kill, target, 1, 0.0, 0.0), at, 1)


def went_on(what: str, time: float) -> dict[str, Any]:
    return {"time": time, "went_on": what, "seconds": 1.0}


def entries(*lines: Line) -> list[Entry]:
    return [Entry(number, "", line) for number, line in enumerate(lines, 1)]


def admitted(rollout: str, at: float, worker: str = "rollout_worker/0", *, adopted: bool = False) -> Admitted:
    return Admitted(rollout, "e0-0", 0, 1, worker, 0, at, adopted=adopted)


def step(number: int, line: int, at: float) -> Step:
    return Step(line=line, at=at, lineage=0, step=number, counts=RolloutCounts(), seal="")


def begin(line: int, at: float, after: int = 0, lineage: int = 0) -> Begin:
    return Begin(line=line, at=at, lineage=lineage, version=0, after=after, settings=SETTINGS, carried=None, seal="")


def test_a_killed_worker_is_ready_then_at_work_and_the_next_step_may_come_before() -> None:
    done = kill(1, "rollout_worker/1", 100.0)
    complete([done], [(99.0, 1), (101.0, 2)], [went_on("rollout_worker/0", 102.0), went_on("rollout_worker/1", 103.0)])
    assert (done.ready_s, done.next_step_s) == (3.0, 1.0)
    work = entries(
        admitted("a", 100.1, "rollout_worker/1"),  # of the dead one
        admitted("b", 103.5, "rollout_worker/0"),
        admitted("c", 104.0, "rollout_worker/1"),
    )
    find_work([done], work)
    assert done.at_work_s == 4.0


@pytest.mark.parametrize(
    ("target", "restarted"),
    [("model_worker/1", "the brain"), ("master_worker/0", "the brain"), ("gserver_manager/0", "the whole run")],
)
def test_the_brain_is_at_work_with_the_first_step_after_it_was_ready(target: str, restarted: str) -> None:
    done = kill(1, target, 100.0)
    complete([done], [(100.5, 4), (109.0, 5)], [went_on(restarted, 105.0)])
    find_work([done], [])
    assert (done.ready_s, done.at_work_s, done.next_step_s) == (5.0, 9.0, 9.0)


def test_a_killed_launcher_is_made_good_by_the_next_step_of_the_next_launch() -> None:
    """The processes of the killed one end their step."""
    done = kill(1, LAUNCHER, 100.0)
    complete([done], [(99.0, 8), (100.7, 9), (120.0, 10)], [], launches=[5.0, 112.0])
    find_work([done], [])
    assert (done.at_work_s, done.next_step_s) == (20.0, 20.0)


def test_a_process_killed_again_before_it_was_ready_is_made_good_by_the_later_successor() -> None:
    first, second = kill(1, "model_worker/0", 100.0), kill(2, "master_worker/0", 102.0)
    complete([first, second], [(110.0, 2)], [went_on("the brain", 108.0)])
    assert (first.overtaken_by, first.ready_s, second.overtaken_by, second.ready_s) == (2, 8.0, None, 6.0)
    other = kill(3, "rollout_worker/0", 101.0)
    complete([first, other, second], [(110.0, 2)], [went_on("rollout_worker/0", 103.0), went_on("the brain", 108.0)])
    assert (other.overtaken_by, other.ready_s) == (None, 2.0)


def test_without_any_sign_a_fault_is_not_made_good() -> None:
    done = kill(1, "rollout_worker/0", 100.0)
    complete([done], [(99.0, 1)], [went_on("rollout_worker/0", 90.0)])
    find_work([done], entries(admitted("a", 101.0)))
    assert (done.ready_s, done.at_work_s, done.next_step_s) == (None, None, None)


def test_what_lasts_counts_from_its_end() -> None:
    done = InjectedFault(Fault(1, FaultKind.pause, "model_worker/0", 1, 0.0, 9.0), 100.0, 1, over=109.0)
    complete([done], [(100.2, 2), (110.0, 3)], [])
    assert done.next_step_s == 1.0


def test_rollouts_dropped_for_a_death_are_its_cost() -> None:
    first, second = kill(1, "rollout_worker/0", 100.0), kill(2, "rollout_worker/1", 200.0)
    lines = entries(
        *(admitted(name, 90.0) for name in "abcd"),
        Dropped("a", "worker_died", PromptFate.returned, 101.0),
        Finished("b", 30, 101.0),
        Dropped("c", "stale", PromptFate.returned, 103.0),
        Dropped("d", "crashed_worker", PromptFate.given_up, 201.0),
    )
    add_costs([first, second], lines)
    assert (first.rollouts, second.rollouts) == (2, 0), "all four were of the first one's target"
    assert first.tokens == 0, "what came to the trainer was not lost"
    other = kill(3, "model_worker/0", 150.0)
    elsewhere = entries(
        admitted("e", 90.0, "rollout_worker/9"), Dropped("e", "worker_died", PromptFate.returned, 160.0)
    )
    add_costs([first, other, second], elsewhere)
    assert (first.rollouts, other.rollouts) == (2, 1), "its worker was killed by nobody: the last fault before did it"


@pytest.mark.parametrize("target", [LAUNCHER, "model_worker/1", "gserver_manager/0", "master_worker/0"])
def test_what_a_lineage_ruled_out_is_the_cost_of_the_last_kill_of_the_launcher_or_the_brain(target: str) -> None:
    """But for the rollout that a worker still had."""
    before, done, other = kill(1, "model_worker/0", 99.0), kill(2, target, 100.0), kill(3, "rollout_worker/0", 101.0)
    trained = Trained("c", "e0-2", 2, 0, 2, {0: 5}, 1, 1, 0.5)
    lines = entries(
        begin(1, 50.0),
        admitted("a", 51.0),
        step(1, 3, 60.0),
        admitted("c", 61.0),
        Finished("c", 12, 62.0),
        trained,
        step(2, 7, 63.0),
        admitted("d", 64.0),
        admitted("e", 65.0),
        Finished("e", 30, 66.0),
        begin(11, 110.0, after=3, lineage=1),
        admitted("e", 110.0, adopted=True),
    )
    add_costs([before, done, other], lines)
    assert (done.rollouts, done.tokens, done.steps_again) == (2, 12, 1)
    assert (before.rollouts, before.steps_again) == (0, 0)
    assert (other.rollouts, other.steps_again) == (0, 0)

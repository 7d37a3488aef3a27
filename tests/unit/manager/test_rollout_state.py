"""What the manager records of a rollout, and of its prompt, with each report of workers and trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.live_rollouts import RolloutTicket
from asyncrl.manager.rollouts.rollout_state import NOBODY, RolloutState
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.queue.prompt_queue import NextTry


def state(batch: int = 2, eta: int = 1, rows: int = 10, **settings: Any) -> RolloutState:
    epochs = settings.pop("epochs", None)
    order = DataOrder(rows, 0, shuffle=False, epochs=epochs)
    return RolloutState(batch, eta, order, now=lambda: 5.0, **settings)


def admit(rollouts: RolloutState, *names: str, worker: str = "w0") -> None:
    for name in names:
        turn = rollouts.next_for(worker)
        assert turn is not None
        rollouts.admit(name, worker, turn)


def since(rollouts: RolloutState, count: int) -> list[Any]:
    return rollouts.events.unrecorded[count:]


def received(name: str, order: int, version: int = 0, tokens: int = 7) -> m.ReceivedRollout:
    return m.ReceivedRollout(name, f"e0-{order}", order, version, tokens)


def test_a_run_with_an_end_admits_whole_batches_only() -> None:
    assert state(batch=2, eta=9, rows=5, epochs=1).gate.limit == 4
    assert state(batch=2, eta=9, rows=5).gate.limit == 20


def test_the_first_manager_of_a_launch_numbers_from_one() -> None:
    rollouts = state()
    rollouts.measured.add(("e0-0", 1.0))
    assert (rollouts.manager, rollouts.measured.last_seq) == (0, 1)


def test_prompts_are_used_up_once_nothing_runs_and_none_is_left() -> None:
    rollouts = state(batch=1, rows=2, epochs=1)
    admit(rollouts, "a", "b")
    assert not rollouts.used_up, "two run"
    for name in "ab":
        rollouts.finish(m.FinishedRollout(name, accepted=True))
        assert not rollouts.used_up, "a rank has it, and not the trainer"
        rollouts.receive(name, 1)
    assert rollouts.used_up
    assert not state(batch=1, rows=2, epochs=1).used_up


def test_an_admission_is_recorded_with_its_prompt_and_try() -> None:
    rollouts = state(retries={1: (2, 3)}, used=[0])
    admit(rollouts, "a", "b")
    a, b = since(rollouts, 0)
    assert a == Admitted("a", "e0-2", 2, 0, "w0", 0, 5.0, 0)
    assert b == Admitted("b", "e0-3", 3, 0, "w0", 0, 5.0, 0)
    assert rollouts.queue.waiting(1) == NextTry(1, 2, 3)


@pytest.mark.parametrize(
    ("ended", "again", "goes"),
    [
        ({"reason": "filtered", "return_prompt": True, "as_next_attempt": True}, NextTry(0, 1, 0), "returned"),
        ({"reason": "failed", "return_prompt": True}, NextTry(0, 0, 1), "returned"),
        ({"reason": "failed"}, None, "given_up"),
        ({}, None, "given_up"),
    ],
)
def test_a_rejected_rollouts_prompt_is_tried_again_as_its_worker_says(
    ended: dict[str, Any], again: NextTry | None, goes: str
) -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    rollouts.finish(m.FinishedRollout("a", False, success=0.25, **ended))
    tries = () if again is None else (again.attempt, again.failures)
    assert since(rollouts, 2) == [Dropped("a", ended.get("reason", "rejected"), PromptGoes(goes), 5.0, *tries)]
    assert rollouts.queue.waiting(0) == again
    assert rollouts.queue.is_used(0) == (again is None)
    assert rollouts.queue.live == {1: 1}
    assert rollouts.measured.unrecorded == [("e0-0", 0.25)]
    rollouts.finish(m.FinishedRollout("a", False, success=0.25, **ended))
    assert (len(since(rollouts, 2)), len(rollouts.measured.unrecorded)) == (1, 1), "a repeated report"


def told(*names: str, success: float | None = None) -> list[m.FinishedRollout]:
    return [m.FinishedRollout(name, accepted=True, tokens=99, success=success) for name in names]


def test_a_rollout_is_finished_once_the_trainer_has_it_and_not_before() -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    for ended in told("a", "b"):
        rollouts.finish(ended)
    assert (rollouts.gate.books().running, rollouts.tokens_finished, since(rollouts, 2)) == (2, 0, [])
    assert [rollouts.receive(*each) for each in (("a", 30), ("a", 30), ("b", 12))] == [True] * 3
    assert rollouts.tokens_finished == 42
    assert since(rollouts, 2) == [Finished("a", 30, 5.0), Finished("b", 12, 5.0)]
    assert rollouts.gate.books().finished_untrained == 2


@pytest.mark.parametrize("before", [False, True], ids=["after the trainer has it", "before"])
def test_a_success_is_measured_once_whenever_the_worker_reports_it(before: bool) -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    for first in (before, not before):
        if not first:
            rollouts.receive("a", 3)
            assert rollouts.awaits_ends is not before
        else:
            for ended in told("a", "a", success=0.5):
                rollouts.finish(ended)
    assert rollouts.measured.unrecorded == [("e0-0", 0.5)]
    rollouts.finish(m.FinishedRollout("a", accepted=True, success=0.5))
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    rollouts.receive("b", 3)
    rollouts.consume(1, ["a", "b"])
    rollouts.finish(m.FinishedRollout("a", accepted=True, success=0.5))
    rollouts.finish(m.FinishedRollout("never", accepted=True, success=0.5))
    assert rollouts.measured.unrecorded == [("e0-0", 0.5)]
    assert not rollouts.awaits_ends


@pytest.mark.parametrize("trained", [False, True])
def test_what_the_trainer_has_counts_even_if_its_worker_says_that_it_failed(trained: bool) -> None:
    """The rank's acknowledgement was lost until the push timed out."""
    rollouts = state(batch=1)
    admit(rollouts, "a")
    rollouts.receive("a", 3)
    if trained:
        rollouts.consume(1, ["a"])
    assert rollouts.awaits_ends
    count = len(rollouts.events.unrecorded)
    rollouts.finish(m.FinishedRollout("a", False, "failed", return_prompt=True))
    assert not rollouts.awaits_ends, "it has reported the end"
    rollouts.consume(1, ["a"])
    books = rollouts.gate.books()
    assert (books.trained, books.dropped, since(rollouts, count)) == (1, {}, [])
    assert rollouts.next_for("w0") == NextTry(1)


@pytest.mark.parametrize("how", ["worker", "manager"])
def test_what_was_given_up_and_is_delivered_late_does_not_count_and_its_prompt_is_played_again(how: str) -> None:
    rollouts = state(batch=1)
    admit(rollouts, "a")
    _ = rollouts.died("w0") if how == "worker" else rollouts.end_unclaimed("a")
    reason = "worker_died" if how == "worker" else "lost_with_manager"
    before = [Dropped("a", reason, PromptGoes.returned, 5.0, 0, 0)]
    assert since(rollouts, 1) == before
    assert rollouts.next_for("w1") == NextTry(0)
    for ended in told("a", success=0.5):
        rollouts.finish(ended)
    assert not rollouts.receive("a", 3)
    admit(rollouts, "b", worker="w1")
    assert not rollouts.receive("a", 3)
    rollouts.consume(0, [], [m.DroppedRollout("a", "stale")])
    assert (since(rollouts, 1)[:1], rollouts.queue.live, rollouts.tokens_finished) == (before, {0: 1}, 0)
    assert not rollouts.measured.unrecorded
    assert not rollouts.awaits_ends
    assert rollouts.receive("b", 3)
    rollouts.consume(1, ["b"])
    assert not rollouts.receive("a", 3)
    books = rollouts.gate.books()
    assert (books.submitted, books.trained, books.dropped) == (2, 1, {reason: 1})
    assert [type(line) for line in since(rollouts, 2)] == [Admitted, Finished]
    assert rollouts.next_for("w0") == NextTry(1)


@pytest.mark.parametrize("ended", ["trained", "dropped", "abandoned", "rejected"])
def test_what_left_the_count_is_not_received_again(ended: str) -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    if ended == "rejected":
        rollouts.finish(m.FinishedRollout("a", False, "failed"))
    elif ended == "abandoned":
        rollouts.abandon()
    else:
        assert rollouts.receive("a", 3)
        trained, dropped = (["a"], []) if ended == "trained" else ([], [m.DroppedRollout("a", "stale")])
        rollouts.consume(1, trained, dropped)
    before, count = rollouts.gate.books(), len(rollouts.events.unrecorded)
    assert not rollouts.receive("a", 3)
    assert (rollouts.gate.books(), since(rollouts, count)) == (before, [])
    assert not rollouts.receive("never", 3)


def test_what_the_ledger_has_as_finished_is_not_recorded_again() -> None:
    rollouts = state()
    rollouts.enter(RolloutTicket("a", "w0", "e0-0", 0), 0, recorded=True)
    assert rollouts.receive("a", 0, recorded=True)
    assert rollouts.receive("a", 9)
    assert (since(rollouts, 0), rollouts.tokens_finished, rollouts.gate.books().finished_untrained) == ([], 0, 1)
    rollouts.finish(m.FinishedRollout("a", accepted=True, success=0.5))
    assert rollouts.measured.unrecorded == [("e0-0", 0.5)]


def test_only_what_the_trainer_has_not_is_lost_with_its_worker() -> None:
    rollouts = state()
    admit(rollouts, "a", "b", "c")
    rollouts.receive("a", 3)
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    assert rollouts.died("w0") == ["b", "c"], "a rank may have the second, but may die as well"
    assert (rollouts.gate.books().finished_untrained, rollouts.queue.peek()) == (1, NextTry(1))
    rollouts.finish(m.FinishedRollout("b", accepted=True, success=1.0))
    assert not rollouts.measured.unrecorded
    assert not rollouts._ends_told, "what left the count is not remembered here"


def test_a_rollout_that_the_trainer_drops_as_stale_has_its_prompt_tried_again_as_before() -> None:
    rollouts = state(retries={0: (0, 2)})
    admit(rollouts, "a")
    rollouts.consume(0, [], [m.DroppedRollout("a", "stale")])
    assert since(rollouts, 1) == [Dropped("a", "stale", PromptGoes.returned, 5.0, 0, 2)]
    assert rollouts.next_for("w1") == NextTry(0, 0, 2)


def test_a_trained_rollout_uses_its_prompt_once_and_what_was_lost_is_not_trained() -> None:
    rollouts = state(batch=2)
    admit(rollouts, "a", "b")
    admit(rollouts, "c", worker="w1")
    for name in "ab":
        rollouts.receive(name, 3)
    rollouts.died("w1")
    for _ in range(2):
        rollouts.consume(1, ["a", "b", "c"])
    assert [rollouts.queue.is_used(order) for order in range(4)] == [True, True, False, False]
    assert (rollouts.queue.live, rollouts.gate.books().trained) == ({}, 2)
    assert rollouts.next_for("w0") == NextTry(2)


def test_a_prompt_has_one_live_rollout_whoever_reports_another() -> None:
    """Only a manager that died could have told which of them it had admitted last."""
    rollouts = state()
    rollouts.adopt(m.HeldReport("w0", 0, held("a")))
    rollouts.adopt(m.HeldReport("w1", 0, held("b")))
    rollouts.enter_received(received("c", 0))
    assert (list(rollouts.gate.live), rollouts.queue.live) == (["a"], {0: 1})
    assert [rollouts.receive(name, 3) for name in "abc"] == [True, False, False]
    rollouts.consume(1, ["a"])
    rollouts.adopt(m.HeldReport("w2", 0, held("d")))
    rollouts.enter_received(received("e", 0))
    assert not rollouts.gate.live, "its prompt is used"
    assert rollouts.gate.books().submitted == 1


def test_what_only_the_trainer_has_enters_with_the_try_that_waits() -> None:
    rollouts = state(retries={4: (1, 2)})
    rollouts.enter_received(received("x", 4))
    rollouts.enter_received(received("y", 5))
    rollouts.enter_received(received("y", 5))
    assert since(rollouts, 0) == [
        Admitted("x", "e0-4", 4, 1, NOBODY, 0, 5.0, 2, True),
        Admitted("y", "e0-5", 5, 0, NOBODY, 0, 5.0, 0, True),
    ]
    assert (rollouts.gate.books().running, rollouts.queue.live) == (2, {4: 1, 5: 1})
    assert rollouts.receive("x", 9)
    assert (rollouts.gate.books().finished_untrained, rollouts.tokens_finished) == (1, 9)
    assert not rollouts.awaits_ends, "no worker will report its end"
    rollouts.consume(0, [], [m.DroppedRollout("x", "stale")])
    rollouts.enter_received(received("x", 4))
    assert "x" not in rollouts.gate.live, "it was dropped"


def test_what_was_trained_before_this_manager_enters_once() -> None:
    """The last step is complete, and the manager that was to hear of it has died."""
    rollouts = state(batch=2)
    rollouts.enter(RolloutTicket("a", "w0", "e0-0", 0), 0, recorded=True)
    for _ in range(2):
        for name, order in (("a", 0), ("b", 1)):
            rollouts.enter_trained(received(name, order, tokens=7))
    rollouts.consume(1, ["a", "b"])
    books = rollouts.gate.books()
    assert (books.submitted, books.trained, books.balanced) == (2, 2, True)
    assert since(rollouts, 0) == [
        Finished("a", 7, 5.0),
        Admitted("b", "e0-1", 1, 0, NOBODY, 0, 5.0, 0, True),
        Finished("b", 7, 5.0),
    ]
    assert rollouts.awaits_ends, "the worker that has the first one reports its success"
    rollouts.enter_trained(received("b", 1))
    assert (rollouts.gate.books(), rollouts.next_for("w0")) == (books, NextTry(2))


def held(*names: str, version: int = 0) -> list[m.HeldRollout]:
    return [m.HeldRollout(m.GrantedRollout(name, f"e0-{at}", at, at, 0, 1, version)) for at, name in enumerate(names)]


def test_the_first_report_of_each_process_of_a_worker_counts() -> None:
    rollouts = state()
    rollouts.adopt(m.HeldReport("w0", 0, held("a")))
    assert rollouts.incarnations == {"w0": 0}
    rollouts.adopt(m.HeldReport("w0", 0, held("a", "b")))
    assert list(rollouts.gate.live) == ["a"], "a late copy"
    assert since(rollouts, 0) == [Admitted("a", "e0-0", 0, 0, "w0", 0, 5.0, 1, True)]
    rollouts.adopt(m.HeldReport("w0", 2, held("a", "b")))
    assert list(rollouts.gate.live) == ["a", "b"]
    rollouts.adopt(m.HeldReport("w0", 1, held("a", "b", "c")))
    assert (list(rollouts.gate.live), rollouts.incarnations) == (["a", "b"], {"w0": 2})
    rollouts.replaced("w1", 5, killed=False)
    rollouts.adopt(m.HeldReport("w1", 4))
    assert rollouts.incarnations["w1"] == 5, "a process that was seen after it"
    rollouts.gate.drop("a", "failed")
    rollouts.adopt(m.HeldReport("w0", 3, held("a")))
    assert list(rollouts.gate.live) == ["b"], "it left before"


def test_a_rollout_that_no_process_has_is_lost_and_its_prompt_tried_again() -> None:
    rollouts = state()
    rollouts.enter(RolloutTicket("a", "w0", "e0-0", 0, 0, 2), 0, recorded=True)
    rollouts.end_unclaimed("a")
    rollouts.end_unclaimed("never")
    assert since(rollouts, 0) == [Dropped("a", "lost_with_manager", PromptGoes.returned, 5.0, 0, 2)]
    assert rollouts.next_for("w1") == NextTry(0, 0, 2)


def awaited(trained: Iterable[str] = "abc") -> RolloutState:
    """The trainer has used rollouts that run on two workers, as far as these have reported."""
    rollouts = state(batch=3)
    admit(rollouts, "a", "b")
    admit(rollouts, "c", worker="w1")
    for name in trained:
        rollouts.receive(name, 1)
    rollouts.consume(1, list(trained))
    return rollouts


def test_ends_are_awaited_until_the_worker_reports_them_or_is_lost() -> None:
    rollouts = awaited()
    for name in "ac":
        assert rollouts.awaits_ends
        rollouts.finish(m.FinishedRollout(name, accepted=True, success=1.0))
    assert rollouts.measured.unrecorded == [("e0-0", 1.0), ("e0-2", 1.0)], "late, but it is known of which prompts"
    rollouts.died("w1")
    assert rollouts.awaits_ends
    rollouts.died("w0")
    assert not rollouts.awaits_ends
    rollouts = awaited()
    rollouts.await_ends_of(["b"])
    rollouts.died("w1")
    assert rollouts.awaits_ends
    rollouts.await_ends_of([])
    assert not rollouts.awaits_ends
    rollouts = awaited([])
    assert not rollouts.awaits_ends
    rollouts.receive("a", 1)
    rollouts.consume(1, [], [m.DroppedRollout("a", "stale")])
    assert rollouts.awaits_ends, "a rollout that the trainer dropped has ended as well"


def test_at_the_end_every_live_rollout_is_abandoned() -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    rollouts.receive("b", 1)
    rollouts.abandon()
    assert since(rollouts, 3) == [Abandoned("a", 5.0), Abandoned("b", 5.0)]
    assert rollouts.gate.books().abandoned == 2

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


def test_a_finished_rollout_counts_once_with_its_tokens_and_its_success() -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    for _ in range(2):
        rollouts.finish(m.FinishedRollout("a", accepted=True, tokens=30, success=0.5))
    rollouts.finish(m.FinishedRollout("b", accepted=True, tokens=12))
    assert rollouts.tokens_finished == 42
    assert since(rollouts, 2) == [Finished("a", 30, 5.0), Finished("b", 12, 5.0)]
    assert rollouts.measured.unrecorded == [("e0-0", 0.5)]


def test_a_lost_rollout_that_finishes_after_all_is_live_and_its_prompt_with_it() -> None:
    rollouts = state()
    admit(rollouts, "a")
    assert rollouts.died("w0") == ["a"]
    assert since(rollouts, 1) == [Dropped("a", "worker_died", PromptGoes.returned, 5.0, 0, 0)]
    assert rollouts.queue.peek() == NextTry(0)
    rollouts.finish(m.FinishedRollout("a", accepted=True, tokens=3))
    assert rollouts.queue.peek() == NextTry(1), "its prompt is live"
    assert since(rollouts, 2) == [Finished("a", 3, 5.0)]


def test_a_rollout_that_the_trainer_drops_for_good_uses_its_prompt_also_if_it_was_lost() -> None:
    for lost in (False, True):
        rollouts = state()
        admit(rollouts, "a")
        if lost:
            rollouts.died("w0")
        before = len(rollouts.events.unrecorded)
        rollouts.consume(m.ConsumedReport(0, [], [m.DroppedRollout("a", "duplicate_prompt", used=True)]))
        assert since(rollouts, before) == [Dropped("a", "duplicate_prompt", PromptGoes.used, 5.0)]
        assert rollouts.queue.is_used(0)
        rollouts.finish(m.FinishedRollout("a", accepted=True))
        assert rollouts.gate.books().finished_untrained == 0


def test_a_rollout_that_the_trainer_drops_as_stale_has_its_prompt_tried_again_as_before() -> None:
    rollouts = state(retries={0: (0, 2)})
    admit(rollouts, "a")
    rollouts.consume(m.ConsumedReport(0, [], [m.DroppedRollout("a", "stale")]))
    assert since(rollouts, 1) == [Dropped("a", "stale", PromptGoes.returned, 5.0, 0, 2)]
    assert rollouts.next_for("w1") == NextTry(0, 0, 2)


def test_a_trained_rollout_uses_its_prompt_whether_it_ran_finished_or_was_lost() -> None:
    rollouts = state(batch=3)
    admit(rollouts, "a", "b")
    admit(rollouts, "c", worker="w1")
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    rollouts.died("w1")
    rollouts.consume(m.ConsumedReport(1, ["a", "b", "c"], []))
    assert [rollouts.queue.is_used(order) for order in range(4)] == [True, True, True, False]
    assert (rollouts.queue.live, rollouts.gate.books().trained) == ({}, 3)
    assert rollouts.next_for("w0") == NextTry(3)


def test_what_only_the_trainer_knows_enters_with_its_report_and_once() -> None:
    rollouts = state(retries={4: (1, 2)})
    report = m.ConsumedReport(1, ["x", "y"], [], unknown=[received("x", 4, version=0), received("y", 5)])
    rollouts.consume(report)
    books = rollouts.gate.books()
    assert (books.submitted, books.trained, books.balanced) == (2, 2, True)
    assert since(rollouts, 0) == [
        Admitted("x", "e0-4", 4, 1, NOBODY, 0, 5.0, 2, True),
        Admitted("y", "e0-5", 5, 0, NOBODY, 0, 5.0, 0, True),
    ]
    assert [rollouts.queue.is_used(order) for order in (4, 5)] == [True, True]
    rollouts.consume(report)
    assert rollouts.gate.books() == books
    another = state()
    another.consume(report)
    another.consume(m.ConsumedReport(1, ["z"], [m.DroppedRollout("d", "stale")], [received("z", 6), received("d", 7)]))
    assert another.gate.books().dropped == {"stale": 1}, "a drop is reported with any version, a training with its own"
    assert another.gate.books().trained == 2


def test_what_a_run_resumed_with_is_not_counted_again_when_it_is_reported_again() -> None:
    rollouts = state()
    rollouts.gate.resume(1)
    rollouts.consume(m.ConsumedReport(1, ["x"], [], unknown=[received("x", 0)]))
    books = rollouts.gate.books()
    assert (books.submitted, books.trained, books.balanced) == (2, 2, True)
    assert not rollouts.queue.live


def test_a_report_says_how_many_lines_and_measurements_are_recorded() -> None:
    rollouts = state(manager=1)
    first = (1 << 40) + 1
    assert rollouts.measured.last_seq == first - 1
    admit(rollouts, "a", "b")
    for name in "ab":
        rollouts.finish(m.FinishedRollout(name, accepted=True, success=1.0))
    rollouts.consume(m.ConsumedReport(0, [], [], events_after=3, measured_after=first))
    assert since(rollouts, 0) == [Finished("b", 0, 5.0)]
    assert rollouts.measured.unrecorded == [("e0-1", 1.0)]


def test_what_waits_at_the_trainer_and_at_no_worker_enters_as_finished() -> None:
    rollouts = state()
    rollouts.receive(received("x", 0, tokens=9))
    rollouts.receive(received("x", 0, tokens=9))
    assert (rollouts.gate.books().finished_untrained, rollouts.tokens_finished) == (1, 9)
    assert rollouts.next_for("w0") == NextTry(1)
    rollouts.gate.drop("x", "stale")
    rollouts.receive(received("x", 0, tokens=9))
    assert (rollouts.gate.books().finished_untrained, rollouts.tokens_finished) == (0, 9), "it was dropped"


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
    rollouts.consume(m.ConsumedReport(1, list(trained), []))
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
    rollouts.consume(m.ConsumedReport(1, [], [m.DroppedRollout("a", "stale")]))
    assert rollouts.awaits_ends, "a rollout that the trainer dropped has ended as well"


def test_at_the_end_every_live_rollout_is_abandoned() -> None:
    rollouts = state()
    admit(rollouts, "a", "b")
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    rollouts.abandon()
    assert since(rollouts, 3) == [Abandoned("a", 5.0), Abandoned("b", 5.0)]
    assert rollouts.gate.books().abandoned == 2

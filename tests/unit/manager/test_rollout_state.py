"""What the manager records of a rollout, and of its prompt, with each report of workers and trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.comm.ended_rollouts import Abandoned, Admitted, Dropped, Finished, PromptFate, RolloutLine
from asyncrl.data.curriculum import Curriculum, CurriculumFailed
from asyncrl.data.prompt_queue import DataOrder, NextTry, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rollout_state import NOBODY, RolloutState
from tests.recorded_lines import RecordedLines


class Measured(Curriculum):
    """Notes what was measured."""

    def __init__(self) -> None:
        super().__init__(0.0, 1.0, 1)
        self.found: list[tuple[str, float]] = []

    def measured(self, prompt_id: str, success: float) -> None:
        super().measured(prompt_id, success)
        self.found.append((prompt_id, success))


class RecordedState(RolloutState):
    """Keeps the lines, and what was measured."""

    def __init__(
        self,
        batch: int = 2,
        eta: int = 1,
        rows: int = 10,
        *,
        epochs: float | None = None,
        used: Iterable[int] = (),
        retries: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        order = DataOrder(rows, 0, shuffle=False, epochs=epochs)
        done = UsedPrompts(order.ref(each).prompt_id for each in used)
        checkpoint = m.GateCheckpoint(used=done.to_json(), retries=list(retries))
        self.recorded = RecordedLines()
        self.measurements = Measured()
        super().__init__(
            batch,
            eta,
            order,
            self.recorded,
            lambda: 4.99951,
            checkpoint=checkpoint,
            curriculum=self.measurements,
        )


def admit(rollouts: RolloutState, *names: str, worker: str = "w0") -> None:
    for name in names:
        turn = rollouts.next_for(worker)
        assert turn is not None
        rollouts.admit(name, worker, turn)


def since(rollouts: RecordedState, count: int) -> list[RolloutLine]:
    return rollouts.recorded[count:]


def train(rollouts: RolloutState, version: int, *names: str) -> None:
    rollouts.train(version, [m.TrainedRollout(name, "", 0, {0: 1}, 1, 1, 1.0) for name in names])


def drop(rollouts: RolloutState, name: str, reason: str = "stale") -> None:
    rollouts.drop([m.DroppedRollout(name, reason)])


def received(name: str, order: int, version: int = 0, tokens: int = 7) -> m.ReceivedRollout:
    return m.ReceivedRollout(name, f"e0-{order}", order, version, tokens)


def test_a_run_with_an_end_admits_whole_batches_only() -> None:
    assert RecordedState(batch=2, eta=9, rows=5, epochs=1).gate.limit == 4
    assert RecordedState(batch=2, eta=9, rows=5).gate.limit == 20


def test_prompts_are_used_up_once_nothing_runs_and_none_is_left() -> None:
    rollouts = RecordedState(batch=1, rows=2, epochs=1)
    admit(rollouts, "a", "b")
    assert not rollouts.used_up, "two run"
    for name in "ab":
        rollouts.finish(m.FinishedRollout(name, accepted=True))
        assert not rollouts.used_up, "a rank has it, and not the trainer"
        rollouts.receive(name, 1)
    assert rollouts.used_up
    assert not RecordedState(batch=1, rows=2, epochs=1).used_up


def test_an_admission_is_recorded_with_its_prompt_and_try() -> None:
    rollouts = RecordedState(retries=[(1, 2, 3)], used=[0])
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
    rollouts = RecordedState()
    admit(rollouts, "a", "b")
    rollouts.finish(m.FinishedRollout("a", False, success=0.25, **ended))
    tries = () if again is None else (again.attempt, again.failures)
    assert since(rollouts, 2) == [Dropped("a", ended.get("reason", "rejected"), PromptFate(goes), 5.0, *tries)]
    assert rollouts.queue.waiting(0) == again
    assert rollouts.queue.is_used(0) == (again is None)
    assert list(rollouts.used) == ["e0-0"] * (again is None)
    assert rollouts.queue.live == {1}
    assert rollouts.measurements.found == [("e0-0", 0.25)]
    rollouts.finish(m.FinishedRollout("a", False, success=0.25, **ended))
    assert (len(since(rollouts, 2)), len(rollouts.measurements.found)) == (1, 1), "a repeated report"


class Broken(Curriculum):
    """A user's own, of which a method takes too long."""

    def measured(self, prompt_id: str, success: float) -> None:
        raise CurriculumFailed(prompt_id)


def test_a_curriculum_that_fails_leaves_an_end_whole() -> None:
    """Else the gate would have it, and neither the queue nor the ledger."""
    rollouts = RecordedState()
    rollouts.curriculum = Broken(0.0, 1.0, 1)
    admit(rollouts, "a", "b")
    for name, again in (("a", True), ("b", False)):
        with pytest.raises(CurriculumFailed):
            rollouts.finish(m.FinishedRollout(name, False, "failed", return_prompt=again, success=0.5))
    assert since(rollouts, 2) == [
        Dropped("a", "failed", PromptFate.returned, 5.0, 0, 1),
        Dropped("b", "failed", PromptFate.given_up, 5.0),
    ]
    assert (rollouts.queue.waiting(0), list(rollouts.used)) == (NextTry(0, 0, 1), ["e0-1"])


def reported(*names: str, success: float | None = None) -> list[m.FinishedRollout]:
    return [m.FinishedRollout(name, accepted=True, success=success) for name in names]


def test_a_rollout_is_finished_once_the_trainer_has_it_and_not_before() -> None:
    rollouts = RecordedState()
    admit(rollouts, "a", "b")
    for ended in reported("a", "b"):
        rollouts.finish(ended)
    assert (rollouts.gate.counts().running, rollouts.tokens_finished, since(rollouts, 2)) == (2, 0, [])
    assert [rollouts.receive(*each) for each in (("a", 30), ("a", 30), ("b", 12))] == [True] * 3
    assert rollouts.tokens_finished == 42
    assert since(rollouts, 2) == [Finished("a", 30, 5.0), Finished("b", 12, 5.0)]
    assert rollouts.gate.counts().finished_untrained == 2


@pytest.mark.parametrize("before", [False, True], ids=["after the trainer has it", "before"])
def test_a_success_is_measured_once_whenever_the_worker_reports_it(before: bool) -> None:
    rollouts = RecordedState()
    admit(rollouts, "a", "b")
    for first in (before, not before):
        if not first:
            rollouts.receive("a", 3)
            assert rollouts.awaits_ends is not before
        else:
            for ended in reported("a", "a", success=0.5):
                rollouts.finish(ended)
    assert rollouts.measurements.found == [("e0-0", 0.5)]
    rollouts.finish(m.FinishedRollout("a", accepted=True, success=0.5))
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    rollouts.receive("b", 3)
    train(rollouts, 1, "a", "b")
    rollouts.finish(m.FinishedRollout("a", accepted=True, success=0.5))
    rollouts.finish(m.FinishedRollout("never", accepted=True, success=0.5))
    assert rollouts.measurements.found == [("e0-0", 0.5)]
    assert not rollouts.awaits_ends


@pytest.mark.parametrize("trained", [False, True])
def test_what_the_trainer_has_counts_even_if_its_worker_says_that_it_failed(trained: bool) -> None:
    """The rank's acknowledgement was lost until the push timed out."""
    rollouts = RecordedState(batch=1)
    admit(rollouts, "a")
    rollouts.receive("a", 3)
    if trained:
        train(rollouts, 1, "a")
    assert rollouts.awaits_ends
    count = len(rollouts.recorded)
    rollouts.finish(m.FinishedRollout("a", False, "failed", return_prompt=True))
    assert not rollouts.awaits_ends, "it has reported the end"
    train(rollouts, 1, "a")
    counts = rollouts.gate.counts()
    assert (counts.trained, counts.dropped, since(rollouts, count)) == (1, {}, [])
    assert rollouts.next_for("w0") == NextTry(1)


@pytest.mark.parametrize("how", ["silent", "replaced"])
def test_what_was_given_up_and_is_delivered_late_does_not_count_and_its_prompt_is_played_again(how: str) -> None:
    rollouts = RecordedState(batch=1)
    admit(rollouts, "a")
    _ = rollouts.died("w0") if how == "silent" else rollouts.replaced("w0", killed=False)
    before = [Dropped("a", "worker_died", PromptFate.returned, 5.0, 0, 0)]
    assert since(rollouts, 1) == before
    assert rollouts.next_for("w1") == NextTry(0)
    for ended in reported("a", success=0.5):
        rollouts.finish(ended)
    assert not rollouts.receive("a", 3)
    admit(rollouts, "b", worker="w1")
    assert not rollouts.receive("a", 3)
    drop(rollouts, "a")
    assert (since(rollouts, 1)[:1], rollouts.queue.live, rollouts.tokens_finished) == (before, {0}, 0)
    assert not rollouts.measurements.found
    assert not rollouts.awaits_ends
    assert rollouts.receive("b", 3)
    train(rollouts, 1, "b")
    assert not rollouts.receive("a", 3)
    counts = rollouts.gate.counts()
    assert (counts.submitted, counts.trained, counts.dropped) == (2, 1, {"worker_died": 1})
    assert [type(line) for line in since(rollouts, 2)] == [Admitted, Finished]
    assert rollouts.next_for("w0") == NextTry(1)


@pytest.mark.parametrize("ended", ["trained", "dropped", "abandoned", "rejected"])
def test_what_left_the_count_is_not_received_again(ended: str) -> None:
    rollouts = RecordedState()
    admit(rollouts, "a", "b")
    if ended == "rejected":
        rollouts.finish(m.FinishedRollout("a", False, "failed"))
    elif ended == "abandoned":
        rollouts.end(0)
    else:
        assert rollouts.receive("a", 3)
        if ended == "trained":
            train(rollouts, 1, "a")
        else:
            drop(rollouts, "a")
    before, count = rollouts.gate.counts(), len(rollouts.recorded)
    assert not rollouts.receive("a", 3)
    assert (rollouts.gate.counts(), since(rollouts, count)) == (before, [])
    assert not rollouts.receive("never", 3)


def test_only_what_the_trainer_has_not_is_lost_with_its_worker() -> None:
    rollouts = RecordedState()
    admit(rollouts, "a", "b", "c")
    rollouts.receive("a", 3)
    rollouts.finish(m.FinishedRollout("b", accepted=True))
    assert rollouts.died("w0") == ["b", "c"], "a rank may have the second, but may die as well"
    assert [rollouts.gate.has_ended(name) for name in "abc"] == [True, True, False], "the third may be played on"
    assert (rollouts.gate.counts().finished_untrained, rollouts.queue.peek()) == (1, NextTry(1))
    rollouts.finish(m.FinishedRollout("b", accepted=True, success=1.0))
    assert not rollouts.measurements.found
    assert not rollouts._ends_reported, "what left the count is not remembered here"


def test_a_rollout_that_the_trainer_drops_as_stale_has_its_prompt_tried_again_as_before() -> None:
    rollouts = RecordedState(retries=[(0, 0, 2)])
    admit(rollouts, "a")
    drop(rollouts, "a")
    assert since(rollouts, 1) == [Dropped("a", "stale", PromptFate.returned, 5.0, 0, 2)]
    assert rollouts.next_for("w1") == NextTry(0, 0, 2)


def test_a_trained_rollout_uses_its_prompt_once_and_what_was_lost_is_not_trained() -> None:
    rollouts = RecordedState(batch=2)
    admit(rollouts, "a", "b")
    admit(rollouts, "c", worker="w1")
    for name in "ab":
        rollouts.receive(name, 3)
    rollouts.died("w1")
    for _ in range(2):
        train(rollouts, 1, "a", "b", "c")
    assert [rollouts.queue.is_used(order) for order in range(4)] == [True, True, False, False]
    assert list(rollouts.used) == ["e0-0", "e0-1"]
    assert (rollouts.queue.live, rollouts.gate.counts().trained) == (set(), 2)
    assert rollouts.next_for("w0") == NextTry(2)


def test_a_prompt_has_one_live_rollout_whoever_reports_another() -> None:
    """Only a manager that died could have told which of them it had admitted last."""
    rollouts = RecordedState()
    rollouts.enter_held("w0", granted("a"))
    rollouts.enter_held("w1", granted("b"))
    rollouts.enter_received(received("c", 0))
    assert (list(rollouts.gate.live), rollouts.queue.live) == (["a"], {0})
    assert [rollouts.receive(name, 3) for name in "abc"] == [True, False, False]
    train(rollouts, 1, "a")
    rollouts.enter_held("w2", granted("d"))
    rollouts.enter_received(received("e", 0))
    assert not rollouts.gate.live, "its prompt is used"
    assert rollouts.gate.counts().submitted == 1


def test_what_only_the_trainer_has_enters_with_the_try_that_waits() -> None:
    rollouts = RecordedState(retries=[(4, 1, 2)])
    rollouts.enter_received(received("x", 4))
    rollouts.enter_received(received("y", 5))
    rollouts.enter_received(received("y", 5))
    assert since(rollouts, 0) == [
        Admitted("x", "e0-4", 4, 1, NOBODY, 0, 5.0, 2, True),
        Admitted("y", "e0-5", 5, 0, NOBODY, 0, 5.0, 0, True),
    ]
    assert (rollouts.gate.counts().running, rollouts.queue.live) == (2, {4, 5})
    assert rollouts.receive("x", 9)
    assert (rollouts.gate.counts().finished_untrained, rollouts.tokens_finished) == (1, 9)
    assert not rollouts.awaits_ends, "no worker will report its end"
    drop(rollouts, "x")
    rollouts.enter_received(received("x", 4))
    assert "x" not in rollouts.gate.live, "it was dropped"


def granted(name: str, order: int = 0) -> m.GrantedRollout:
    return m.GrantedRollout(name, f"e0-{order}", order, order, 0, 1, 0)


def test_what_a_worker_holds_enters_once_with_its_try() -> None:
    rollouts = RecordedState()
    for _ in range(2):
        rollouts.enter_held("w0", granted("a"))
    assert since(rollouts, 0) == [Admitted("a", "e0-0", 0, 0, "w0", 0, 5.0, 1, True)]
    rollouts.gate.drop("a", "failed")
    rollouts.enter_held("w0", granted("a"))
    assert not rollouts.gate.live, "it left before"


def awaited(trained: Iterable[str] = "abc") -> RecordedState:
    """The trainer has used rollouts that run on two workers, as far as these have reported."""
    rollouts = RecordedState(batch=3)
    admit(rollouts, "a", "b")
    admit(rollouts, "c", worker="w1")
    for name in trained:
        rollouts.receive(name, 1)
    train(rollouts, 1, *trained)
    return rollouts


def test_ends_are_awaited_until_the_worker_reports_them_or_is_lost() -> None:
    rollouts = awaited()
    for name in "ac":
        assert rollouts.awaits_ends
        rollouts.finish(m.FinishedRollout(name, accepted=True, success=1.0))
    assert rollouts.measurements.found == [("e0-0", 1.0), ("e0-2", 1.0)], "late, but it is known of which prompts"
    rollouts.died("w1")
    assert rollouts.awaits_ends
    rollouts.died("w0")
    assert not rollouts.awaits_ends
    rollouts = awaited([])
    assert not rollouts.awaits_ends
    rollouts.receive("a", 1)
    drop(rollouts, "a")
    assert rollouts.awaits_ends, "a rollout that the trainer dropped has ended as well"


def test_at_the_end_every_live_rollout_is_abandoned() -> None:
    rollouts = RecordedState()
    admit(rollouts, "a", "b")
    rollouts.receive("b", 1)
    counts = rollouts.end(7)
    assert since(rollouts, 3) == [Abandoned("a", 5.0), Abandoned("b", 5.0)]
    assert counts.abandoned == 2
    assert rollouts.end(7) == counts
    assert rollouts.recorded.ends == [(7, counts)], "the run ends once"

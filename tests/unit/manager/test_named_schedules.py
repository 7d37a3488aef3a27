"""Faults that longer schedules of `test_any_schedule` found, by name: prompts trained and dropped, lost, or trained
twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncrl.comm.ended_rollouts import Dropped
from asyncrl.data.prompt_queue import DataOrder, NextTry
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.staleness_gate import WORKER_LOST, StalenessGate
from asyncrl.manager.rollouts.workers import PendingReports
from asyncrl.manager.service import ManagerService
from asyncrl.master.data.sample_buffer import SampleBuffer, received, trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from tests.unit.manager.test_any_schedule import Schedule, Worker


def begun(eta: int = 2, on_stale: OnStale = OnStale.drop) -> Schedule:
    schedule = Schedule()
    schedule.begin(batch=1, eta=eta, on_stale=on_stale, stops_early=False)
    schedule.all_speak()
    return schedule


def running(schedule: Schedule, prompt: str) -> tuple[Worker, str]:
    """The worker that plays the prompt, and its rollout."""
    found = [
        (worker, name)
        for worker in schedule.workers
        for name, granted in worker.running.items()
        if granted.prompt_id == prompt
    ]
    assert len(found) == 1
    return found[0]


def drop_for_good(schedule: Schedule, prompt: str) -> None:
    """The worker that plays the prompt drops it, and says so."""
    worker, rollout = running(schedule, prompt)
    worker.running.pop(rollout)
    worker.end(m.FinishedRollout(rollout, False, "rejected"))
    schedule.report(schedule.workers.index(worker), "answered")


def deliver(schedule: Schedule, prompt: str, *, acknowledged: bool = False) -> None:
    """The trainer has the prompt's rollout; its worker was not told so, unless that is `acknowledged`."""
    found = running(schedule, prompt)
    schedule.pick_of = lambda pick, names: found  # type: ignore[method-assign]
    schedule.push(0)
    schedule.arrive(0, 0, acknowledged)
    del schedule.pick_of


def one_step(schedule: Schedule) -> None:
    """Worker 1 plays a rollout, and a step trains it."""
    schedule.allocate(1, 1, "answered")
    (prompt,) = (each.prompt_id for each in schedule.workers[1].running.values())
    deliver(schedule, prompt, acknowledged=True)
    schedule.collect()
    schedule.train(dies=False)
    schedule.report_step()


def played_twice(steps: int = 0) -> tuple[Schedule, str]:
    """A rank has a rollout of the prompt whose worker died; the successor plays the prompt again."""
    schedule = begun()
    for _ in range(steps):
        one_step(schedule)
    schedule.allocate(0, 1, "answered")
    (prompt,) = schedule.workers[0].in_hand
    deliver(schedule, prompt)
    schedule.a_worker_dies(0, True, 0)
    play_again(schedule, prompt)
    return schedule, prompt


def delivered_twice() -> Schedule:
    """The ranks have two rollouts of a prompt: worker 0, whose lease lapsed, plays on while 1 plays it again."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    schedule.a_lease_lapses(0)
    schedule.allocate(1, 1, "answered")
    first, second = ([each.prompt_id for each in worker.running.values()] for worker in schedule.workers)
    assert first == second
    schedule.push(1)
    schedule.arrive(0, 0, True)
    schedule.push(0)
    schedule.arrive(0, 0, True)
    return schedule


def play_again(schedule: Schedule, prompt: str) -> None:
    """Let worker 0 ask for a rollout at a time until it plays the prompt."""
    for _ in range(4):
        if prompt not in schedule.workers[0].in_hand:
            schedule.allocate(0, 1, "answered")
    assert prompt in schedule.workers[0].in_hand


def dropped_lines(schedule: Schedule) -> list[tuple[str, str]]:
    """Reason and fate of the prompt of every drop in the ledger that counts."""
    schedule.loop.run_until_complete(schedule.ledger.written())

    def find(place: str, what: str) -> None:
        raise AssertionError(what)

    lines = [entry.line for entry in surviving(read_ledger(schedule.folder, find), find)]
    return [(line.reason, line.prompt.value) for line in lines if isinstance(line, Dropped)]


def ids_in_buffer(schedule: Schedule) -> list[str]:
    return [record.rollout_id for record in schedule.trainer.buffer.live()]


@pytest.mark.parametrize("asked", ["first", "last"])
@pytest.mark.parametrize("again", ["trained", "dropped for good"])
def test_what_a_given_up_worker_delivers_late_does_not_count_and_its_prompt_is_settled_once(
    again: str, asked: str
) -> None:
    """The master asks what counts before the second attempt ends, or after that."""
    schedule, prompt = played_twice()
    _, second = running(schedule, prompt)
    if asked == "first":
        schedule.collect()
        assert not len(schedule.trainer.buffer)
        assert not schedule.held, "the rank has freed it"
    if again == "trained":
        deliver(schedule, prompt, acknowledged=True)
        schedule.collect()
        assert ids_in_buffer(schedule) == [second]
    else:
        drop_for_good(schedule, prompt)
    schedule.collect()
    schedule.train(dies=False)
    schedule.report_step()
    lost = ("worker_died", "returned")
    if again == "trained":
        assert (schedule.history, schedule.given_up) == ([[prompt]], set())
        assert dropped_lines(schedule) == [lost]
    else:
        assert (schedule.history, schedule.given_up) == ([], {prompt})
        assert dropped_lines(schedule) == [lost, ("rejected", "given_up")]
    schedule.teardown()


@pytest.mark.parametrize("settled", ["dropped for good before the last step", "dropped for good since", "played again"])
def test_a_brain_that_goes_on_trains_nothing_of_what_the_ranks_hold_before_it_has_asked(settled: str) -> None:
    """The one before it died before it asked; the ranks hold an attempt that was lost. What became of its prompt counts
    if it came before the last step.
    """
    schedule, prompt = played_twice(steps=1)
    (late,), schedule.inbox = schedule.inbox, []
    if settled != "played again":
        drop_for_good(schedule, prompt)
    if settled == "dropped for good before the last step":
        one_step(schedule)
    steps = len(schedule.history)
    schedule.the_brain_dies()
    schedule.collect()
    assert late.rollout_id in [record.rollout_id for record in schedule.inbox], "it waits at the ranks"
    schedule.train(dies=False)
    assert schedule.trainer.version == steps
    schedule.all_speak()
    counts = settled == "dropped for good since"
    assert (late.rollout_id in ids_in_buffer(schedule)) == counts
    schedule.train(dies=False)
    schedule.report_step()
    assert ([prompt] in schedule.history) == counts
    assert schedule.given_up == ({prompt} if settled == "dropped for good before the last step" else set())
    schedule.teardown()


@pytest.mark.parametrize("asked", [False, True])
def test_a_suspect_that_was_delivered_before_its_worker_died_is_trained_or_dropped_not_both(asked: bool) -> None:
    """`asked`: the master has asked what counts by then, so the suspect had ended."""
    schedule = begun(eta=3)
    schedule.allocate(0, 1, "answered")
    (prompt,) = schedule.workers[0].in_hand
    for _ in range(2):
        schedule.a_worker_dies(0, True, 0)
        schedule.allocate(0, 1, "answered")
        while {prompt} != schedule.workers[0].in_hand:
            for other in schedule.workers[0].in_hand - {prompt}:
                drop_for_good(schedule, other)
            schedule.allocate(0, 1, "answered")
    deliver(schedule, prompt)
    if asked:
        schedule.collect()
    schedule.a_worker_dies(0, True, 0)
    schedule.collect()
    schedule.train(dies=False)
    schedule.report_step()
    crashed = ("crashed_worker", "given_up") in dropped_lines(schedule)
    assert (schedule.history, crashed) == (([[prompt]], False) if asked else ([], True))
    schedule.teardown()


def only_the_trainer_has_it(schedule: Schedule) -> None:
    """A rank has it, its worker told the manager and forgot it, and the master has not polled; the manager dies."""
    schedule.allocate(0, 1, "answered")
    schedule.push(0)
    schedule.arrive(0, 0, True)
    schedule.report(0, "answered")
    assert not schedule.workers[0].held.all()
    schedule.the_brain_dies()
    schedule.all_speak()
    assert schedule.service.gate.counts().finished_untrained == 1, "it is played again"


def a_grant_is_read_late(schedule: Schedule) -> None:
    """A grant of the dead manager is read after the worker has opened its session with the next one."""
    schedule.allocate(0, 1, "reply late")
    schedule.the_brain_dies()
    schedule.all_speak()
    schedule.a_reply_arrives_late(0)
    schedule.counts_balance_and_nothing_is_trained_twice()


def one_speaks_late(schedule: Schedule) -> None:
    """A worker holds a rollout, and another one speaks before it."""
    schedule.allocate(0, 1, "answered")
    schedule.the_brain_dies()
    schedule.open_session(1, "answered")
    schedule.report_step()
    schedule.allocate(1, 1, "answered")
    schedule.all_speak()
    running = sum(len(worker.running) for worker in schedule.workers[:2])
    assert schedule.service.gate.live.running_count == running


def test_an_end_counts_whose_worker_is_replaced_before_the_gate_opens() -> None:
    """The ranks were polled before the trajectory arrived: only the worker's process that died knew of it."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    (prompt,) = schedule.workers[0].in_hand
    schedule.the_brain_dies()
    schedule.report_step()
    schedule.open_session(0, "answered")
    deliver(schedule, prompt, acknowledged=True)
    schedule.allocate(0, 1, "answered")
    schedule.a_worker_dies(0, by_status=False, on_its_way=0)
    schedule.all_speak()
    schedule.collect()
    assert schedule.service.gate.counts().finished_untrained == 1
    schedule.teardown()


def no_poll(patch: pytest.MonkeyPatch) -> None:
    begins = Schedule.the_run_begins

    def unpolled(self: Schedule) -> None:
        waiting, self.inbox = self.inbox, []
        begins(self)
        self.inbox = waiting

    patch.setattr(Schedule, "the_run_begins", unpolled)


def no_sessions(patch: pytest.MonkeyPatch) -> None:
    call = Schedule.call
    patch.setattr(Schedule, "call_as", lambda self, worker, answer, then, fate: call(self, answer, then, fate))


def early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingReports, "is_complete", property(lambda self: self.run is not None))


@pytest.mark.parametrize(
    ("play", "without"),
    [(only_the_trainer_has_it, no_poll), (a_grant_is_read_late, no_sessions), (one_speaks_late, early)],
    ids=["poll of the ranks", "sessions", "gate that waits for all"],
)
def test_each_part_of_a_managers_rebuilding_is_needed(
    play: Callable[[Schedule], None], without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = begun()
    play(schedule)
    schedule.teardown()
    without(monkeypatch)
    broken = begun()
    with pytest.raises(AssertionError):
        play(broken)


WORKER: dict[str, Any] = {"worker": "rollout_worker/0"}


def record(name: str, version: int) -> RolloutRecord:
    sizes = {"lengths": (2,), "generated": (1,), "rewards": (1.0,), "truncated": (False,), "episodes": (1,)}
    tokens = {"oldest_version": version, "version_tokens": {version: 1}}
    return msgspec.convert(
        {"rollout_id": name, "prompt_id": "e0-0", "order": 0, "head": 0, **tokens, **sizes}, RolloutRecord
    )


class Manager:
    """The real service with one worker, whose rollouts the trainer has at once."""

    def __init__(self) -> None:
        self.service = ManagerService(
            batch_size=1,
            max_staleness=1,
            routing="least_requests",
            lease_s=1e9,
            clock=lambda: 0.0,
            order=DataOrder(1, 0),
        )
        self.service.begin(m.RunBegin())

    def admit(self, rollout: str) -> list[str]:
        """The prompts that are played."""
        reply = asyncio.run(self.service.allocate_rollout(m.AllocateRequest(**WORKER, rollouts=[rollout])))
        return [granted.prompt_id for granted in reply.granted]

    def play(self, rollout: str) -> list[str]:
        prompts = self.admit(rollout)
        assert self.received(record(rollout, 0)) == []
        self.finish(m.FinishedRollout(rollout, True))
        return prompts

    def finish(self, ended: m.FinishedRollout) -> None:
        asyncio.run(self.service.finish_rollout(m.FinishRequest(**WORKER, finished=[ended])))

    def received(self, *records: RolloutRecord) -> list[str]:
        """The rollouts that do not count."""
        return asyncio.run(self.service.received(m.ReceivedReport(list(map(received, records))))).refused

    def train(self, version: int, rollout: str) -> None:
        asyncio.run(self.service.consumed(m.ConsumedReport(version, [trained_rollout(record(rollout, 0))])))

    def report(self, buffer: SampleBuffer, version: int) -> None:
        dropped = [drop.message for drop in buffer.drops]
        buffer.drops.clear()
        asyncio.run(self.service.consumed(m.ConsumedReport(version, [], dropped)))


def test_a_stale_attempt_that_is_received_again_does_not_count_and_the_next_one_does() -> None:
    """Another rank has a copy of it."""
    manager = Manager()
    assert manager.play("r1") == ["e0-0"]
    manager.service.routes_changed(2)
    manager.service.gate.trained_version = 2
    first = SampleBuffer(1, 1, OnStale.drop)
    first.add([record("r1", 0)])
    first.expire(2)
    manager.report(first, 2)
    assert manager.play("r2") == ["e0-0"]
    assert manager.received(record("r1", 0), record("r2", 2)) == ["r1"]
    manager.train(3, "r2")
    assert manager.received(record("r1", 0), record("r2", 2)) == ["r1", "r2"]
    assert manager.admit("r3") == ["e1-0"]


@pytest.mark.parametrize("deaths", range(3))
def test_a_rollout_that_was_refused_does_not_come_back_at_the_next_manager(deaths: int) -> None:
    """Its worker was silent for a while, and holds its end when the next manager asks what there is."""
    schedule = delivered_twice()
    first, second = (each.held.all()[0].granted.rollout_id for each in schedule.workers)
    schedule.collect()
    assert ids_in_buffer(schedule) == [second]
    schedule.report_step()
    for _ in range(deaths):
        schedule.the_brain_dies()
        schedule.all_speak()
    schedule.collect()
    gate = schedule.service.gate
    assert list(gate.live) == [second]
    assert schedule.workers[0].held.all(), "it has not reported the end yet"
    schedule.report(0, "answered")
    assert list(gate.live) == [second]
    assert gate.has_ended(first)
    schedule.teardown()


@pytest.mark.parametrize("another_dies", [False, True])
def test_of_two_rollouts_of_a_prompt_that_a_manager_first_hears_of_as_it_begins_one_counts(another_dies: bool) -> None:
    """As above; the first manager died before it reported anything, and the next one did not wait for the workers."""
    schedule = delivered_twice()
    schedule.the_brain_dies()
    schedule.the_roll_is_called(over=True)
    schedule.report_step()
    assert schedule.service.begun
    if another_dies:
        schedule.the_brain_dies()
        schedule.all_speak()
        schedule.collect()
    counts = schedule.service.gate.counts()
    assert (counts.running, counts.finished_untrained, len(schedule.trainer.buffer)) == (0, 1, 1)
    schedule.train(dies=False)
    schedule.report_step()
    assert len(schedule.history) == 1
    schedule.teardown()


def test_a_stale_attempt_that_is_received_again_does_not_cost_the_next_one() -> None:
    """The brain that dropped it died before it freed it; the next one knows the version that the run continues at."""
    second = SampleBuffer(1, 1, OnStale.drop)
    second.expire(2)
    second.add([record("r1", 0), record("r2", 2)])
    assert [drop.record.rollout_id for drop in second.drops] == ["r1"]
    batch = second.take(2)
    assert batch is not None
    assert [each.rollout_id for each in batch.records] == ["r2"]


@pytest.mark.parametrize("first", ["the trainer", "the worker"])
def test_a_rollout_that_its_worker_says_failed_though_the_trainer_has_it_is_settled_by_who_speaks_first(
    first: str,
) -> None:
    """The acknowledgement was lost until the push timed out."""
    manager = Manager()
    assert manager.admit("r1") == ["e0-0"]
    failed = m.FinishedRollout("r1", False, "failed", return_prompt=True)
    if first == "the worker":
        manager.finish(failed)
        assert manager.received(record("r1", 0)) == ["r1"]
        assert manager.play("r2") == ["e0-0"]
        manager.train(1, "r2")
    else:
        assert manager.received(record("r1", 0)) == []
        manager.finish(failed)
        manager.train(1, "r1")
    counts = manager.service.gate.counts()
    assert (counts.trained, counts.balanced) == (1, True)
    manager.service.routes_changed(1)
    assert manager.admit("r3") == ["e1-0"], "its prompt is used once"


def one_runs_on(schedule: Schedule, *, dies: bool) -> None:
    """A rollout of version 0 runs on, and the second step would make it expire; the manager may die meanwhile."""
    schedule.allocate(1, 1, "answered")
    assert schedule.workers[1].running
    for _ in range(2):
        schedule.allocate(0, 1, "answered")
        (prompt,) = schedule.workers[0].in_hand
        deliver(schedule, prompt, acknowledged=True)
        schedule.report(0, "answered")
        schedule.collect()
        if dies:
            schedule.the_brain_dies()
            schedule.all_speak()
        schedule.train(dies=False)
        schedule.report_step()
        schedule.the_server_updates(2)


@pytest.mark.parametrize("dies", [False, True], ids=["one manager", "three managers"])
def test_a_step_that_would_make_a_running_rollout_expire_waits_whichever_manager_began_it(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = begun(eta=1, on_stale=OnStale.wait)
    one_runs_on(schedule, dies=dies)
    assert schedule.trainer.version == 1
    (prompt,) = schedule.workers[1].in_hand
    deliver(schedule, prompt, acknowledged=True)
    schedule.report(1, "answered")
    schedule.collect()
    schedule.train(dies=False)
    schedule.report_step()
    assert [prompt] in schedule.history
    schedule.teardown()
    monkeypatch.setattr(StalenessGate, "_blocking_versions", lambda self, step: [])
    with pytest.raises(AssertionError, match="the step did not wait for what will expire"):
        one_runs_on(begun(eta=1, on_stale=OnStale.wait), dies=dies)


def test_a_rollout_that_no_process_had_as_the_manager_began_does_not_count() -> None:
    """Its worker had died after the poll of the ranks; its trajectory came then, and its prompt is trained once."""
    schedule = begun()
    schedule.allocate(1, 1, "answered")
    ((first, granted),) = schedule.workers[1].running.items()
    schedule.push(0)
    schedule.the_brain_dies()
    schedule.report_step()
    schedule.a_worker_dies(1, by_status=True, on_its_way=1)
    assert first in [record.rollout_id for record in schedule.inbox]
    schedule.all_speak()
    assert not schedule.held, "the rank has freed it"
    assert schedule.service.gate.outcome(first) == WORKER_LOST
    schedule.allocate(0, 1, "answered")
    _, second = running(schedule, granted.prompt_id)
    schedule.the_brain_dies()
    schedule.all_speak()
    deliver(schedule, granted.prompt_id, acknowledged=True)
    schedule.train(dies=False)
    assert schedule.trainer.in_step == [second]
    schedule.report_step()
    assert dropped_lines(schedule) == []
    schedule.teardown()


POINTS = ("trained", "recorded", "complete in memory", "announced")


@pytest.mark.parametrize("point", POINTS)
def test_a_death_costs_the_step_until_its_state_is_complete_and_then_none(point: str) -> None:
    """A step that it costs is trained again on the same rollouts, which the ranks still have."""
    schedule = begun()
    one_step(schedule)
    schedule.allocate(1, 1, "answered")
    ((rollout, granted),) = schedule.workers[1].running.items()
    deliver(schedule, granted.prompt_id, acknowledged=True)
    schedule.train(dies=False)
    moves = (schedule.the_gate_records_the_step, schedule.the_state_is_complete, schedule.the_version_is_announced)
    for move in moves[: POINTS.index(point)]:
        move()
    kept = point in POINTS[2:]
    schedule.the_brain_dies()
    assert schedule.trainer.version == len(schedule.history) == 1 + kept
    schedule.all_speak()
    assert schedule.announced == 1 + kept, "a version that is complete is announced, by whichever brain"
    assert ids_in_buffer(schedule) == ([] if kept else [rollout])
    assert schedule.service.gate.counts().trained == 1 + kept
    schedule.train(dies=False)
    schedule.report_step()
    assert [granted.prompt_id] in schedule.history
    assert len(schedule.history) == 2
    schedule.teardown()


def test_the_reply_to_a_step_is_the_same_each_time() -> None:
    """The first one was lost, and a prompt was dropped for good since: that is not of the step."""
    schedule = begun()
    schedule.allocate(0, 2, "answered")
    first, second = (each.prompt_id for each in schedule.workers[0].running.values())
    deliver(schedule, first, acknowledged=True)
    schedule.train(dies=False)
    schedule.the_gate_records_the_step(lost=True)
    line = schedule.ledger.lines
    drop_for_good(schedule, second)
    schedule.the_gate_records_the_step()
    assert schedule.trainer.checkpoint.line == line
    schedule.the_state_is_complete()
    assert schedule.given_up == {second}
    schedule.the_brain_dies()
    schedule.all_speak()
    assert (schedule.history, schedule.given_up) == ([[first]], set())
    schedule.teardown()


def test_a_checkpoint_that_was_being_written_as_the_brain_died_is_as_if_it_had_not_begun() -> None:
    schedule = begun()
    one_step(schedule)
    schedule.save()
    schedule.the_checkpoint_is_complete()
    one_step(schedule)
    schedule.save()
    schedule.the_brain_dies()
    assert schedule.trainer.version == 2
    schedule.the_run_dies()
    assert schedule.trainer.version == len(schedule.history) == 1
    schedule.teardown()


def test_what_was_measured_up_to_the_last_step_survives_a_death() -> None:
    schedule = Schedule()
    schedule.begin(batch=1, eta=2, on_stale=OnStale.drop, stops_early=False, skips=True)
    for _ in range(3):
        schedule.fair_turn(0)
    measured = set(map(tuple, schedule.trainer.checkpoint.curriculum))
    assert len(measured) >= 3
    schedule.the_brain_dies()
    schedule.all_speak()
    curriculum = schedule.service.rollouts.curriculum
    assert curriculum is not None
    assert measured <= set(map(tuple, curriculum.state()))
    schedule.teardown()


def fail(schedule: Schedule, *, as_next_attempt: bool, fate: str = "answered") -> None:
    """The rollout of worker 0 is dropped, and its prompt tried again."""
    (rollout,) = schedule.workers[0].running
    schedule.workers[0].running.pop(rollout)
    schedule.workers[0].end(m.FinishedRollout(rollout, False, "failed", True, as_next_attempt))
    schedule.report(0, fate)


def test_the_tries_of_a_prompt_that_waits_survive_a_death() -> None:
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    fail(schedule, as_next_attempt=True)
    one_step(schedule)
    schedule.the_brain_dies()
    schedule.all_speak()
    assert schedule.service.rollouts.queue.waiting(0) == NextTry(0, attempt=1)
    schedule.teardown()


def test_a_rollout_that_had_ended_before_the_last_step_does_not_end_again() -> None:
    """Its worker has not heard that the manager knows; the audit would find two admissions."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    fail(schedule, as_next_attempt=True, fate="reply lost")
    one_step(schedule)
    assert schedule.workers[0].held.all()
    schedule.the_brain_dies()
    schedule.all_speak()
    assert dropped_lines(schedule) == [("failed", "returned")]
    assert schedule.service.gate.counts().dropped == {"failed": 1}
    schedule.teardown()


def test_the_tries_of_a_prompt_survive_a_death_of_all_who_had_its_rollout() -> None:
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    fail(schedule, as_next_attempt=False)
    schedule.allocate(0, 1, "answered")
    one_step(schedule)
    schedule.the_brain_dies()
    schedule.a_worker_dies(0, by_status=True, on_its_way=0)
    schedule.all_speak()
    assert schedule.service.rollouts.queue.waiting(0) == NextTry(0, failures=1)
    schedule.allocate(0, 1, "answered")
    (granted,) = schedule.workers[0].running.values()
    assert (granted.order, granted.failures) == (0, 1)
    schedule.teardown()


@pytest.mark.parametrize("speaks", ["in time", "late"])
def test_what_a_rank_has_freed_since_the_last_step_takes_no_place_after_a_death(speaks: str) -> None:
    """Its worker has delivered it, and no manager has confirmed that; the prompt was played elsewhere meanwhile."""
    schedule = begun(eta=0)
    schedule.allocate(0, 1, "answered")
    ((first, granted),) = schedule.workers[0].running.items()
    schedule.a_lease_lapses(0)
    deliver(schedule, granted.prompt_id, acknowledged=True)
    schedule.collect()
    assert not schedule.held, "the rank has freed it"
    schedule.the_brain_dies()
    if speaks == "late":
        schedule.the_roll_is_called(over=True)
        schedule.report_step()
        assert schedule.service.begun
    schedule.all_speak()
    assert not schedule.workers[0].running
    assert first not in schedule.service.gate.live
    assert schedule.service.gate.capacity == 1
    schedule.teardown()


def test_what_was_refused_before_its_worker_spoke_does_not_count_when_it_comes_again() -> None:
    """The rank's acknowledgement was lost, so the worker still has it; the trainer would free it as a copy."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    ((first, granted),) = schedule.workers[0].running.items()
    schedule.the_brain_dies()
    schedule.the_roll_is_called(over=True)
    schedule.report_step()
    deliver(schedule, granted.prompt_id)
    schedule.collect()
    assert not schedule.held, "the rank has freed it"
    schedule.all_speak()
    schedule.arrive(0, 0, True)
    schedule.collect()
    assert (ids_in_buffer(schedule), schedule.service.gate.counts().finished_untrained) == ([], 0)
    assert first not in schedule.service.gate.live
    schedule.teardown()


def test_the_next_try_of_a_prompt_counts_and_not_the_one_whose_end_no_manager_has_confirmed() -> None:
    """A manager has heard that worker 0 dropped its rollout, but its reply was lost; worker 1 plays the next try."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    ((first, granted),) = schedule.workers[0].running.items()
    schedule.workers[0].running.pop(first)
    schedule.workers[0].end(m.FinishedRollout(first, False, "failed", return_prompt=True))
    schedule.report(0, "reply lost")
    schedule.allocate(1, 1, "answered")
    worker, second = running(schedule, granted.prompt_id)
    assert worker is schedule.workers[1]
    schedule.the_brain_dies()
    schedule.all_speak()
    assert list(schedule.service.gate.live) == [second]
    schedule.allocate(0, 3, "answered")
    running(schedule, granted.prompt_id)  # one plays it
    schedule.teardown()


@pytest.mark.parametrize("ends", ["after it was lost", "before"])
def test_a_request_of_a_lost_rollout_is_placed_until_its_worker_has_reported_the_end(ends: str) -> None:
    """A call that arrives after that would load a server for good."""
    schedule = begun()
    schedule.allocate(0, 1, "answered")
    (granted,) = schedule.workers[0].running.values()
    routes = schedule.service.routes.router_of("past")

    def lapse() -> None:
        schedule.a_lease_lapses(0)
        schedule.schedule(0, "answered", "past")
        assert routes.placed == 1, "its worker need not know that it is lost"

    if ends == "after it was lost":
        lapse()
    schedule.schedule(0, "late", "past")
    deliver(schedule, granted.prompt_id, acknowledged=True)
    schedule.report(0, "answered")
    if ends == "before":
        schedule.a_lease_lapses(0)
    for _ in list(schedule.network):
        schedule.a_call_arrives_late(0, again=False)
    assert routes.placed == 0
    schedule.teardown()

"""The gate keeps its promises under any interleaving of starts, finishes, drops, deaths, reports and train steps."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.manager.rollouts.live_rollouts import RolloutTicket
from asyncrl.manager.rollouts.staleness_gate import WORKER_LOST, StalenessGate
from tests.examples import examples

PICK = st.integers(0, 10_000)


class TrainerAndWorkers(RuleBasedStateMachine):
    """Workers, servers and a trainer around a gate. Tokens are as old as they can be: of the version of admission.

    `delivered` are the rollouts at the trainer, `unreported` those whose finish the gate has not been told yet.
    """

    @initialize(batch=st.integers(1, 4), eta=st.integers(0, 4))
    def begin(self, batch: int, eta: int) -> None:
        self.gate = StalenessGate(batch, eta, retired_kept=64)
        self.trained_version = 0
        self.running: dict[str, int] = {}
        self.owner: dict[str, str] = {}
        self.delivered: dict[str, int] = {}
        self.unreported: list[str] = []
        self.history: list[str] = []
        self.submitted = 0
        self.stale_drops = 0

    @rule(worker=st.sampled_from(["w0", "w1"]), wanted=st.integers(1, 6))
    def start(self, worker: str, wanted: int) -> None:
        for _ in range(wanted):
            name = f"r{self.submitted}"
            version = self.gate.start(RolloutTicket(name, worker))
            if version is None:
                return
            assert version == self.gate.version
            self.submitted += 1
            self.running[name] = version
            self.owner[name] = worker
            assert self.gate.counted <= self.gate.limit

    @precondition(lambda self: self.running)
    @rule(pick=PICK, reported=st.booleans())
    def finish(self, pick: int, reported: bool) -> None:
        name = sorted(self.running)[pick % len(self.running)]
        self.delivered[name] = self.running.pop(name)
        if reported:
            self.gate.finish(name)
        else:
            self.unreported.append(name)
        self.history.append(name)

    @precondition(lambda self: self.unreported)
    @rule(pick=PICK)
    def report_late(self, pick: int) -> None:
        self.gate.finish(self.unreported.pop(pick % len(self.unreported)))

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def reject(self, pick: int) -> None:
        name = sorted(self.running)[pick % len(self.running)]
        del self.running[name]
        was_live = name in self.gate.live
        assert (self.gate.drop(name, "rejected") is not None) == was_live
        self.history.append(name)

    @rule(worker=st.sampled_from(["w0", "w1"]), dead=st.booleans())
    def lease_runs_out(self, worker: str, dead: bool) -> None:
        """A worker that is not dead goes on with what it had."""
        for name in self.gate.live.running_of(worker):
            self.gate.lose(name)
        for name in [name for name in self.running if dead and self.owner[name] == worker]:
            del self.running[name]
            self.history.append(name)

    @precondition(lambda self: self.delivered)
    @rule(pick=PICK)
    def trainer_drops(self, pick: int) -> None:
        """For example as a duplicate; the worker's own report may be on its way, and its lease may have run out."""
        name = sorted(self.delivered)[pick % len(self.delivered)]
        del self.delivered[name]
        self.gate.drop(name, "duplicate_prompt")

    @rule()
    def train_step(self) -> None:
        """Oldest first, with the check at consumption; finish reports of what is trained may be on their way."""
        step = self.trained_version
        stale = [name for name, version in self.delivered.items() if step - version > self.gate.max_staleness]
        for name in stale:
            del self.delivered[name]
            self.gate.drop(name, "stale")
        self.stale_drops += len(stale)
        if len(self.delivered) < self.gate.batch_size or not self.may_train(step):
            return
        oldest_first = sorted(self.delivered, key=lambda name: (self.delivered[name], int(name[1:])))
        batch = oldest_first[: self.gate.batch_size]
        for name in batch:
            assert step - self.delivered.pop(name) <= self.gate.max_staleness
        self.trained_version += 1
        self.gate.train(self.trained_version, batch)

    def may_train(self, step: int) -> bool:
        return True

    @rule(share=st.integers(0, 3))
    def servers_update(self, share: int) -> None:
        """Servers reach some version between theirs and the newest; skipping is fine."""
        lag = max(0, self.trained_version - self.gate.version)
        self.gate.advance(self.gate.version + lag * share // 3)

    @precondition(lambda self: self.history)
    @rule(pick=PICK, message=st.sampled_from(["finish", "drop", "train"]))
    def repeat_a_message(self, pick: int, message: str) -> None:
        """A message that was sent before arrives again; only those that the sender would really send."""
        name = self.history[pick % len(self.history)]
        if name in self.delivered or name in self.unreported:
            return
        before = self.gate.books()
        if message == "finish" and before.dropped.get(WORKER_LOST, 0) == 0:
            self.gate.finish(name)
        elif message == "drop":
            if self.gate.lost(name) is not None:  # its reason replaces the loss, once
                self.gate.drop(name, "rejected")
                assert self.gate.books().submitted == before.submitted
                before = self.gate.books()
                assert self.gate.outcome(name) == "rejected"
            self.gate.drop(name, "rejected")
        elif message == "train" and self.trained_version:
            self.gate.train(self.trained_version, [])
        assert self.gate.books() == before

    @invariant()
    def books_balance(self) -> None:
        books = self.gate.books()
        assert books.balanced
        assert books.submitted == self.submitted
        assert books.trained == self.trained_version * self.gate.batch_size
        assert min(books.running, books.finished_untrained, books.abandoned, *books.dropped.values(), 0) >= 0

    @invariant()
    def every_rollout_at_the_trainer_is_counted(self) -> None:
        books = self.gate.books()
        lost = books.dropped.get(WORKER_LOST, 0)
        assert books.running + books.finished_untrained + lost >= len(self.running) + len(self.delivered)

    @invariant()
    def no_place_is_lost(self) -> None:
        """Finished rollouts of the gate's count are at the trainer."""
        assert self.gate.books().finished_untrained <= len(self.delivered)

    @invariant()
    def never_deadlocks(self) -> None:
        """If nothing runs, the servers are at the trainer's version and it lacks a batch, a rollout may start."""
        books = self.gate.books()
        if books.running == 0 and self.gate.version == self.trained_version:
            assert len(self.delivered) >= self.gate.batch_size or self.gate.capacity > 0


class ReportsArrive(TrainerAndWorkers):
    """The same, where the gate learns of each finish before its worker can die, so that no place is given twice."""

    @precondition(lambda self: self.running)
    @rule(pick=PICK, reported=st.just(True))
    def finish(self, pick: int, reported: bool) -> None:
        name = sorted(self.running)[pick % len(self.running)]
        self.delivered[name] = self.running.pop(name)
        self.gate.finish(name)
        self.history.append(name)

    @rule(worker=st.sampled_from(["w0", "w1"]), dead=st.just(True))
    def lease_runs_out(self, worker: str, dead: bool) -> None:
        super().lease_runs_out(worker, dead)

    @invariant()
    def nothing_expires(self) -> None:
        assert self.stale_drops == 0


class WaitingTrainer(ReportsArrive):
    """Under `on_stale=wait` nothing expires, and only running rollouts block."""

    def may_train(self, step: int) -> bool:
        return not self.gate.blocking(step)

    @invariant()
    def what_blocks_is_running(self) -> None:
        assert set(self.gate.blocking(self.trained_version)) <= set(self.running)


class FifoTrainer(ReportsArrive):
    """Consuming strictly in the order of admission nothing is ever too old, with no check at consumption."""

    def may_train(self, step: int) -> bool:
        order = sorted([*self.running, *self.delivered], key=lambda name: int(name[1:]))
        return all(name in self.delivered for name in order[: self.gate.batch_size])


TrainerAndWorkers.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
WaitingTrainer.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
FifoTrainer.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
test_any_interleaving = TrainerAndWorkers.TestCase
test_any_interleaving_under_wait = WaitingTrainer.TestCase
test_any_interleaving_in_order = FifoTrainer.TestCase


@settings(max_examples=examples(60))
@given(batch=st.integers(1, 3), eta=st.integers(0, 4), chance=st.randoms(use_true_random=False))
def test_waiting_never_lets_a_rollout_expire_when_the_newest_finish_first(batch: int, eta: int, chance: Random) -> None:
    """The hardest load for `blocking`: starts as many as allowed, and mostly the newest rollouts finish."""
    gate = StalenessGate(batch, eta)
    running: dict[str, int] = {}
    delivered: dict[str, int] = {}
    step = started = 0
    while step < 30:
        while (version := gate.start(RolloutTicket(f"r{started}", "w0"))) is not None:
            running[f"r{started}"] = version
            started += 1
        if running and (chance.random() < 0.7 or len(delivered) < batch):
            name = list(running)[-1 - int(len(running) * chance.random() ** 4)]
            delivered[name] = running.pop(name)
            gate.finish(name)
        if len(delivered) >= batch and not gate.blocking(step):
            oldest_first = sorted(delivered, key=lambda name: delivered[name])[:batch]
            assert all(step - delivered.pop(name) <= eta for name in oldest_first)
            step += 1
            gate.train(step, oldest_first)
            assert all(step - version <= eta for version in [*running.values(), *delivered.values()])
        if chance.random() < 0.8 or not running:
            gate.advance(step)

"""The gate keeps its promises under any interleaving of starts, finishes, drops, deaths, reports and train steps."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.manager.rollouts.staleness_gate import WORKER_LOST, LiveRollout, StalenessGate
from tests.examples import examples

PICK = st.integers(0, 10_000)


class TrainerAndWorkers(RuleBasedStateMachine):
    """Workers, servers and a trainer around a gate. Tokens are as old as they can be: of the version of admission.

    `running` are the rollouts that workers play, `arrived` those that a rank has and the gate was not asked about,
    `received` those that count. `lost` are those that were given up while they ran, which their workers may deliver.
    """

    @initialize(batch=st.integers(1, 4), eta=st.integers(0, 4))
    def begin(self, batch: int, eta: int) -> None:
        self.gate = StalenessGate(batch, eta, retired_kept=64)
        self.trained_version = 0
        self.running: dict[str, int] = {}
        self.owner: dict[str, str] = {}
        self.arrived: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.lost: set[str] = set()
        self.submitted = 0
        self.stale_drops = 0

    @rule(worker=st.sampled_from(["w0", "w1"]), wanted=st.integers(1, 6))
    def start(self, worker: str, wanted: int) -> None:
        for _ in range(wanted):
            name = f"r{self.submitted}"
            version = self.gate.start(LiveRollout(name, worker))
            if version is None:
                return
            assert version == self.gate.version
            self.submitted += 1
            self.running[name] = version
            self.owner[name] = worker
            assert self.gate.counted <= self.gate.limit

    @precondition(lambda self: self.running)
    @rule(pick=PICK, asked=st.booleans())
    def deliver(self, pick: int, asked: bool) -> None:
        name = sorted(self.running)[pick % len(self.running)]
        self.arrived[name] = self.running.pop(name)
        if asked:
            self.ask(name)

    @precondition(lambda self: self.arrived)
    @rule(pick=PICK)
    def ask_later(self, pick: int) -> None:
        self.ask(sorted(self.arrived)[pick % len(self.arrived)])

    def ask(self, name: str) -> None:
        version, counts = self.arrived.pop(name), name in self.gate.live
        assert counts == (name not in self.lost)
        assert (self.gate.finish(name) is not None) == counts
        if counts:
            self.received[name] = version

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def reject(self, pick: int) -> None:
        name = sorted(self.running)[pick % len(self.running)]
        del self.running[name]
        assert (self.gate.drop(name, "rejected") is not None) == (name not in self.lost)

    @rule(worker=st.sampled_from(["w0", "w1"]), dead=st.booleans())
    def lease_runs_out(self, worker: str, dead: bool) -> None:
        """A worker that is not dead goes on with what it had; a rank may have what a dead one delivered."""
        for name in [each.rollout_id for each in self.gate.live.running_of(worker)]:
            assert self.gate.drop(name, WORKER_LOST) is not None
            self.lost.add(name)
        for name in [name for name in self.running if dead and self.owner[name] == worker]:
            del self.running[name]

    @precondition(lambda self: self.received)
    @rule(pick=PICK)
    def trainer_drops(self, pick: int) -> None:
        name = sorted(self.received)[pick % len(self.received)]
        del self.received[name]
        assert self.gate.drop(name, "failed") is not None

    @rule()
    def train_step(self) -> None:
        """Oldest first, with the check at consumption."""
        step = self.trained_version
        stale = [name for name, version in self.received.items() if step - version > self.gate.max_staleness]
        for name in stale:
            del self.received[name]
            self.gate.drop(name, "stale")
        self.stale_drops += len(stale)
        if len(self.received) < self.gate.batch_size or not self.may_train(step):
            return
        oldest_first = sorted(self.received, key=lambda name: (self.received[name], int(name[1:])))
        batch = oldest_first[: self.gate.batch_size]
        for name in batch:
            assert step - self.received.pop(name) <= self.gate.max_staleness
        self.trained_version += 1
        self.gate.train(self.trained_version, batch)

    def may_train(self, step: int) -> bool:
        return True

    @rule(share=st.integers(0, 3))
    def servers_update(self, share: int) -> None:
        """Servers reach some version between theirs and the newest; skipping is fine."""
        lag = max(0, self.trained_version - self.gate.version)
        self.gate.advance(self.gate.version + lag * share // 3)

    @precondition(lambda self: self.submitted)
    @rule(pick=PICK, message=st.sampled_from(["finish", "drop", "train"]))
    def a_message_about_what_left_comes_late(self, pick: int, message: str) -> None:
        """Or about what has not left yet, if it was said before."""
        name = f"r{pick % self.submitted}"
        if name in self.gate.live and not (message == "finish" and name in self.received):
            return
        before = self.gate.counts()
        if message == "finish":
            assert self.gate.finish(name) is None
        elif message == "drop":
            assert self.gate.drop(name, "rejected") is None
        else:
            self.gate.train(self.trained_version, [name])
        assert self.gate.counts() == before

    @property
    def counted_and_running(self) -> set[str]:
        return (self.running.keys() | self.arrived.keys()) - self.lost

    @invariant()
    def counts_balance(self) -> None:
        counts = self.gate.counts()
        assert counts.balanced
        assert counts.submitted == self.submitted
        assert counts.trained == self.trained_version * self.gate.batch_size

    @invariant()
    def what_counts_is_there_and_what_is_there_counts(self) -> None:
        """No place is lost, and none is given twice."""
        counts = self.gate.counts()
        assert (counts.running, counts.finished_untrained) == (len(self.counted_and_running), len(self.received))
        assert set(self.gate.live) == self.counted_and_running | self.received.keys()
        assert counts.dropped.get(WORKER_LOST, 0) == len(self.lost)

    @invariant()
    def never_deadlocks(self) -> None:
        """If nothing runs, the servers are at the trainer's version and it lacks a batch, a rollout may start."""
        counts = self.gate.counts()
        if counts.running == 0 and self.gate.version == self.trained_version:
            assert len(self.received) >= self.gate.batch_size or self.gate.capacity > 0


class WaitingTrainer(TrainerAndWorkers):
    """Under `on_stale=wait` nothing expires, and only running rollouts block."""

    def may_train(self, step: int) -> bool:
        return not self.gate.blocking(step)

    @invariant()
    def what_blocks_is_running(self) -> None:
        assert set(self.gate.blocking(self.trained_version)) <= self.counted_and_running

    @invariant()
    def nothing_expires(self) -> None:
        assert self.stale_drops == 0


class FifoTrainer(TrainerAndWorkers):
    """Consuming strictly in the order of admission nothing is ever too old, with no check at consumption."""

    def may_train(self, step: int) -> bool:
        order = sorted([*self.counted_and_running, *self.received], key=lambda name: int(name[1:]))
        return all(name in self.received for name in order[: self.gate.batch_size])

    @invariant()
    def nothing_expires(self) -> None:
        assert self.stale_drops == 0


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
        while (version := gate.start(LiveRollout(f"r{started}", "w0"))) is not None:
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

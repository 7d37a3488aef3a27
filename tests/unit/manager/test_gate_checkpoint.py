"""The gate's state is in its checkpoint and with those who have its live rollouts: together they make it anew."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.comm.ended_rollouts import Dropped, RecentIds
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder, NextTry, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rollout_state import RolloutState
from asyncrl.manager.rollouts.staleness_gate import TRAINED
from asyncrl.manager.rollouts.workers import PendingReports
from tests.examples import examples
from tests.recorded_lines import RecordedLines

ROWS = 5
ORDER = DataOrder(ROWS, 3)
BATCHES = st.integers(1, 3)
STALENESS = st.integers(0, 2)
CHANCE = st.randoms(use_true_random=False)


class Worker:
    """A RolloutWorker's process.

    Attributes:
        held: rollouts of which it has not heard that the manager knows their end.
        running: those among them that it plays.
    """

    def __init__(self, index: int, incarnation: int = 0) -> None:
        self.index, self.incarnation, self.name = index, incarnation, f"rollout_worker/{index}"
        self.held: dict[str, m.HeldRollout] = {}
        self.running: set[str] = set()

    @property
    def report(self) -> m.HeldReport:
        return m.HeldReport(self.name, self.incarnation, list(self.held.values()))


class Kept(NamedTuple):
    """What a brain begins again with: the gate's checkpoint, as read back, and the ends that the ledger has by then."""

    version: int
    checkpoint: m.GateCheckpoint
    ended: dict[str, str]
    steps: int


class Run:
    """A gate's state with its workers, and ranks that have what arrived.

    `steps`: the prompts of each.
    """

    def __init__(self, batch: int, eta: int, chance: Random) -> None:
        self.batch, self.eta, self.chance = batch, eta, chance
        self.lines = RecordedLines()
        self.ended: dict[str, str] = {}
        self.state = self.made(0, m.GateCheckpoint(), {})
        self.workers = [Worker(0), Worker(1)]
        self.arrived: dict[str, m.ReceivedRollout] = {}
        self.version = self.count = 0
        self.steps: list[list[str]] = []
        self.trained_since: dict[str, m.ReceivedRollout] = {}
        self.keep()

    def made(self, version: int, checkpoint: m.GateCheckpoint, ended: dict[str, str]) -> RolloutState:
        known: RecentIds[str] = RecentIds(1000)
        for rollout, outcome in ended.items():
            known.put(rollout, outcome)
        return RolloutState(
            self.batch,
            self.eta,
            ORDER,
            self.lines,
            version=version,
            checkpoint=checkpoint,
            ended=known,
            curriculum=Curriculum(0.0, 1.0, 1, checkpoint.curriculum or ()),
        )

    # What happens.

    def play(self, count: int) -> None:
        moves = [self.admit, self.deliver, self.reject, self.receive, self.train, self.drop, self.serve, self.die]
        for move in self.chance.choices(moves, [8, 6, 3, 4, 4, 1, 3, 1], k=count):
            move()

    def admit(self) -> None:
        worker = self.chance.choice(self.workers)
        turn = self.state.next_for(worker.name) if self.state.gate.capacity else None
        if turn is None:
            return
        rollout, ref = f"r{self.count}", ORDER.ref(turn.order)
        self.count += 1
        self.state.admit(rollout, worker.name, turn)
        version = self.state.gate.version
        granted = m.GrantedRollout(rollout, ref.prompt_id, ref.order, ref.row, turn.attempt, turn.failures, version)
        worker.held[rollout] = m.HeldRollout(granted)
        worker.running.add(rollout)

    def deliver(self) -> None:
        """A trajectory arrives at a rank; its worker reports the end unless the acknowledgement is late."""
        if (found := self.some_running()) is None:
            return
        worker, rollout = found
        granted = worker.held[rollout].granted
        head = (rollout, granted.prompt_id, granted.order, granted.version)
        self.arrived[rollout] = m.ReceivedRollout(*head, tokens=4)
        if self.chance.random() < 0.8:
            self.end(worker, m.FinishedRollout(rollout, True, success=self.chance.choice([None, 0.0, 0.5])))

    def reject(self) -> None:
        if (found := self.some_running()) is not None:
            again, filtered = self.chance.random() < 0.7, self.chance.random() < 0.5
            worker, rollout = found
            ended = m.FinishedRollout(rollout, False, "rejected", again, filtered and again, success=0.25)
            self.end(worker, ended)

    def end(self, worker: Worker, ended: m.FinishedRollout) -> None:
        """The manager hears of it; the worker may not hear that."""
        worker.running.discard(ended.rollout_id)
        self.state.finish(ended)
        if self.chance.random() < 0.5:
            del worker.held[ended.rollout_id]
        else:
            worker.held[ended.rollout_id] = msgspec.structs.replace(worker.held[ended.rollout_id], end=ended)

    def some_running(self) -> tuple[Worker, str] | None:
        running = [(worker, rollout) for worker in self.workers for rollout in sorted(worker.running)]
        return self.chance.choice(running) if running else None

    def receive(self) -> None:
        """The master asks what counts of what has arrived, and has the ranks free the rest."""
        for rollout in list(self.arrived):
            if not self.state.receive(rollout, 4):
                del self.arrived[rollout]

    def train(self) -> None:
        self.receive()
        batch = sorted(self.arrived)[: self.batch]
        if len(batch) < self.batch:
            return
        self.version += 1
        self.state.train(self.version, [m.TrainedRollout(each, "", 0, {0: 1}, 1, 1, 1.0) for each in batch])
        self.steps.append([self.arrived[rollout].prompt_id for rollout in batch])
        for rollout in batch:
            self.trained_since[rollout] = self.arrived.pop(rollout)
            self.ended[rollout] = TRAINED

    def drop(self) -> None:
        self.receive()
        if self.arrived:
            rollout = self.chance.choice(sorted(self.arrived))
            del self.arrived[rollout]
            self.state.drop([m.DroppedRollout(rollout, "stale")])

    def serve(self) -> None:
        self.state.gate.advance(
            self.chance.randint(self.state.gate.version, max(self.version, self.state.gate.version))
        )

    def die(self) -> None:
        """A worker dies, or is silent and lives."""
        worker = self.chance.choice(self.workers)
        if self.chance.random() < 0.5:
            self.state.died(worker.name)
        else:
            self.workers[worker.index] = Worker(worker.index, worker.incarnation + 1)
            self.state.replaced(worker.name, killed=False)

    # A brain that begins again.

    def keep(self) -> None:
        """Keep the state of now; the ranks forget the trajectories of its steps."""
        drops = {line.rollout: line.reason for line in self.lines if isinstance(line, Dropped)}
        encoded = msgspec.json.encode(self.state.checkpoint())
        checkpoint = msgspec.json.decode(encoded, type=m.GateCheckpoint)
        self.ended |= drops
        self.kept = Kept(self.version, checkpoint, dict(self.ended), len(self.steps))
        self.trained_since.clear()

    def resumed(self) -> RolloutState:
        """The state that a new brain makes; the ranks have what they had, also what did not count."""
        kept = self.kept
        state = self.made(kept.version, kept.checkpoint, kept.ended)
        arrived = self.arrived | self.trained_since
        call = PendingReports()
        call.run = m.RunBegin(received=list(arrived.values()))
        for worker in self.workers:
            call.take(worker.report)
        state.rebuild(call.run.received, call.reports)
        state.gate.advance(self.state.gate.version)
        return state

    def the_brain_dies(self) -> None:
        """All goes on with the state that was kept, and what is known elsewhere."""
        self.lines.clear()
        self.state, kept = self.resumed(), self.kept
        self.version, self.ended = kept.version, dict(kept.ended)
        self.arrived |= self.trained_since
        self.trained_since.clear()
        del self.steps[kept.steps :]
        self.receive()

    @property
    def in_hand(self) -> set[str]:
        return {rollout for worker in self.workers for rollout in worker.held} | self.arrived.keys()

    def alone_of_their_prompts(self) -> set[str]:
        """What runs or waits to be trained, had not ended in the kept state, and is the only one of its prompt."""
        held = [each for worker in self.workers for each in worker.held.values()]
        prompts = {each.granted.rollout_id: each.granted.prompt_id for each in held}
        arrived = self.arrived | self.trained_since
        prompts |= {each.rollout_id: each.prompt_id for each in arrived.values()}
        over = {each.granted.rollout_id for each in held if each.end is not None} - arrived.keys()
        counted, used = Counter(prompts.values()), UsedPrompts.from_json(self.kept.checkpoint.used or {})
        return {
            rollout
            for rollout, prompt in prompts.items()
            if counted[prompt] == 1 and prompt not in used and rollout not in self.kept.ended.keys() | over
        }

    def live_prompts(self) -> list[str]:
        tickets = map(self.state.gate.live.get, self.state.gate.live)
        return [ticket.prompt_id for ticket in tickets if ticket is not None]


def known(state: RolloutState) -> dict[str, Any]:
    """What decides about the rollouts that follow, except for the order of the prompts."""
    gate, curriculum = state.gate, state.curriculum
    assert curriculum is not None
    tickets = {rollout: gate.live.get(rollout) for rollout in gate.live}
    live = {
        rollout: (each.prompt_id, each.order, each.attempt, each.failures, each.version, each.finished)
        for rollout, each in tickets.items()
        if each is not None
    }
    steps = range(gate.trained_version, gate.trained_version + 4)
    return {
        "live": live,
        "used": list(state.used),
        "counts": gate.counts(),
        "capacity": gate.capacity,
        "trained": gate.trained_version,
        "blocked": [sorted(gate.blocking(step)) for step in steps],
        "measured": curriculum.state(),
    }


def upcoming(state: RolloutState) -> list[NextTry]:
    """The prompts that are handed out next, which are live from then on."""
    return [state.queue.next() for _ in range(3 * ROWS)]


@settings(max_examples=examples(200), deadline=None)
@given(batch=BATCHES, eta=STALENESS, chance=CHANCE)
def test_a_state_made_from_the_checkpoint_and_all_reports_is_the_state_that_died(
    batch: int, eta: int, chance: Random
) -> None:
    run = Run(batch, eta, chance)
    for _ in range(4):
        run.play(20)
        run.keep()
        again, copy = run.resumed(), run.resumed()
        run.receive()
        assert known(again) == known(run.state)
        assert upcoming(copy) == upcoming(run.state)
        run.state = again  # and on with it
        run.receive()


@settings(max_examples=examples(200), deadline=None)
@given(batch=BATCHES, eta=STALENESS, chance=CHANCE, lost=st.integers(1, 40))
def test_whatever_happened_since_the_checkpoint_no_prompt_is_lost_and_none_is_played_twice(
    batch: int, eta: int, chance: Random, lost: int
) -> None:
    """The next brain knows of it what the workers and the ranks have."""
    run = Run(batch, eta, chance)
    for _ in range(4):
        run.play(20)
        run.keep()
        used, counts = set(run.state.used), run.state.gate.counts()
        run.play(lost)
        copy, alone = run.resumed(), run.alone_of_their_prompts()
        run.the_brain_dies()
        state, prompts = run.state, run.live_prompts()
        assert len(prompts) == len(set(prompts)), "two rollouts of a prompt"
        assert set(state.gate.live) <= run.in_hand - run.kept.ended.keys()
        assert alone <= set(state.gate.live), "a rollout that someone has is lost"
        assert used <= set(state.used), "a worker may report one more that is dropped for good"
        assert not set(state.used) & set(prompts)
        assert state.gate.counts().balanced
        assert state.gate.counts().trained == counts.trained
        dropped = state.gate.counts().dropped
        assert all(dropped[reason] >= count for reason, count in counts.dropped.items())
        orders = [turn.order for turn in upcoming(copy)]
        assert len(orders) == len(set(orders))
        for order in range(max(orders)):
            prompt = ORDER.ref(order).prompt_id
            found = [order in orders, prompt in prompts, prompt in state.used, copy.queue.waiting(order) is not None]
            assert sum(found) == 1, f"{prompt} is lost, or handed out though it is used or live"
    trained = [prompt for step in run.steps for prompt in step]
    assert len(trained) == len(set(trained))


def granted(rollout: str, order: int, *tries: int) -> m.HeldRollout:
    ref = ORDER.ref(order)
    attempt, failures = tries or (0, 0)
    return m.HeldRollout(m.GrantedRollout(rollout, ref.prompt_id, order, ref.row, attempt, failures, 0))


def test_a_live_rollout_that_nobody_reports_is_tried_again_with_the_same_attempt() -> None:
    state = RolloutState(9, 0, ORDER, checkpoint=m.GateCheckpoint(retries=[(1, 0, 2), (2, 2, 0), (3, 1, 1)]))
    turns = upcoming(RolloutState(9, 0, ORDER, checkpoint=state.checkpoint()))
    assert turns[:4] == [NextTry(0), NextTry(1, 0, 2), NextTry(4), NextTry(3, 1, 1)]
    for name in "abcd":
        turn = state.next_for("w0")
        assert turn is not None
        state.admit(name, "w0", turn)
    assert state.receive("b", 4)
    checkpoint = state.checkpoint()
    assert upcoming(RolloutState(9, 0, ORDER, checkpoint=checkpoint)) == turns
    again = RolloutState(9, 0, ORDER, checkpoint=checkpoint)
    again.rebuild([m.ReceivedRollout("b", ORDER.ref(1).prompt_id, 1, 0, 4)], [m.HeldReport("w0", 0, [granted("a", 0)])])
    assert list(again.gate.live) == ["a", "b"]
    assert upcoming(again)[:3] == [turn for turn in turns if turn.order not in (0, 1)][:3]
    ticket = again.gate.live.get("b")
    assert ticket is not None
    assert (ticket.attempt, ticket.failures) == (0, 2), "the ranks do not know which try it is"


def test_what_ended_before_the_checkpoint_does_not_enter_again_though_its_worker_reports_it() -> None:
    """A worker that was silent for a while plays on; an end that it reports may have been heard before."""
    state, end = RolloutState(4, 0, ORDER), m.FinishedRollout("b", False, "failed", return_prompt=True)
    for name, worker in (("a", "w0"), ("b", "w1"), ("c", "w1")):
        turn = state.next_for(worker)
        assert turn is not None
        state.admit(name, worker, turn)
    state.died("w0")
    state.finish(end)
    state.receive("c", 4)
    state.drop([m.DroppedRollout("c", "stale")])
    checkpoint, before = state.checkpoint(), state.gate.counts()
    held_by_w1 = [msgspec.structs.replace(granted("b", 1), end=end), granted("c", 2)]
    reports = [m.HeldReport("w0", 0, [granted("a", 0)]), m.HeldReport("w1", 0, held_by_w1)]
    ended: RecentIds[str] = RecentIds(10)
    for name, reason in (("a", "worker_died"), ("b", "failed"), ("c", "stale")):
        ended.put(name, reason)
    again = RolloutState(4, 0, ORDER, checkpoint=checkpoint, ended=ended)
    again.rebuild([m.ReceivedRollout("c", ORDER.ref(2).prompt_id, 2, 0, 4)], reports)
    assert (list(again.gate.live), again.gate.counts()) == ([], before)
    assert upcoming(again) == upcoming(state)
    without = RolloutState(4, 0, ORDER, checkpoint=checkpoint)
    without.rebuild([], reports)
    assert list(without.gate.live) == ["a", "c"], "without the ends nothing tells that they are over"


def test_a_checkpoint_has_the_present_dropped_counts_and_the_ledgers_line() -> None:
    before = m.GateCheckpoint(dropped={"failed": 3, "stale": 0})
    state = RolloutState(4, 0, ORDER, RecordedLines(), version=2, checkpoint=before)
    assert state.gate.counts().submitted == 11
    state.gate.advance(2)
    turn = state.next_for("w0")
    assert turn is not None
    state.admit("a", "w0", turn)
    state.finish(m.FinishedRollout("a", False, "failed"))
    checkpoint = state.checkpoint()
    assert (checkpoint.dropped, checkpoint.line, checkpoint.prompts_used) == ({"failed": 4}, 2, 1)
    assert checkpoint.counts(8) == state.gate.counts()
    assert checkpoint.curriculum is None
    assert m.GateCheckpoint().prompts_used == 0

"""Any process dies, falls silent or is heard late, at any moment: no prompt or place is lost, none is trained twice.

Gate, prompt queue, manager, its rebuilding, sample buffer and ledger are the real ones. Processes, messages and what
outlives them (the last step, the inboxes, checkpoints) are played as `manager/client.py`, `rollout/loop.py`,
`trainer/rank/inbox.py`, `master/train_loop.py` and `master/data/sample_buffer.py` have them.

    messages   a call's reply is lost or late, a call arrives late, again, or after those that were made later; a
               trajectory reaches the trainer late, never, twice, or without its acknowledgement
    joining    a RolloutWorker comes while the run goes on, goes for good, and another takes its name
    curriculum in half of the schedules prompts rest that were answered well, and nobody is admitted until all has been
               measured that the trainer took
    policies   opponents, whose servers never move the gate, and in half of the schedules a second trained policy: the
               gate counts by the older of the two servers, and a rollout has samples of both policies
    sessions   in half of the schedules programs outside the run play: a worker asks only for clients that wait; they
               come, leave, fall silent, report a reward late, twice, or never, and keep a step waiting
    deaths     of a RolloutWorker, the brain (which resumes from its last step), or of the run (from its newest
               checkpoint); and a worker's lease that lapses though it lives
    steps      end in points (trained, recorded by the gate, complete in memory, announced), and anything may happen
               between two of them
    ledger     a death leaves the lines that were written, and any part of those that were not

Every schedule ends fairly: what was ever handed out comes to its end, the gate has no place less, the counters balance,
and the audit, which knows none of the run's code, finds nothing in the ledger. So one that cannot end is a hang.

Hypothesis plays short ones, which it shortens further where something is found; long ones are random and have a seed.
`ASYNCRL_FUZZ_SCHEDULES`, `ASYNCRL_FUZZ_LONG_SCHEDULES`: how many of either; `tests/stress/fuzz.py` plays many. A long
one that fails is printed with the command that plays it again, shortened: `python -m
tests.unit.manager.test_any_schedule`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.api.trajectory import GENERATED
from asyncrl.comm.ended_rollouts import DropReason, RolloutCounts, RunSettings
from asyncrl.comm.names import ACTOR
from asyncrl.comm.typed import convert
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.client import HeldRollouts
from asyncrl.manager.rollouts.ledger_files import ledger_files
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.rollouts.staleness_gate import TRAINED
from asyncrl.manager.service import ManagerService
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch, check_counts, received, trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.rollout.online.sessions import LOST, End, OnlineSession, Sessions
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay

ROWS, WORKERS, SEED, HEADS = 7, 2, 0, 2
SCHEDULES = int(os.environ.get("ASYNCRL_FUZZ_SCHEDULES", "60"))
LONG_SCHEDULES, LONG = int(os.environ.get("ASYNCRL_FUZZ_LONG_SCHEDULES", "6")), 700
FIRST_SEED = int(os.environ.get("ASYNCRL_FUZZ_SEED", "0"))
SIZE = m.RequestSize(1, 1, 1)
ORDER = DataOrder(ROWS, SEED)
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
BOTH, UP_TO_3 = (False, True), range(1, 4)
RARELY = (False, False, False, True)
PICK = range(10_001)
JOINED = 2
CURRICULUM = partial(Curriculum, 0.0, 0.9, 1)
JUDGE = "judge"
"""The second trained policy."""
WORKER = range(20)
FATE = ("answered", "reply lost", "reply late", "late", "answered and repeated late")
CLEARS_UP = (
    "fair_turn",
    "the_run_dies",
    "the_brain_dies",
    "a_worker_dies",
    "a_worker_leaves",
    "a_lease_lapses",
)
"""Moves after which less is in hand; long schedules have few of them."""
BEGINNINGS: dict[str, Sequence[Any]] = {
    "batch": UP_TO_3,
    "eta": range(3),
    "on_stale": tuple(OnStale),
    "stops_early": BOTH,
    "own": range(1, 5),
    "judged": BOTH,
    "skips": BOTH,
    "ends_twice": BOTH,
    "online": BOTH,
}
LEASE_S = HOLD_S = 10.0
"""Of online sessions."""
_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., None])
Call: TypeAlias = Callable[[ManagerService], Coroutine[Any, Any, _T]]


class Move(NamedTuple):
    """An event and its condition: the name of a method of `Schedule`, and the choices for its arguments."""

    name: str
    when: Callable[[Schedule], Any]
    choices: dict[str, Sequence[Any]]


MOVES: list[Move] = []


def some_run(self: Schedule) -> bool:
    return any(worker.running for worker in self.workers)


def some_are_pushed(self: Schedule) -> bool:
    return any(worker.pushed for worker in self.workers)


def some_may_be_rejected(self: Schedule) -> bool:
    return any(worker.running.keys() - worker.pushed for worker in self.workers)


def some_have_no_session(self: Schedule) -> bool:
    return any(worker.manager != self.service.number for worker in self.workers)


def some_ended(self: Schedule) -> bool:
    return any(worker.ended for worker in self.workers)


def some_joined(self: Schedule) -> bool:
    return len(self.workers) > self.own


def is_online(self: Schedule) -> bool:
    return self.online


def some_have_asked(self: Schedule) -> bool:
    return any(worker.clients for worker in self.workers)


def some_sessions_were_opened(self: Schedule) -> bool:
    return bool(self.opened)


def some_keep_a_step_waiting(self: Schedule) -> bool:
    gate, waits = self.service.gate, self.online and self.on_stale == OnStale.wait and self.service.begun
    return waits and gate.is_blocked(gate.trained_version)


def between_steps(self: Schedule) -> bool:
    return self.announced == self.trainer.version


def move(when: Callable[[Schedule], Any] | None = None, **choices: Sequence[Any]) -> Callable[[_Method], _Method]:
    """A method of `Schedule` that hypothesis and `play_long` call."""

    def note(method: _Method) -> _Method:
        MOVES.append(Move(method.__name__, when or (lambda schedule: True), choices))
        chosen: dict[str, Any] = {name: st.sampled_from(values) for name, values in choices.items()}
        ruled: _Method = rule(**chosen)(method)  # type: ignore[no-untyped-call]
        return ruled if when is None else precondition(when)(ruled)

    return note


class Worker:
    """A RolloutWorker's process.

    `ids`: of rollouts that it has room for; `running`: what it plays; `pushed`: of those, what is on its way to the
    trainer, `arrived`: what has been there; `ended`: what the manager was not heard to know; `manager`: that it has a
    session with; `online`: its clients and sessions, which programs outside the run open.
    """

    def __init__(self, index: int, incarnation: int, own: int) -> None:
        self.index, self.incarnation = index, incarnation
        self.joined = index >= own
        self.name = f"rollout_worker/{index}"
        self.manager: int | None = None
        self.held = HeldRollouts()
        self.ids: list[str] = []
        self.running: dict[str, m.GrantedRollout] = {}
        self.pushed: dict[str, RolloutRecord] = {}
        self.arrived: set[str] = set()
        self.ended: list[m.FinishedRollout] = []
        self.delivered: set[str] = set()  # prompts among `ended`
        self.online = Sessions(LEASE_S, HOLD_S)
        self.clients: list[int] = []

    def who(self) -> dict[str, Any]:
        whole = {"worker": self.name, "incarnation": self.incarnation, "finished": list(self.ended)}
        return whole | {"manager": self.manager or 0}

    def end(self, ended: m.FinishedRollout) -> None:
        self.ended.append(ended)
        self.held.ended([ended])

    def heard(self, reported: list[m.FinishedRollout]) -> None:
        self.held.confirmed(reported)
        self.ended = [each for each in self.ended if each not in reported]
        if not self.ended:
            self.delivered = set()

    @property
    def in_hand(self) -> set[str]:
        return {granted.prompt_id for granted in self.running.values()} | self.delivered


@dataclass
class Trainer:
    """The master and its ranks: what dies with them."""

    buffer: SampleBuffer
    version: int = 0
    checkpoint: m.GateCheckpoint = field(default_factory=m.GateCheckpoint)
    """The gate's part of the state at `version`."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    begin: m.RunBegin | None = None
    """Its report to the manager, which it repeats until that answers."""
    begun: bool = False
    """The manager has answered it."""
    batch: TrainBatch | None = None
    """Of the step that is trained, until the gate has recorded it."""
    state: dict[str, Any] | None = None
    """Of the step that the gate has recorded, until it is complete in memory."""
    in_step: list[str] = field(default_factory=list)


BEGINNING: dict[str, Any] = {name: st.sampled_from(values) for name, values in BEGINNINGS.items()}


class Schedule(RuleBasedStateMachine):
    service: ManagerService
    workers: list[Worker]
    announced: int
    """The newest version that others may know."""

    @initialize(**BEGINNING)
    def begin(
        self,
        batch: int,
        eta: int,
        on_stale: OnStale,
        stops_early: bool,
        own: int = WORKERS,
        judged: bool = False,
        skips: bool = False,
        ends_twice: bool = False,
        online: bool = False,
    ) -> None:
        self.batch, self.eta, self.on_stale, self.stops_early = batch, eta, on_stale, stops_early
        self.own, self.skips, self.ends_twice = own, skips and not online, ends_twice
        self.online, self.now = online, 0.0
        self.opened: list[tuple[Worker, OnlineSession]] = []
        self.accepted: dict[str, float] = {}
        """Rewards that a session has taken, by rollout."""
        self.trained = ("", JUDGE) if judged else ("",)
        """The trained policies."""
        self.loop = asyncio.new_event_loop()  # a Runner costs a quarter of a schedule: it handles signals
        self.folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # also where the schedule fails
        self.ids = (f"r{number}" for number in itertools.count())
        self.numbers = itertools.count(1)
        self.highest = -1
        self.written = 0
        """Number of lines that the ledger has for sure, whichever process dies."""
        self.checkpoint: dict[str, Any] | None = None
        """The newest one that is complete on disk."""
        self.doubtful: set[str] = set()
        """Prompts that may be played twice: a worker died, or was taken for dead, with an attempt in hand."""
        self.strays: set[str] = set()
        """Rollouts that a manager need not count: they had left the count, and a rank still had them as a brain died;
        or they were delivered between the poll of the ranks and their worker's report to the next manager."""
        self.all_heard = True
        """No worker has died, left or been taken for dead since the launch."""
        self.launch()

    # The launch: everything begins, from the newest checkpoint.

    @move(cut=PICK, when=lambda self: self.checkpoint is not None)
    def the_run_dies(self, cut: int = 0) -> None:
        """The disk has the lines that lead to the checkpoint, and perhaps more."""
        assert self.checkpoint is not None
        self.leave_lines(self.checkpoint["gate"]["line"], cut)
        self.launch()

    def launch(self) -> None:
        state = self.checkpoint
        self.all_heard = True
        self.granted_before = defaultdict[str, set[str]](set)  # by managers that died; a worker may not have read it
        self.network: list[Call[Any]] = []  # calls to the manager that arrive late
        self.delayed: list[Callable[[], None]] = []  # replies that arrive late
        self.kept: dict[str, Any] | None = None
        """State of the last step, in memory."""
        self.unwritten: dict[str, Any] | None = None
        """A checkpoint that is being written."""
        self.held: dict[tuple[int, str], RolloutRecord] = {}
        """What the ranks' files have, which outlive the ranks."""
        self.resume_from(state)
        self.announced = self.trainer.version
        self.doubtful -= set(self.used)
        self.versions = dict.fromkeys(self.trained, self.trainer.version)
        """By trained policy, the version that its server has."""
        self.workers = [Worker(index, 0, self.own) for index in range(self.own)]
        self.incarnations = dict.fromkeys(range(self.own, self.own + JOINED), 0)
        self.service = self.new_manager()
        self.the_roll_is_called()

    def resume_from(self, state: dict[str, Any] | None) -> None:
        """Continue from the state of a step, or of a checkpoint, as a new brain; the ranks have what they had."""
        self.trainer = trainer = Trainer(SampleBuffer(self.batch, self.eta, self.on_stale))
        self.history: list[list[str]] = []
        """The prompts that were trained, by step."""
        if state is not None:
            trainer.version = state["version"]
            trainer.buffer.expire(trainer.version)
            trainer.checkpoint = convert(state["gate"], m.GateCheckpoint)
            self.history = [list(step) for step in state["trained"]]
        trainer.counts = trainer.checkpoint.counts(trainer.version * self.batch)
        self.inbox = list(self.held.values())

    @property
    def used(self) -> UsedPrompts:
        """The prompts that are trained or dropped for good."""
        if hasattr(self, "service") and self.service.begun:
            return self.service.rollouts.used
        used = self.trainer.checkpoint.used
        return UsedPrompts() if used is None else UsedPrompts.from_json(used)

    def leave_lines(self, written: int, cut: int) -> None:
        """The manager dies: its ledger has the lines that were `written`, and a part of what came after, `cut` off."""
        there = sum(file.read_bytes().count(b"\n") for file in ledger_files(self.folder))
        assert there >= written, "a reply came before its lines were written"
        self.ledger.close()
        files = [(file, file.read_bytes()) for file in ledger_files(self.folder)]
        whole = b"".join(data for _, data in files)
        certain = sum(map(len, whole.splitlines(keepends=True)[:written]))
        left = certain + (len(whole) - certain) * (10_000 - cut) // 10_000
        self.written = whole[:left].count(b"\n")
        for file, data in files:
            if left <= 0 and file != files[0][0]:
                file.unlink()
            elif left < len(data):
                os.truncate(file, left)
            left = max(0, left - len(data))

    # The manager, and calls to it.

    def new_manager(self) -> ManagerService:
        run = RunSettings(self.batch, self.eta, str(self.on_stale), self.own, SEED)
        self.ledger = Ledger(self.folder, run, file_bytes=4000)
        service = ManagerService(
            batch_size=self.batch,
            max_staleness=self.eta,
            routing="least_requests",
            lease_s=1e9,
            clock=lambda: 0.0,
            order=ORDER,
            number=next(self.numbers),
            first=SIZE,
            policies=["past", *self.trained[1:]],
            curriculum=CURRICULUM if self.skips else None,
            ledger=self.ledger,
        )
        service.routes.router_of("past").update(0, "http://past", 0, routable=True)
        for policy in self.trained:
            self.tell_version(service, policy)
        return service

    @property
    def served(self) -> int:
        """The version that rollouts are admitted at."""
        return min(self.versions.values())

    def tell_version(self, service: ManagerService, policy: str) -> None:
        service.routes.router_of(policy).update(0, f"http://server{policy}", self.versions[policy], routable=True)
        service.routes_changed(self.served)

    @move(over=(False, False, False, True), when=lambda self: not self.service.begun)
    def the_roll_is_called(self, over: bool = False) -> None:
        """The manager sees which workers there are; `over`: their leases end, though they may live."""
        if over:
            silent = [each for each in self.workers if each.manager != self.service.number]
            self.all_heard &= not silent
            for worker in silent:
                self.doubtful |= worker.in_hand | self.granted_before[worker.name]
        ready = {} if over else {worker.name: worker.incarnation for worker in self.workers}
        self.service.await_workers(ready)

    @move(pick=WORKER, fate=FATE, when=some_have_no_session)
    def open_session(self, pick: int, fate: str) -> None:
        """As a worker does whose call was refused; what it was granted before and reads only then is void."""
        worker = self.at(pick)
        if worker.manager == self.service.number:
            return
        worker.manager = None
        number = self.service.number
        report = m.HeldReport(worker.name, worker.incarnation, worker.held.all())
        if self.trainer.begin is not None:
            polled = {each.rollout_id for each in self.trainer.begin.received}
            self.are_strays(
                each.granted.rollout_id
                for each in report.held
                if each.end is not None and each.end.accepted and each.granted.rollout_id not in polled
            )

        async def answer(service: ManagerService) -> m.Session:
            if service.number != number:
                raise m.BadRequest("its connection broke")
            return await service.open_session(report)

        def opened(session: m.Session) -> None:
            if self.service.number == session.manager and worker in self.workers:
                worker.manager = session.manager

        self.call(answer, opened, fate)

    def are_strays(self, rollouts: Iterable[str]) -> None:
        """The ranks have these rollouts, or had them, and no manager need count them."""
        strays = set(rollouts)
        self.strays |= strays
        self.doubtful |= {record.prompt_id for record in self.held.values() if record.rollout_id in strays}

    def call(self, answer: Call[_T], then: Callable[[_T], None], fate: str) -> None:
        """Make a call, and take its reply, if it arrives; the next call tells again what was not answered."""
        if "late" in fate and fate != "reply late":
            self.network.append(answer)
        if fate == "late":
            return
        reply = self.loop.run_until_complete(answer(self.service))
        if fate == "reply late":
            self.delayed.append(lambda: then(reply))
        elif fate != "reply lost":
            then(reply)

    def has_session(self, worker: Worker, fate: str) -> bool:
        """A call of the worker is not refused, or it has opened a session since."""
        if worker.manager != self.service.number:
            worker.manager = None
            self.open_session(self.workers.index(worker), fate)
        return worker.manager is not None

    def call_as(self, worker: Worker, answer: Call[_T], then: Callable[[_T], None], fate: str) -> None:
        """As the client makes it: in a session, which the reply belongs to."""
        number, reported = worker.manager, list(worker.ended)

        def take(reply: _T) -> None:
            if worker.manager == number:
                worker.heard(reported)
                then(reply)

        self.call(answer, take, fate)

    @move(pick=PICK, when=lambda self: self.delayed)
    def a_reply_arrives_late(self, pick: int) -> None:
        self.delayed.pop(pick % len(self.delayed))()

    @move(pick=PICK, again=BOTH, when=lambda self: self.network)
    def a_call_arrives_late(self, pick: int, again: bool) -> None:
        index = pick % len(self.network)
        answer = self.network[index] if again else self.network.pop(index)
        with contextlib.suppress(m.BadRequest):
            self.loop.run_until_complete(answer(self.service))

    @move(share=range(1, 3), policy=BOTH, when=lambda self: self.announced > self.served)
    def the_server_updates(self, share: int, policy: bool = False) -> None:
        name = self.trained[policy and -1]
        self.versions[name] += (self.announced - self.versions[name]) * share // 2
        self.tell_version(self.service, name)

    # RolloutWorkers.

    def at(self, pick: int) -> Worker:
        return self.workers[pick % len(self.workers)]

    @move(pick=WORKER, count=UP_TO_3, fate=FATE)
    def allocate(self, pick: int, count: int, fate: str) -> None:
        worker = self.at(pick)
        if not self.has_session(worker, fate):
            return
        if self.online:
            count = min(count, worker.online.waiting)
        worker.ids += [next(self.ids) for _ in range(count - len(worker.ids))]
        if not worker.ids:  # nobody waits
            return
        request = m.AllocateRequest(**worker.who(), rollouts=list(worker.ids))

        async def answer(service: ManagerService) -> m.AllocateReply:
            running = set(service.gate.live)
            reply = await service.allocate_rollout(request)
            new = [granted for granted in reply.granted if granted.rollout_id not in running]
            for granted in new:
                self.check_handed_out(granted)
            self.check_bound(new)
            return reply

        self.call_as(worker, answer, lambda reply: self.take_allocation(worker, reply), fate)

    def take_allocation(self, worker: Worker, reply: m.AllocateReply) -> None:
        new = [granted for granted in reply.granted if granted.rollout_id in worker.ids]  # else a reply came twice
        worker.running |= {granted.rollout_id: granted for granted in new if not granted.skips}
        worker.held.granted(new)
        for granted in new:
            if granted.skips:
                worker.end(m.FinishedRollout(granted.rollout_id, False, str(DropReason.curriculum)))
        settled = {granted.rollout_id for granted in reply.granted} | set(reply.gone)
        worker.ids = [name for name in worker.ids if name not in settled]
        for granted in new if self.online else ():
            self.open_online_session(worker, granted.rollout_id)

    # Programs outside the run.

    @move(pick=WORKER, count=UP_TO_3, when=is_online)
    def clients_ask(self, pick: int, count: int) -> None:
        worker = self.at(pick)
        for _ in range(count):
            worker.clients.append(next(self.numbers))
            worker.online.ask(worker.clients[-1], self.now)

    @move(pick=PICK, when=some_have_asked)
    def a_client_leaves(self, pick: int) -> None:
        asked = [(worker, client) for worker in self.workers for client in worker.clients]
        worker, client = asked[pick % len(asked)]
        worker.clients.remove(client)
        self.lose(worker, worker.online.leave(client))

    def open_online_session(self, worker: Worker, name: str) -> None:
        """A rollout was admitted: it is its client's, or dropped if the client has left."""
        worker.online.admit(name)
        session = worker.online.open(name, name, "", self.now)
        if worker.online.client_of(name) is None:
            worker.online.end(session, End.client_left)
            self.lose(worker, [session])
        else:
            self.opened.append((worker, session))

    def lose(self, worker: Worker, ended: Iterable[OnlineSession]) -> None:
        for session in ended:
            assert session.end is not None
            del worker.running[session.rollout_id]
            worker.end(m.FinishedRollout(session.rollout_id, False, str(LOST[session.end])))

    @move(seconds=(1.0, 4.0, 2 * LEASE_S), when=is_online)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers:
            self.lose(worker, worker.online.end_silent(self.now))

    @move(pick=PICK, when=some_sessions_were_opened)
    def a_session_asks_the_policy(self, pick: int) -> None:
        worker, session = self.opened[pick % len(self.opened)]
        if session.end is None:
            worker.online.begin_call(session)
            worker.online.end_call(session, self.now)

    @move(pick=PICK, other=BOTH, when=some_sessions_were_opened)
    def a_reward_is_reported_late_or_again(self, pick: int, other: bool) -> None:
        worker, session = self.opened[pick % len(self.opened)]
        if session.end is not None:
            end, reward = session.end, self.accepted.get(session.rollout_id, 1.0) + other
            assert worker.online.reward(session, reward, {}) is (end is End.rewarded and not other)
            assert session.end is end

    @move(when=some_keep_a_step_waiting)
    def sessions_keep_a_step_waiting(self) -> None:
        """A running rollout would expire, and its session ends after a while; the door waits for a batch besides."""
        holding = self.service.gate.blocking(self.service.gate.trained_version)
        for _ in range(2):
            for worker in self.workers:
                self.lose(worker, worker.online.end_over_age(holding, self.now))
            self.now += HOLD_S
        left = [each.rollout_id for worker, each in self.opened if worker in self.workers and each.end is None]
        assert not set(left) & set(holding)

    @move(index=range(JOINED), when=lambda self: len(self.workers) < self.own + JOINED)
    def a_worker_joins(self, index: int) -> None:
        """Its number may have been another's, whose end the manager need not have seen."""
        index += self.own
        if all(worker.index != index for worker in self.workers):
            self.incarnations[index] += 1
            self.workers.append(Worker(index, self.incarnations[index], self.own))

    @move(pick=PICK, seen=BOTH, on_its_way=PICK, when=some_joined)
    def a_worker_leaves(self, pick: int, seen: bool, on_its_way: int) -> None:
        worker = self.workers.pop(self.own + pick % (len(self.workers) - self.own))
        self.leave_in_the_midst(worker, on_its_way)
        if seen:
            self.service.worker_died(worker.name)

    def check_handed_out(self, granted: m.GrantedRollout) -> None:
        """Nothing is played that is settled or played already, unless another attempt may be under way unseen."""
        self.highest = max(self.highest, granted.order)
        prompt_id = granted.prompt_id
        assert ORDER.ref(granted.order).prompt_id == prompt_id
        if prompt_id not in self.doubtful:
            assert not any(prompt_id in step for step in self.history)
            assert prompt_id not in self.given_up
            playing = [
                worker.running[name].prompt_id
                for worker in self.workers
                for name in worker.running.keys() - worker.arrived
            ]
            assert prompt_id not in playing, "a prompt is played twice at a time"
            there = [each for each in self.at_the_trainer() if self.service.gate.outcome(each.rollout_id) is None]
            oldest = self.trainer.version - self.eta  # what is older may be reported before the master died
            played = {record.prompt_id for record in there if self.decisive_version(record) >= oldest}
            assert prompt_id not in played, "the trainer has it already"

    def check_bound(self, new: list[m.GrantedRollout]) -> None:
        """So many rollouts exist at most; with a worker that is not heard the gate does not know of some."""
        if not self.all_heard or not new:
            return
        exist = {granted.rollout_id for granted in new}
        exist |= {record.rollout_id for record in self.at_the_trainer()}
        exist |= {name for worker in self.workers for name in worker.running.keys() - worker.arrived}
        most = (self.eta + self.served + 1) * self.batch
        assert self.trainer.version * self.batch + len(exist) <= most, "more rollouts exist than the bound allows"

    def at_the_trainer(self) -> list[RolloutRecord]:
        """What waits there to be trained, as far as it may."""
        used, strays = self.used, self.strays
        there = [*self.trainer.buffer.live(), *self.inbox]
        return [each for each in there if each.prompt_id not in used and each.rollout_id not in strays]

    @property
    def given_up(self) -> set[str]:
        """The prompts that were dropped for good."""
        in_training = [] if self.trainer.batch is None else [each.prompt_id for each in self.trainer.batch.records]
        return set(self.used).difference(*self.history, in_training)

    @move(version=range(3), there=BOTH)
    def the_opponents_server_changes(self, version: int, there: bool) -> None:
        """It is updated, to any version, or quarantined: the gate sees nothing of it."""
        before = self.service.gate_state()
        self.service.routes.router_of("past").update(0, "http://past", version, routable=there)
        self.service.routes_changed(None)
        assert self.service.gate_state() == before

    @move(pick=PICK, fate=FATE, policy=("", "past", JUDGE), when=some_run)
    def schedule(self, pick: int, fate: str, policy: str) -> None:
        """A later request of a rollout, to any policy; it ends with its rollout, whatever else is lost."""
        worker, name = self.pick_running(pick)
        if policy == JUDGE and policy not in self.trained:
            policy = ""
        if not self.has_session(worker, fate):
            return
        each = m.RouteRequest(1, 1, 1, request_id=f"{name}/{policy}{pick % 3}", rollout_id=name, policy=policy)
        request = m.ScheduleRequest(**worker.who(), requests=[each])
        self.call_as(worker, lambda service: service.schedule_request(request), lambda reply: None, fate)

    @move(pick=PICK, newer=PICK, when=some_run)
    def push(self, pick: int, newer: int = 0) -> None:
        """The rollout's end: a token of each trained policy, of a version that its server has had since."""
        worker, name = self.pick_running(pick)
        granted = worker.running[name]
        reward = self.take_reward(worker, name, float(pick % 3)) if self.online else 1.0
        n, tokens = len(self.trained), defaultdict[int, int](int)
        for bit, now in enumerate(self.versions.values()):
            tokens[now if n > 1 and newer >> bit & 1 else min(granted.version, now)] += 1
        sizes: dict[str, Any] = {
            "lengths": (2,) * n,
            "generated": (1,) * n,
            "rewards": (reward,) * n,
            "truncated": (False,) * n,
        }
        policies: dict[str, Any] = {
            "groups": self.trained,
            "metrics": {f"{GENERATED}{each or ACTOR}": 1.0 for each in self.trained},
        }
        record = RolloutRecord(
            *(name, granted.prompt_id, granted.order, 0, min(tokens), dict(tokens)), **sizes, episodes=(1,) * n
        )
        record = msgspec.structs.replace(record, **policies) if n > 1 else record
        worker.pushed.setdefault(name, record)  # pushed again, it is the same

    def take_reward(self, worker: Worker, name: str, reward: float) -> float:
        """The client reports the reward, which ends the session; it is that of the trajectory, however often."""
        session = worker.online.get(name)
        assert session is not None
        if session.end is None:
            assert worker.online.reward(session, reward, {})
            assert name not in self.accepted, "a session takes one reward"
            self.accepted[name] = reward
        return session.reward

    @move(pick=PICK, head=range(HEADS), acknowledged=BOTH, when=some_are_pushed)
    def arrive(self, pick: int, head: int, acknowledged: bool) -> None:
        """A trajectory reaches a rank, also one that its worker died with; what is not acknowledged is sent again."""
        worker, name = self.pick_of(pick, lambda worker: worker.pushed)
        record = msgspec.structs.replace(worker.pushed[name], head=head)
        worker.arrived.add(name)
        if (head, name) not in self.held:
            self.held[head, name] = record
            self.inbox.append(record)
        if acknowledged:
            del worker.pushed[name]
            worker.running.pop(name)
            success = (pick % 3 / 2) if self.skips else None
            worker.end(m.FinishedRollout(name, accepted=True, success=success))
            worker.delivered.add(record.prompt_id)

    @move(
        pick=PICK,
        how=("for good", "again", "as next attempt"),
        when=some_may_be_rejected,
    )
    def reject(self, pick: int, how: str) -> None:
        worker, name = self.pick_of(pick, lambda worker: worker.running.keys() - worker.pushed)
        worker.running.pop(name)
        if self.online:  # the client rejects the episode; nobody else plays it
            how, session = "for good", worker.online.get(name)
            assert session is not None
            worker.online.end(session, End.rejected)
        again = how != "for good"
        worker.end(
            m.FinishedRollout(name, False, "rejected", return_prompt=again, as_next_attempt=how == "as next attempt")
        )

    def pick_running(self, pick: int) -> tuple[Worker, str]:
        return self.pick_of(pick, lambda worker: worker.running)

    def pick_of(self, pick: int, names: Callable[[Worker], Any]) -> tuple[Worker, str]:
        found = [(worker, name) for worker in self.workers for name in sorted(names(worker))]
        return found[pick % len(found)]

    @move(pick=WORKER, fate=FATE, when=some_ended)
    def report(self, pick: int, fate: str) -> None:
        worker = self.at(pick)
        if not self.has_session(worker, fate):
            return
        request = m.FinishRequest(**worker.who())
        self.call_as(worker, lambda service: service.finish_rollout(request), lambda reply: None, fate)

    @move(pick=WORKER, by_status=BOTH, on_its_way=PICK)
    def a_worker_dies(self, pick: int, by_status: bool, on_its_way: int) -> None:
        """Another process begins; the manager may see that in name resolution, or only when it calls."""
        worker = self.at(pick)
        self.leave_in_the_midst(worker, on_its_way)
        self.workers[pick % len(self.workers)] = Worker(worker.index, worker.incarnation + 1, self.own)
        if worker.joined:
            self.incarnations[worker.index] += 1
        if by_status:
            self.service.incarnation_seen(worker.name, worker.incarnation + 1)
            self.service.await_workers({worker.name: worker.incarnation for worker in self.workers})

    def leave_in_the_midst(self, worker: Worker, on_its_way: int) -> None:
        self.doubtful |= worker.in_hand
        self.all_heard = False
        for index, (name, record) in enumerate(worker.pushed.items()):
            if on_its_way >> index & 1 and (0, name) not in self.held:
                self.held[0, name] = record
                self.inbox.append(record)

    @move(pick=WORKER)
    def a_lease_lapses(self, pick: int) -> None:
        """The worker lives, and goes on once it is heard again; what it was to play again it is told once more."""
        worker = self.at(pick)
        prompts = [each.prompt_id for each in self.service.gate.live.running_of(worker.name)]
        self.doubtful |= worker.in_hand | set(prompts)  # some it has not heard of
        self.all_heard = False
        self.service.worker_died(worker.name)

    # The trainer.

    @move(when=lambda self: self.inbox)
    def collect(self) -> None:
        """The master asks the manager what counts, once that has begun; until then all waits at the ranks."""
        trainer = self.trainer
        if not (trainer.begun and self.service.begun):
            return
        arrived, self.inbox = self.inbox, []
        refused = self.refused(arrived)
        self.free(record for record in arrived if record.rollout_id in refused)
        self.free(trainer.buffer.add(record for record in arrived if record.rollout_id not in refused))

    def refused(self, records: Sequence[RolloutRecord]) -> list[str]:
        report = m.ReceivedReport(list(map(received, records)), manager=self.service.number)
        return self.loop.run_until_complete(self.service.received(report)).refused

    def free(self, records: Iterable[RolloutRecord]) -> None:
        for record in records:
            self.held.pop((record.head, record.rollout_id), None)

    @move(dies=RARELY, when=lambda self: between_steps(self) and len(self.trainer.buffer))
    def train(self, dies: bool) -> None:
        """A step, up to where others hear of it."""
        trainer = self.trainer
        self.collect()
        trainer.buffer.expire(trainer.version)
        if self.on_stale == OnStale.wait and len(trainer.buffer) >= self.batch:
            if self.loop.run_until_complete(self.service.wait_expiring(m.WaitExpiringRequest(trainer.version))).running:
                return
            self.check_nothing_would_expire()
            self.collect()
        batch = trainer.buffer.take(trainer.version)
        if batch is None:
            return
        oldest = trainer.version - self.eta
        assert all(self.decisive_version(record) >= oldest for record in batch.records)
        assert self.on_stale != OnStale.mask or batch.min_version >= oldest, "older tokens carry no loss"
        self.forget(trainer.in_step)
        trainer.in_step = [record.rollout_id for record in batch.records]
        trainer.buffer.mark_trained(batch)
        trainer.version += 1
        trainer.batch = batch
        if dies:
            self.the_brain_dies()

    @move(lost=BOTH, dies=RARELY, when=lambda self: self.trainer.batch is not None)
    def the_gate_records_the_step(self, lost: bool = False, dies: bool = False) -> None:
        """1 of `TrainLoop._end_step`; its state is what is written into memory."""
        trainer = self.trainer
        assert trainer.batch is not None
        for record in trainer.batch.records if self.online else ():
            assert set(record.rewards) == {self.accepted[record.rollout_id]}, "the reward is its client's"
        reply = self.consumed([trained_rollout(record) for record in trainer.batch.records], lost, dies)
        if reply is None:
            return
        assert reply.checkpoint is not None
        trainer.checkpoint = reply.checkpoint
        self.history.append([record.prompt_id for record in trainer.batch.records])
        trainer.batch = None
        used = set(UsedPrompts.from_json(reply.checkpoint.used or {}))
        assert used <= set(self.used), "the checkpoint is of the step"
        assert used.issuperset(prompt for step in self.history for prompt in step)
        assert reply.counts.trained == trainer.version * self.batch
        trainer.state = self.state()

    @move(dies=RARELY, when=lambda self: self.trainer.state is not None)
    def the_state_is_complete(self, dies: bool = False) -> None:
        """4 of `TrainLoop._end_step`: from here on others may hear of the step."""
        self.kept, self.trainer.state = self.trainer.state, None
        if dies:
            self.the_brain_dies()

    @move(
        dies=RARELY,
        when=lambda self: not between_steps(self) and self.kept and self.kept["version"] == self.trainer.version,
    )
    def the_version_is_announced(self, dies: bool = False) -> None:
        """5 of `TrainLoop._end_step`, also by a brain that goes on after the step."""
        self.announced = self.trainer.version
        if dies:
            self.the_brain_dies()

    def decisive_version(self, record: RolloutRecord) -> int:
        """The version of the token that decides when a rollout expires: under `mask`, those in range are trained."""
        return record.newest_version if self.on_stale == OnStale.mask else record.oldest_version

    def check_nothing_would_expire(self) -> None:
        """Under `on_stale=wait` the step may be taken: (H) of `staleness_gate` holds after it, for what there is."""
        if not self.all_heard:
            return
        there = {record.rollout_id: record.oldest_version for record in self.at_the_trainer()}
        running = {
            name: granted.version
            for worker in self.workers
            for name, granted in worker.running.items()
            if name not in worker.arrived
        }
        for version in {*there.values(), *running.values()}:
            finished = sum(each <= version for each in there.values())
            live = finished + sum(each <= version for each in running.values())
            places = max(0, version + self.eta - self.trainer.version) * self.batch
            assert live - min(finished, self.batch) <= places, "the step did not wait for what will expire"

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        state = {"version": trainer.version, "gate": trainer.checkpoint}
        read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state | {"trained": self.history}))
        return read

    def forget(self, names: list[str]) -> None:
        for name in names:
            for head in range(HEADS):
                self.held.pop((head, name), None)

    @move(lost=BOTH, dies=RARELY, when=lambda self: between_steps(self) and self.trainer.begun and self.service.begun)
    def report_drops(self, lost: bool = False, dies: bool = False) -> None:
        """What expired takes up room at the gate."""
        self.collect()
        if self.trainer.buffer.drops:
            self.consumed([], lost, dies)

    def consumed(self, trained: list[m.TrainedRollout], lost: bool, dies: bool) -> m.ConsumedReply | None:
        """Report, and have the ranks free what was dropped; None if the reply is `lost`, or the brain dies by then."""
        trainer = self.trainer
        unreported = trainer.buffer.drops
        if self.on_stale == OnStale.wait and self.all_heard:
            stale = [drop.record.rollout_id for drop in unreported if drop.reason == DropReason.stale]
            assert not any(name in self.service.gate.live for name in stale), "the step did not wait"
        drops = [drop.message for drop in unreported]
        report = m.ConsumedReport(trainer.version, trained, drops, manager=self.service.number)
        reply = self.loop.run_until_complete(self.service.consumed(report))
        if reply.checkpoint is not None:  # the lines that lead to it are written
            self.written = max(self.written, reply.checkpoint.line)
        assert reply.counts.balanced
        if dies:
            self.the_brain_dies()
            return None
        if lost:
            self.network.append(lambda service: service.consumed(report))
            return None
        trainer.buffer.drops, trainer.counts = [], reply.counts
        self.free(drop.record for drop in unreported)
        return reply

    @move(lost=BOTH, dies=RARELY, when=lambda self: not self.trainer.begun)
    def the_run_begins(self, lost: bool = False, dies: bool = False) -> None:
        """5 of `TrainLoop.begin`: tell the manager what the ranks hold by now, and from where the run continues."""
        trainer = self.trainer
        if trainer.begin is None:
            held = {record.rollout_id: record for record in self.inbox}.values()
            trainer.begin = m.RunBegin(trainer.version, trainer.checkpoint, list(map(received, held)))
            self.written += 1  # the line that begins the lineage, after all lines that were left
        begin, number = trainer.begin, self.service.number

        async def answer(service: ManagerService) -> m.Session:
            if service.number != number:
                raise m.BadRequest("its connection broke")
            return await service.begin_run(begin)

        def begun(session: m.Session) -> None:
            trainer.begun = True

        self.call(answer, begun, "reply lost" if lost else "answered and repeated late")
        if dies:
            self.the_brain_dies()

    def report_step(self) -> None:
        """All that is left to do up to the next step."""
        if not self.trainer.begun:
            self.the_run_begins()
        if not self.service.begun:
            return
        self.collect()
        if self.trainer.batch is not None:
            self.the_gate_records_the_step()
        if self.trainer.state is not None:
            self.the_state_is_complete()
        if not between_steps(self):
            self.the_version_is_announced()
        self.report_drops()

    @move(cut=PICK)
    def the_brain_dies(self, cut: int = 0) -> None:
        """Master, ranks and manager begin again with the last step, with what the inboxes hold and the workers have."""
        gate = self.service.gate
        for worker in self.workers:
            self.granted_before[worker.name] |= {each.prompt_id for each in gate.live.running_of(worker.name)}
        if self.service.begun:
            here = {record.rollout_id for record in self.held.values()}
            self.are_strays(name for name in here if name not in gate.live and gate.outcome(name) != TRAINED)
        self.leave_lines(self.written, cut)
        self.unwritten = None
        if self.kept is None and self.announced:  # what others have seen is lost
            self.launch()
            return
        self.resume_from(self.kept)
        self.service = self.new_manager()
        self.the_roll_is_called()

    @move(when=lambda self: between_steps(self) and self.trainer.version)
    def save(self) -> None:
        """Begin a checkpoint of the last step, once the one before is complete."""
        self.the_checkpoint_is_complete()
        self.unwritten = self.state()

    @move(when=lambda self: self.unwritten is not None)
    def the_checkpoint_is_complete(self) -> None:
        self.checkpoint, self.unwritten = self.unwritten or self.checkpoint, None

    # What must hold.

    @invariant()
    def counts_balance_and_nothing_is_trained_twice(self) -> None:
        if not hasattr(self, "service"):
            return
        gate = self.service.gate
        assert gate.counts().balanced
        for worker in self.workers if self.service.begun and self.all_heard else ():
            if worker.manager == self.service.number:
                for name in worker.running.keys() - worker.arrived:
                    known = name in gate.live or worker.running[name].prompt_id in self.doubtful
                    assert known, "a rollout runs that the gate does not count"
        trained = [prompt for step in self.history for prompt in step]
        assert len(trained) == len(set(trained)), "a prompt was trained twice"
        assert not self.service.begun or set(trained) <= set(self.used)

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        try:
            if not self.stops_early:
                self.resume()
            self.end()
        finally:
            self.ledger.close()
            self.loop.close()
            shutil.rmtree(self.folder)

    def resume(self) -> None:
        """Without deaths: what was ever handed out comes to its end, and no place or server's load is left over."""
        for _ in list(self.network):
            self.a_call_arrives_late(0, again=False)
        for _ in list(self.delayed):
            self.a_reply_arrives_late(0)
        for index in self.incarnations.keys() - {worker.index for worker in self.workers}:
            self.service.worker_died(f"rollout_worker/{index}")  # at the latest as its lease lapses
        own = set(range(self.highest + 1))
        settled: set[int] = set()
        for turn in range(6 * (len(own) + 10)):
            self.fair_turn(turn)
            settled = set(map(ORDER.order_of, self.used))
            if own <= settled:
                break
        assert own <= settled, "a prompt was lost"
        self.report_step()
        counts = self.service.gate.counts()
        assert (counts.running, counts.finished_untrained) == (0, len(self.trainer.buffer)), "the gate lost a place"
        placed = [self.service.routes.router_of(policy).placed for policy in ("past", *self.trained)]
        assert not any(placed), "a server keeps the load of what is over"
        waiting = {name for worker in self.workers for name in worker.ids}
        assert not any(map(self.service.gate.outcome, waiting)), "a worker asks for what will not start"

    @move(first=WORKER)
    def fair_turn(self, first: int) -> None:
        """All calls are answered, all that runs ends, and if it suffices a step is trained."""
        self.all_speak()
        count = len(self.workers)
        for pick in (each % count for each in range(first, first + count)):  # whoever asks first finds the places
            worker = self.at(pick)
            if self.online:
                self.clients_ask(pick, 3)
            self.allocate(pick, 3, "answered")
            while worker.running:
                self.push(0)
                self.arrive(0, 0, True)
            self.report(pick, "answered")
        self.report_step()
        self.train(dies=False)
        self.report_step()
        for policy in (False, True):
            self.the_server_updates(2, policy)

    def all_speak(self) -> None:
        """What a manager waits for that begins."""
        for pick in range(len(self.workers)):
            self.open_session(pick, "answered")
        if not self.service.begun:
            self.the_roll_is_called()
        self.report_step()
        assert self.service.begun

    def end(self) -> None:
        """As the master ends: what is not trained is abandoned, the counters balance, the ledger is complete."""
        self.all_speak()
        self.account_for_all()
        if self.ends_twice:
            self.the_brain_dies()
            self.all_speak()
            self.account_for_all()
        self.ledger.close()
        findings: list[str] = []

        def find(place: str, what: str) -> None:
            findings.append(f"{place}: {what}")

        outcome = Replay(ROWS, find).run(surviving(read_ledger(self.folder, find), find))
        assert not findings, findings
        assert outcome.trained == self.trainer.version * self.batch
        recorded: list[list[str]] = [[] for _ in self.history]
        for line in outcome.rollouts.values():
            recorded[line.step - 1].append(line.prompt)
        assert recorded == self.history, "what was trained is what the ledger says"
        assert set(outcome.used) == set(self.used)

    def account_for_all(self) -> None:
        number, version = self.service.number, self.trainer.version
        self.loop.run_until_complete(self.service.close_gate(m.CloseGate(manager=number)))
        counts = self.loop.run_until_complete(self.service.end_run(m.EndReport(version, manager=number)))
        self.written = self.ledger.lines
        assert counts == self.loop.run_until_complete(self.service.end_run(m.EndReport(version, manager=number)))
        assert self.ledger.lines == self.written, "a repeated call writes nothing"
        check_counts(counts, version * self.batch)


def test_a_checkpoint_keeps_its_line_in_a_ledger_that_went_on_from_its_step() -> None:
    """The brain dies after a checkpoint and goes on from the same step; then the run dies."""
    schedule = Schedule()
    schedule.begin(batch=1, eta=1, on_stale=OnStale.drop, stops_early=False)
    schedule.fair_turn(0)
    schedule.save()
    schedule.the_checkpoint_is_complete()
    schedule.the_brain_dies()
    schedule.fair_turn(0)
    schedule.the_run_dies()
    schedule.fair_turn(0)
    schedule.teardown()


class Played(NamedTuple):
    """A schedule: how it began, and its moves in order."""

    beginning: dict[str, Any]
    moves: list[tuple[str, dict[str, Any]]]

    @property
    def command(self) -> str:
        """Plays the schedule again."""
        written = shlex.quote(msgspec.json.encode(self).decode())
        return f"python -m tests.unit.manager.test_any_schedule {written}"


def play_long(seed: int, steps: int = LONG) -> None:
    """Play a random schedule of so many moves.

    Raises:
        AssertionError: something did not hold; the message has the command that plays the schedule again, shortened.
    """
    random = Random(seed)
    played = Played({name: random.choice(values) for name, values in BEGINNINGS.items()}, [])
    schedule = Schedule()
    schedule.begin(**played.beginning)
    often = {each.name: random.choice((0.2, 1, 5)) for each in MOVES}
    for name in CLEARS_UP:  # else it is most of what happens, and there is never much in hand that could be lost
        often[name] *= random.choice((0.01, 0.05, 0.2))
    answered = random.choice((0.0, 0.5, 0.9))
    try:
        for _ in range(steps):
            possible = [each for each in MOVES if each.when(schedule)]
            (chosen,) = random.choices(possible, [often[each.name] for each in possible])
            arguments = {name: random.choice(values) for name, values in chosen.choices.items()}
            if "fate" in arguments and random.random() < answered:
                arguments["fate"] = "answered"
            played.moves.append((chosen.name, arguments))
            getattr(schedule, chosen.name)(**arguments)
            schedule.counts_balance_and_nothing_is_trained_twice()
        schedule.teardown()
    except Exception as error:
        again = shortened(played) if Phase.shrink in settings().phases else played
        raise AssertionError(f"seed {seed}: {error!r}; play it again:\n{again.command}") from error


def shortened(played: Played) -> Played:
    """Return a schedule that fails too, of which no move can be left out."""
    moves, width = list(played.moves), len(played.moves) // 2
    while width:
        at = 0
        while at < len(moves):
            fewer = moves[:at] + moves[at + width :]
            try:
                play(played._replace(moves=fewer))
            except Exception:
                moves = fewer
            else:
                at += width
        width //= 2
    return played._replace(moves=moves)


def play(played: Played) -> None:
    """Play a schedule again; moves that are not possible are left out."""
    when = {each.name: each.when for each in MOVES}
    schedule = Schedule()
    schedule.begin(**played.beginning)
    for name, arguments in played.moves:
        if when[name](schedule):
            getattr(schedule, name)(**arguments)
            schedule.counts_balance_and_nothing_is_trained_twice()
    schedule.teardown()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + LONG_SCHEDULES))
def test_a_long_schedule(seed: int) -> None:
    play_long(seed)


def batches_without_lag(seed: int, batch: int, rejected: Callable[[int, int], bool]) -> list[set[tuple[int, int]]]:
    """Order and attempt of what each of 10 steps trains at eta = 0, with the timing, losses and deaths of `seed`.

    No worker dies: prompts that may have been why would wait (`suspects`).
    """
    random, batches = Random(seed), list[set[tuple[int, int]]]()
    schedule = Schedule()
    schedule.begin(batch=batch, eta=0, on_stale=OnStale.drop, stops_early=True, own=3)
    played: dict[str, tuple[int, int]] = {}

    def end_one() -> None:
        running = [(worker, name) for worker in schedule.workers for name in sorted(worker.running)]
        if not running:
            return
        pick = random.randrange(len(running))
        worker, name = running[pick]
        granted = worker.running[name]
        played[name] = granted.order, granted.attempt
        if rejected(*played[name]):
            del worker.running[name]
            ended = m.FinishedRollout(name, False, "rejected", return_prompt=True, as_next_attempt=True)
            worker.ended.append(ended)
        else:
            schedule.push(pick)
            schedule.arrive(0, random.randrange(HEADS), random.random() < 0.8)

    def train() -> None:
        """A step whose death would cost it is left out of the batches once the brain has died."""
        if between_steps(schedule):
            schedule.train(dies=False)
        if schedule.trainer.batch is not None:
            del batches[schedule.trainer.version - 1 :]
            batches.append({played[name] for name in schedule.trainer.in_step})

    def step_end() -> None:
        """One point of the step's end, or what leads to the next step."""
        trainer, lost = schedule.trainer, random.random() < 0.3
        if not trainer.begun:
            schedule.the_run_begins(lost)
        elif trainer.batch is not None:
            schedule.the_gate_records_the_step(lost)
        elif trainer.state is not None:
            schedule.the_state_is_complete()
        elif not between_steps(schedule):
            schedule.the_version_is_announced()
        elif schedule.service.begun:
            schedule.report_drops(lost)

    def late_call() -> None:
        if schedule.network:
            schedule.a_call_arrives_late(random.choice(PICK), random.random() < 0.5)

    moves: list[tuple[int, Callable[[], None]]] = [
        (10, lambda: schedule.allocate(random.randrange(3), random.choice(UP_TO_3), random.choice(FATE))),
        (10, end_one),
        (5, lambda: schedule.report(random.randrange(3), random.choice(FATE))),
        (5, schedule.collect),
        (5, train),
        (5, step_end),
        (5, lambda: schedule.the_server_updates(random.randrange(3))),
        (1, lambda: schedule.the_brain_dies()),
        (5, lambda: schedule.open_session(random.randrange(3), random.choice(FATE))),
        (1, lambda: schedule.a_lease_lapses(random.randrange(3))),
        (5, late_call),
    ]
    for _ in range(20_000):
        if len(batches) == 10:
            break
        random.choices([each for _, each in moves], [often for often, _ in moves])[0]()
    schedule.teardown()
    return batches


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_without_lag_what_each_step_trains_does_not_depend_on_timing(batch: int) -> None:
    def rejected(order: int, attempt: int) -> bool:
        return attempt < 2 and (5 * order + 2 * attempt) % 3 == 0

    batches = batches_without_lag(0, batch, rejected)
    assert len(batches) == 10
    assert any(attempt for each in batches for _, attempt in each)
    for seed in range(1, 5):
        assert batches_without_lag(seed, batch, rejected) == batches


def test_without_lag_and_rejections_step_v_trains_what_the_reference_loop_does() -> None:
    batches = batches_without_lag(7, 3, lambda order, attempt: False)
    assert batches == [{(order, 0) for order in range(3 * step, 3 * step + 3)} for step in range(10)]


def test_a_schedule_is_read_back_from_its_command() -> None:
    beginning = {"batch": 1, "eta": 2, "on_stale": OnStale.wait, "stops_early": False, "own": 3}
    played = Played(beginning, [("fair_turn", {"first": 0}), ("save", {})])
    written = shlex.split(played.command)[-1]
    assert msgspec.json.decode(written, type=Played) == played


Schedule.TestCase.settings = settings(max_examples=SCHEDULES, stateful_step_count=50, deadline=None)
test_any_schedule = Schedule.TestCase

if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Played))

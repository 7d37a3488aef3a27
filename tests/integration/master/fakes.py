"""The peers of the master's loop in one process, and a loop with them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec import structs

from asyncrl.comm.ended_rollouts import RolloutCounts, Step, Trained
from asyncrl.comm.names import TrainerTurn
from asyncrl.comm.request_reply import Done, Reply, Request, RequestTimeout
from asyncrl.comm.waits import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.curriculum import make_curriculum
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.client import ManagerGone
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.rollouts.staleness_gate import LiveRollout
from asyncrl.manager.service import ManagerService
from asyncrl.master.graph import grpo
from asyncrl.master.train_loop import Peers, TrainLoop
from asyncrl.observe.tail import read_rows
from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult, StillThere
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    AskPulse,
    BeginStep,
    CallStats,
    CommitCheckpoint,
    Discard,
    EndedStep,
    EndStep,
    FinishShare,
    LoadCheckpoint,
    LoadedCheckpoint,
    LoadMemoryCheckpoint,
    PollBuffer,
    PolledBuffer,
    Publish,
    PublishedWeights,
    RankPulse,
    RolloutRecord,
    RunCall,
    SaveCheckpoint,
    WrittenShare,
)
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay
from asyncrl.weights.checkpoints import prune
from asyncrl.weights.manifest import FileEntry
from tests.statuses import status_reply

_Q = TypeVar("_Q", bound=Request[Any])
WORKER, SILENT = "rollout_worker/0", "rollout_worker/1"
"""RolloutWorkers: the one that plays what the ranks receive, and one that falls silent."""
ROWS = 1000
"""Rows of the training data."""
TRAIN_STATS = {
    "ppo/clip_fraction": 0.1, "ppo/behave_imp_weight_mean": 1.0, "ppo/behave_kl": 0.0, "entropy": 0.5, "grad_norm": 1.0,
    "lr": 1e-4, "ppo/loss_per_minibatch": [0.1, 0.2],
}  # fmt: skip


def make_config(**changes: Any) -> ExperimentConfig:
    config = ExperimentConfig(total_train_steps=3, train_batch_size=4, group_size=2, max_head_offpolicyness=1)
    config.trainer.ppo_minibatches = 2
    config.eval.interval = 0
    config.checkpoint.interval = 0
    config.logging.tensorboard = False
    config.dataset.shuffle = False
    for name, value in changes.items():
        group, _, leaf = name.rpartition("__")
        setattr(vars(config)[group] if group else config, leaf, value)
    return config


def commit(order: CommitCheckpoint, path: Path) -> None:
    """Leave the folder that a checkpoint leaves, and delete those that it ends."""
    path.mkdir(parents=True, exist_ok=True)
    prune(path.parent, order.keep, order.protected)


@dataclass
class FakeWorkers:
    """ModelWorkers: a queue of received rollouts per data head, a log of what they were asked.

    `count` of them are data-parallel copies, unless they are `placed` otherwise.
    """

    count: int = 1
    placed: Placement | None = None
    stored: dict[str, Any] | None = None
    kept: dict[str, Any] | None = None
    memory_checkpoint: MemoryCheckpoint | None = None
    log: list[tuple[int, Request[Any]]] = field(default_factory=list)
    received: dict[int, list[RolloutRecord]] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)
    fail: dict[type[Request[Any]], Exception] = field(default_factory=dict)
    filtered_in_graph: float | None = None
    left: frozenset[str] = frozenset()
    train_gate: asyncio.Event | None = None
    write_gate: asyncio.Event | None = None
    on_train: Callable[[], None] | None = None
    pulse: Callable[[int], RankPulse] | None = None

    def __post_init__(self) -> None:
        self.placed = self.placed or Placement(dict.fromkeys(("actor", "ref"), WorkerGrid(data=self.count)))
        self.count = self.placed.workers
        self.received = {worker: [] for worker in self.placed.actor.data_heads}
        self._arrived = asyncio.Condition()

    async def deliver(self, record: RolloutRecord) -> None:
        async with self._arrived:
            self.received[list(self.received)[record.head]].append(record)
            self._arrived.notify_all()

    def __iter__(self) -> Iterator[FakeWorker]:
        return iter([FakeWorker(self, index) for index in range(self.count)])

    async def answer(self, worker: int, request: Request[Any]) -> Reply:
        if isinstance(request, PollBuffer):
            reply = await self._poll(worker, request)
            if PollBuffer in self.fail:
                raise self.fail[PollBuffer]
            return reply
        self.log.append((worker, request))
        if type(request) in self.fail:
            raise self.fail[type(request)]
        match request:
            case Discard():
                self.discarded += request.rollout_ids
            case FinishShare():
                if self.write_gate is not None:
                    await self.write_gate.wait()
                return WrittenShare({f"shard-{worker}": FileEntry(1, "0")})
            case CommitCheckpoint():
                assert worker == 0 or request.in_memory, "the publisher"
                assert len(request.files) == self.count
                begun = self.begun(request.in_memory)
                assert begun.path == request.path
                if request.in_memory:
                    assert self.memory_checkpoint is not None
                    commit(request, self.memory_checkpoint.state_root / request.path)
                    self.kept = json.loads(json.dumps(begun.master_state))
                    self.left |= self._begun_before(begun)
                else:
                    commit(request, Path(request.path))
                    self.stored = json.loads(json.dumps(begun.master_state))
            case EndStep():
                return EndedStep(memory_bytes=1000 + worker, flops_per_s=2e12 + 2e12 * worker, mfu=0.25 + 0.25 * worker)
            case AskPulse():
                if self.pulse is not None:
                    return self.pulse(len(self.requests(AskPulse)))
                return RankPulse()
            case LoadCheckpoint() | LoadMemoryCheckpoint():
                self.received = {head: self.held(records) for head, records in self.received.items()}
                return LoadedCheckpoint(self.stored if isinstance(request, LoadCheckpoint) else self.kept)
            case Publish():
                return PublishedWeights(f"weights/actor/v{request.version}")
            case RunCall(function="actor_train"):
                if self.on_train is not None:
                    self.on_train()
                if self.train_gate is not None:
                    await self.train_gate.wait()
                counted = self.filtered_in_graph
                return CallStats(TRAIN_STATS | ({} if counted is None else {"filter/dropped_groups": counted}))
            case RunCall():
                return CallStats({})
        return Done()

    async def _poll(self, worker: int, poll: PollBuffer) -> PolledBuffer:
        received = self.received[worker]
        async with self._arrived:
            with suppress(TimeoutError):
                async with asyncio.timeout(poll.timeout_s):
                    await self._arrived.wait_for(lambda: len(received) > poll.cursor)
        return PolledBuffer(len(received), tuple(received[poll.cursor :]))

    def held(self, records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
        """Return those of `records` that are neither discarded nor trained in a step whose state is whole."""
        gone = (
            self.left.union(self.discarded) if self.memory_checkpoint else {*self.trained_rollouts(), *self.discarded}
        )
        return [record for record in records if record.rollout_id not in gone]

    def _begun_before(self, save: SaveCheckpoint) -> set[str]:
        """Return the rollouts of the steps that a state has."""
        before = itertools.takewhile(lambda request: request is not save, (request for _, request in self.log))
        return {rollout for request in before if isinstance(request, BeginStep) for rollout in request.leaving}

    def requests(self, kind: type[_Q]) -> list[_Q]:
        """Return the requests of this kind that worker 0 received."""
        return [request for worker, request in self.log if worker == 0 and isinstance(request, kind)]

    def begun(self, in_memory: bool) -> SaveCheckpoint:
        """The checkpoint, or state of a step, that was begun last."""
        return next(each for each in reversed(self.requests(SaveCheckpoint)) if each.in_memory == in_memory)

    def saved(self) -> list[int]:
        return [int(Path(request.path).name[1:]) for request in self.requests(CommitCheckpoint)]

    def trained_rollouts(self) -> list[str]:
        """Return the trained rollouts of each step in data order; with several ranks, rank by rank."""
        return [rollout for _, step in self.log if isinstance(step, BeginStep) for rollout in step.leaving]


@dataclass
class FakeWorker:
    """One of them."""

    all: FakeWorkers
    index: int

    async def call(self, request: Request[Any], *, timeout_s: float) -> Any:
        return await self.all.answer(self.index, request)


class SlowDisk:
    """The ledger's thread, of which nothing is done before somebody waits for it: that much a death may cost."""

    def __init__(self) -> None:
        self._undone: list[Callable[[], None]] = []

    def submit(self, write: Callable[..., None], *given: Any, **options: Any) -> Future[None]:
        done = _Done(self.do)

        def work() -> None:
            try:
                write(*given, **options)
                done.set_result(None)
            except OSError as error:
                done.set_exception(error)

        self._undone.append(work)
        if not options["sync"]:  # `Ledger.written` waits for it
            self.do()
        return done

    def do(self) -> None:
        undone, self._undone = self._undone, []
        for work in undone:
            work()

    def lose(self) -> None:
        self._undone = []

    def shutdown(self) -> None:
        pass


class _Done(Future[None]):
    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self._do = do

    def result(self, timeout: float | None = None) -> None:
        self._do()
        super().result(timeout)


@dataclass
class FakeManager:
    """The real gate, prompts and ledger of a GserverManager, without HTTP and servers.

    `admit`, `give_up`, `lose` and `measure` are what its RolloutWorkers do. They wait until its gate is open.

    Attributes:
        number: counts the managers of a launch; `start` makes the next one.
        reported: what the master brought it.
        reports: version, trained rollouts and drops of each report.
        dead, silent: it refuses calls, or does not answer them.
        lost: rollouts that it does not account for at the end.
    """

    run_dir: Path
    config: ExperimentConfig
    number: int = -1
    reported: m.RunBegin | None = None
    reports: list[tuple[int, list[str], list[m.DroppedRollout]]] = field(default_factory=list)
    expiring: list[list[str]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    closed: bool = False
    lost: int = 0
    dead: bool = False
    silent: bool = False
    versions_in_use: list[int] = field(default_factory=list)
    asleep: list[list[str]] = field(default_factory=list)
    asked_asleep: list[int] = field(default_factory=list)
    others: int = 0
    wake_s: float = 0.0
    seen: m.StatusReply = status_reply()

    def __post_init__(self) -> None:
        self.ledger: Ledger | None = None
        self.start()

    def start(self) -> None:
        """Be the next manager, which knows nothing; the one before is dead."""
        self.die()
        config, curriculum = self.config, self.config.dataset.curriculum
        self.number, self.reported = self.number + 1, None
        self._later: list[Callable[[], Any]] = []
        self.ledger, self._disk = Ledger.of_run(self.run_dir, config), SlowDisk()
        self.ledger._files._thread = cast(Any, self._disk)
        self.service = ManagerService(
            batch_size=config.train_batch_size,
            max_staleness=config.max_head_offpolicyness,
            routing="round_robin",
            lease_s=300.0,
            order=DataOrder(ROWS, config.seed, shuffle=False),
            number=self.number,
            versions_in_use=lambda: self.versions_in_use,
            curriculum=partial(make_curriculum, curriculum) if curriculum.is_on else None,
            ledger=self.ledger,
        )
        self.service.await_workers({WORKER: 0})
        _LIVING.append(self)

    def die(self) -> None:
        """Take away what a process takes along: of the lines that were not written the kernel got a half."""
        if self.ledger is not None:
            self._disk.lose()
            unwritten = self.ledger._files._appended
            del unwritten[len(unwritten) // 2 :]
            self.ledger.close()
            self.ledger = None

    @property
    def counts(self) -> RolloutCounts:
        return self.service.gate.counts()

    @property
    def dropped(self) -> dict[str, int]:
        return self.counts.dropped

    @property
    def used(self) -> set[str]:
        """Prompts that are trained or dropped for good."""
        return set(self.service.rollouts.used)

    def admit(self, rollout_id: str, order: int, version: int = 0, worker: str = WORKER) -> None:
        """Let `worker` play a rollout now, whatever the gate's limit is."""
        rollouts, live = self.service.rollouts, LiveRollout(rollout_id, worker, f"e0-{order}", order, version=version)
        rollouts.gate.enter(live)
        rollouts._admitted(live)

    def give_up(self, prompt_id: str, reason: str = "failed") -> None:
        """A RolloutWorker drops a rollout of `prompt_id` for good."""

        def end() -> None:
            self.admit(f"of {prompt_id}", int(prompt_id.partition("-")[2]))
            self.service.rollouts.finish(m.FinishedRollout(f"of {prompt_id}", False, reason))

        self.once_begun(end)

    def lose(self, order: int, tag: str = "r") -> None:
        """The RolloutWorker that runs the rollout of this order falls silent; the prompt is played again."""

        def end() -> None:
            self.admit(f"{tag}{order}", order, worker=SILENT)
            self.service.worker_died(SILENT)

        self.once_begun(end)

    def measure(self, rollout_id: str, success: float) -> None:
        """The RolloutWorker of a rollout that the ranks received reports how many of its answers were right."""
        end = m.FinishedRollout(rollout_id, True, success=success)
        self.once_begun(lambda: self.service.rollouts.finish(end))

    def once_begun(self, does: Callable[[], Any]) -> None:
        """Call `does` now, or when the gate opens, and then await what it returns."""
        if self.service.begun:
            does()
        else:
            self._later.append(does)

    async def call(self, request: m.Request[m.R]) -> m.R:
        reply: m.R = await getattr(self, request.path[1:])(request)
        return reply

    async def begin_run(self, begin: m.RunBegin) -> m.Session:
        await self._answers()
        self.reported = begin
        await self.service.begin_run(begin)
        await self.service.open_session(m.HeldReport(WORKER))
        for does in self._later:
            if (waiting := does()) is not None:
                await waiting
        return m.Session(self.number)

    async def received(self, report: m.ReceivedReport) -> m.ReceivedReply:
        await self._answers()
        return await self.service.received(structs.replace(report, manager=self.number))

    async def consumed(self, report: m.ConsumedReport) -> m.ConsumedReply:
        await self._answers()
        self.reports.append((report.version, [each.rollout_id for each in report.trained], report.dropped))
        return await self.service.consumed(structs.replace(report, manager=self.number))

    async def wait_expiring(self, request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        self.asked.append(request.version)
        return m.WaitExpiringReply(self.expiring.pop(0) if self.expiring else [])

    async def wait_asleep(self, request: m.WaitAsleepRequest) -> m.WaitAsleepReply:
        self.asked_asleep.append(request.turn)
        return m.WaitAsleepReply(self.asleep.pop(0) if self.asleep else [], self.others, self.wake_s)

    async def close_gate(self, request: m.CloseGate) -> m.Done:
        await self._answers()
        self.closed = True
        return await self.service.close_gate(structs.replace(request, manager=self.number))

    async def end_run(self, report: m.EndReport) -> RolloutCounts:
        await self._answers()
        counts = await self.service.end_run(structs.replace(report, manager=self.number))
        return structs.replace(counts, abandoned=counts.abandoned - self.lost)

    async def status(self, request: m.StatusRequest) -> m.StatusReply:
        counts = structs.replace(self.seen.gate.counts, dropped=self.dropped)
        servers = [*self.seen.servers, *status_reply(versions=self.versions_in_use).servers[1:]]
        known = self.seen.rebuilt and self.service.begun
        gate = structs.replace(self.seen.gate, counts=counts)
        return structs.replace(self.seen, gate=gate, servers=servers, rebuilt=known)

    async def _answers(self) -> None:
        if self.dead:
            raise ManagerGone("the manager is gone")
        if self.silent:
            await asyncio.Event().wait()


_LIVING: list[FakeManager] = []


def end_managers() -> None:
    """End the managers that a test has left."""
    while _LIVING:
        _LIVING.pop().die()


@dataclass
class FakeRollouts:
    """The one RolloutWorker; its evaluations end when told to."""

    started: list[int] = field(default_factory=list)
    finish: asyncio.Event | None = None
    lengths: dict[int, int] = field(default_factory=dict)
    fail: Exception | None = None
    failing: tuple[str, ...] = ()
    silent: bool = False

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        if isinstance(request, StillThere):
            if self.silent:
                raise RequestTimeout("no answer")
            return Done()
        self.started.append(request.version)
        if self.finish is not None:
            await self.finish.wait()
        if self.fail is not None:
            raise self.fail
        if request.name in self.failing:
            raise RuntimeError("no server")
        length = self.lengths.get(request.version, 6)
        right = EvaluatedAnswer(0, 1.0, True, length - 1, False, {"tool/search/calls": 2.0})
        answers = (right, EvaluatedAnswer(1, 0.0, False, length + 1, True))
        return EvaluationResult(answers, 0, request.version, request.version)


@dataclass
class FakeBoard:
    """Remembers what was announced."""

    versions: list[int] = field(default_factory=list)
    starting: bool = False
    turns: list[TrainerTurn] = field(default_factory=list)

    def trainer_turn(self) -> TrainerTurn | None:
        return self.turns[-1] if self.turns else None

    def announce_turn(self, turn: TrainerTurn) -> None:
        self.turns.append(turn)

    def producers_start(self) -> bool:
        return self.starting

    def announce_version(self, version: int, path: str, win_rates: Any = None) -> None:
        self.versions.append(version)

    def announced_version(self) -> int:
        return self.versions[-1] if self.versions else 0


class Run:
    """A loop with its fake peers."""

    def __init__(
        self,
        run_dir: Path,
        config: ExperimentConfig,
        workers: FakeWorkers | None = None,
        clock: RunningClock | None = None,
        memory_checkpoint: MemoryCheckpoint | None = None,
        follows: Run | None = None,
    ) -> None:
        """Args:
        follows: run whose brain has died; this one has the next.
        """
        self.run_dir, self.config = run_dir, config
        self.workers: FakeWorkers = workers or (FakeWorkers() if follows is None else follows.workers)
        self.memory_checkpoint: MemoryCheckpoint | None = memory_checkpoint
        if follows is None:
            self.manager, self.rollouts, self.board = FakeManager(run_dir, config), FakeRollouts(), FakeBoard()
        else:
            self.manager, self.rollouts, self.board = follows.manager, follows.rollouts, follows.board
            self.memory_checkpoint = memory_checkpoint or follows.memory_checkpoint
            self.manager.start()
        self.workers.memory_checkpoint = self.memory_checkpoint
        self.stop = asyncio.Event()
        graph = grpo(config)
        assert self.workers.placed is not None
        fakes: list[Any] = [list(self.workers), self.workers.placed, self.manager, [self.rollouts], self.board]
        self.loop = TrainLoop(
            config, run_dir, graph, Peers(*fakes), self.stop, self._begin, clock, self.memory_checkpoint
        )
        self.begun = 0

    def _begin(self) -> None:
        self.begun += 1

    async def deliver(self, orders: Iterable[int], oldest: int = 0, worker: int = 0, tag: str = "r") -> None:
        """The RolloutWorker plays these prompts, and the ranks receive them; at once, or when the gate opens."""

        async def play(order: int) -> None:
            self.manager.admit(f"{tag}{order}", order, oldest)
            await self.workers.deliver(rollout(order, oldest, tag, worker))

        for order in orders:
            if self.manager.service.begun:
                await play(order)
            else:
                self.manager.once_begun(partial(play, order))

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary


def rollout(order: int, oldest: int, tag: str = "r", worker: int = 0) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=f"{tag}{order}",
        prompt_id=f"e0-{order}",
        order=order,
        head=worker,
        oldest_version=oldest,
        version_tokens={oldest: 20},
        lengths=(12, 14),
        generated=(9, 11),
        rewards=(1.0, 0.0),
        truncated=(False, False),
        episodes=(0, 1),
    )


def check_history(run_dir: Path, steps: int) -> None:
    """The surviving lines of the ledger have each step and each prompt once; the audit finds nothing."""
    findings: list[str] = []

    def find(location: str, what: str) -> None:
        findings.append(f"{location}: {what}")

    entries = list(surviving(read_ledger(run_dir / "ledger", find), find))
    outcome = Replay(None, find).run(entries)
    assert [entry.line.step for entry in entries if isinstance(entry.line, Step)] == list(range(1, steps + 1))
    trained = [entry.line.prompt for entry in entries if isinstance(entry.line, Trained)]
    assert sorted(trained) == sorted(f"e0-{order}" for order in range(4 * steps))
    assert not findings, findings
    assert outcome.ended


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        run.manager.die()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the fakes have no clock, so it is a matter of rounds of the loop."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  # what is waited for is the loop itself
            await asyncio.sleep(0)


def kill(run: Run) -> None:
    """Disconnect the run: the end of anything from here on is not reported."""
    announcer: Any = run.loop.announcer
    announcer._board, announcer._metrics_log.evaluated = FakeBoard(), lambda *_: None

"""The peers of the master's loop in one process, and a loop with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import asdict

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, Dropped, PromptGoes, RolloutLine
from asyncrl.comm.names import TrainerTurn
from asyncrl.comm.request_reply import Done, Reply, Request
from asyncrl.comm.request_reply.client import RequestTimeout
from asyncrl.comm.waits.running_time import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import GateStatus
from asyncrl.manager.messages import (
    Books,
    ConsumedReply,
    DroppedRollout,
    GateBooks,
    ReceivedRollout,
    RunReport,
    WaitRestingReply,
)
from asyncrl.master.graph.builtin import grpo
from asyncrl.master.parts import Peers, assemble
from asyncrl.master.train_loop import TrainLoop
from asyncrl.models.weights.checkpoints.checkpoint_folder import prune
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.observe.history.tail import read_rows
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
from asyncrl.trainer.parallel.worker_grid import Placement, WorkerGrid

_Q = TypeVar("_Q", bound=Request[Any])
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
                self.received = {head: self._held(records) for head, records in self.received.items()}
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

    def _held(self, records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Those that were neither trained nor discarded."""
        begun = {rollout for _, request in self.log if isinstance(request, BeginStep) for rollout in request.leaving}
        return [record for record in records if record.rollout_id not in begun.union(self.discarded)]

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


@dataclass
class FakeManager:
    """Keeps books of what was submitted."""

    submitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    reports: list[tuple[int, list[str], list[DroppedRollout]]] = field(default_factory=list)
    expiring: list[list[str]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    closed: bool = False
    lost: int = 0
    dead: bool = False
    lines: list[RolloutLine] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    told: RunReport | None = None
    abandoned: int | None = None
    measured: list[tuple[str, float]] = field(default_factory=list)
    versions_in_use: list[int] = field(default_factory=list)
    resting: list[list[str]] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)
    others: int = 0
    wake_s: float = 0.0
    seen: GateStatus = GateStatus()

    async def wait_resting(self, turn: int, timeout_s: float) -> WaitRestingReply:
        self.rests.append(turn)
        return WaitRestingReply(self.resting.pop(0) if self.resting else [], self.others, self.wake_s)

    async def report_consumed(
        self,
        version: int,
        trained: Sequence[str],
        dropped: Sequence[DroppedRollout],
        events_after: int = 0,
        measured_after: int = 0,
    ) -> ConsumedReply:
        if self.dead:
            raise ConnectionError("the manager is gone")
        told = {rollout for _, trained_before, _ in self.reports for rollout in trained_before}
        self.reports.append((version, list(trained), list(dropped)))
        self.trained += len(set(trained) - told)
        for drop in dropped:
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1
        books = Books(**asdict(self.books()), version=version, trained_version=version)
        events, measured = self.lines[events_after:], self.measured[measured_after:]
        answered = (events, len(self.lines), measured, len(self.measured))
        return ConsumedReply(books, *answered, versions_in_use=self.versions_in_use)

    async def received(self, rollouts: Sequence[ReceivedRollout]) -> list[str]:
        if self.dead:
            raise ConnectionError("the manager is gone")
        trained = {rollout for _, trained_before, _ in self.reports for rollout in trained_before}
        return [each.rollout_id for each in rollouts if each.rollout_id in trained.union(self.given_up)]

    async def report_run(self, report: RunReport) -> int:
        self.told = report
        return 0

    async def wait_expiring(self, version: int, timeout_s: float) -> Sequence[str]:
        self.asked.append(version)
        return self.expiring.pop(0) if self.expiring else []

    async def close_gate(self) -> None:
        self.closed = True

    async def abandon(self) -> GateBooks:
        self.abandoned = self.books().running - self.lost
        return self.books()

    def give_up(self, prompt_id: str, reason: str = "failed") -> None:
        """A RolloutWorker dropped a rollout of `prompt_id` for good."""
        self._drop(f"of {prompt_id}", int(prompt_id.partition("-")[2]), reason, PromptGoes.given_up)

    def lose(self, order: int, tag: str = "r") -> None:
        """The RolloutWorker that runs the rollout of this order fell silent; the prompt is played again."""
        self._drop(f"{tag}{order}", order, "worker_died", PromptGoes.returned)
        self.given_up.append(f"{tag}{order}")

    def _drop(self, rollout: str, order: int, reason: str, goes: PromptGoes) -> None:
        self.submitted += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.lines.append(Admitted(rollout, f"e0-{order}", order, 0, "rollout_worker/0", 0, 1.0))
        self.lines.append(Dropped(rollout, reason, goes, 1.0))

    def books(self) -> GateBooks:
        running = self.submitted - self.trained - sum(self.dropped.values())
        if self.abandoned is not None:
            return GateBooks(self.submitted, self.trained, dict(self.dropped), self.abandoned)
        return GateBooks(self.submitted, self.trained, dict(self.dropped), 0, running)

    async def status(self) -> GateStatus:
        return replace(self.seen, versions_in_use=frozenset(self.versions_in_use), dropped=dict(self.dropped))

    async def describe(self) -> str:
        return f"gate: running 7; trained {self.trained}; servers: 0 updating"


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
    begun: int | None = None
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

    def ledger_has_begun(self) -> bool:
        return self.begun is not None

    def ledger_begun(self, lineage: int) -> None:
        self.begun = lineage


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
        self.run_dir, self.config = run_dir, config
        self.workers = workers or (FakeWorkers() if follows is None else follows.workers)
        self.manager, self.rollouts, self.board = FakeManager(), FakeRollouts(), FakeBoard()
        if follows is not None:
            self.manager, self.rollouts, self.board = follows.manager, follows.rollouts, follows.board
        self.stop = asyncio.Event()
        graph = grpo(config)
        assert self.workers.placed is not None
        peers = Peers(list(self.workers), self.workers.placed, self.manager, [self.rollouts], self.board)
        self.memory_checkpoint = self.workers.memory_checkpoint = memory_checkpoint or (
            None if follows is None else follows.memory_checkpoint
        )
        parts = assemble(config, run_dir, graph, peers, self.stop, clock, self.memory_checkpoint)
        self.loop = TrainLoop(parts, ready=self._begin)
        self.begun = 0

    def _begin(self) -> None:
        self.begun += 1

    async def deliver(self, orders: Iterable[int], oldest: int = 0, worker: int = 0, tag: str = "r") -> None:
        for order in orders:
            self.manager.submitted += 1
            await self.workers.deliver(rollout(order, oldest, tag, worker))

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())


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


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the fakes have no clock, so it is a matter of rounds of the loop."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  # what is waited for is the loop itself
            await asyncio.sleep(0)


def kill(run: Run) -> None:
    """Disconnect the run: the end of anything from here on is not reported."""
    run.loop.parts.announcer._on_end = run.loop.parts.announcer._announce = lambda *_: None

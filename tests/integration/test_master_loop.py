"""The master's loop, whole, against peers in the same process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import asdict

from asyncrl.comm.awake import AwakeClock
from asyncrl.comm.request_reply import Done, PeerGone, RemoteError, Reply, Request
from asyncrl.comm.request_reply.messages import Failure
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.datasets.used_prompts import UsedPrompts
from asyncrl.manager.client import GateStatus
from asyncrl.manager.messages import Books, ConsumedReply, DroppedRollout, GateBooks
from asyncrl.master.graph.builtin import grpo
from asyncrl.master.graph.executor import ExecutionError
from asyncrl.master.ranks import Stalled
from asyncrl.master.run_files import BooksError
from asyncrl.master.train_loop import Peers, TrainLoop
from asyncrl.observability.metrics import read_rows
from asyncrl.rollout.messages import Evaluate, EvaluatedAnswer, EvaluationResult
from asyncrl.rollout.settings import EvalSetConfig
from asyncrl.runtime.last_step import LastStep
from asyncrl.runtime.worker import RestartTogether
from asyncrl.trainer.messages import (
    COPY_INTERRUPTED,
    KEPT_STEP_LOST,
    BeginStep,
    CallStats,
    CollectWeights,
    CommitCheckpoint,
    Discard,
    FinishShare,
    InStep,
    LoadCheckpoint,
    LoadedCheckpoint,
    LoadLastStep,
    LookIntoStep,
    PollBuffer,
    PolledBuffer,
    Publish,
    PublishedWeights,
    RolloutRecord,
    RunCall,
    SaveCheckpoint,
    Standing,
    TakeUp,
    WrittenShare,
)
from asyncrl.trainer.worker_grid import Placement, WorkerGrid
from asyncrl.weights.checkpoint_dir import prune
from asyncrl.weights.manifest import FileEntry

_Q = TypeVar("_Q", bound=Request[Any])
TRAIN_STATS = {
    "ppo/clip_fraction": 0.1, "ppo/behave_weight_mean": 1.0, "ppo/behave_kl": 0.0, "entropy": 0.5, "grad_norm": 1.0,
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
    last_step: LastStep | None = None
    log: list[tuple[int, Request[Any]]] = field(default_factory=list)
    received: dict[int, list[RolloutRecord]] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)
    fail: dict[type[Request[Any]], Exception] = field(default_factory=dict)
    filtered_in_graph: float | None = None
    train_gate: asyncio.Event | None = None
    write_gate: asyncio.Event | None = None
    on_train: Callable[[], None] | None = None
    standing: dict[int, Standing] = field(default_factory=dict)

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
                assert worker == 0 or request.of_last_step, "the publisher"
                assert len(request.files) == self.count
                begun = self.requests(SaveCheckpoint)[-1]
                assert begun.path == request.path
                if request.of_last_step:
                    assert self.last_step is not None
                    commit(request, self.last_step.state_root / request.path)
                else:
                    commit(request, Path(request.path))
                    self.stored = json.loads(json.dumps(begun.master_state))
            case LookIntoStep():
                return InStep(self.stands(worker).in_step)
            case TakeUp():
                self.received = {head: self._held(records) for head, records in self.received.items()}
                return self.stands(worker)
            case BeginStep():
                self.standing[worker] = Standing(in_step=True, master_state=None)
            case SaveCheckpoint(of_last_step=True):
                state = json.loads(json.dumps(request.master_state))
                self.standing[worker] = Standing(in_step=False, master_state=state)
            case LoadCheckpoint():
                return LoadedCheckpoint(self.stored)
            case LoadLastStep():
                return LoadedCheckpoint(self.kept)
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
        begun = {item.rollout_id for request in self.requests(BeginStep) for item in request.assignment}
        return [record for record in records if record.rollout_id not in begun.union(self.discarded)]

    def stands(self, worker: int) -> Standing:
        return self.standing.get(worker, Standing(in_step=False, master_state=None))

    def requests(self, kind: type[_Q]) -> list[_Q]:
        """What worker 0 was asked."""
        return [request for worker, request in self.log if worker == 0 and isinstance(request, kind)]

    def saved(self) -> list[int]:
        return [int(Path(request.path).name[1:]) for request in self.requests(CommitCheckpoint)]

    def trained_rollouts(self) -> list[str]:
        return [entry.rollout_id for step in self.requests(BeginStep) for entry in step.assignment]


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
    given_up: list[str] = field(default_factory=list)
    abandoned: int | None = None
    measured: list[tuple[str, float]] = field(default_factory=list)

    async def report_consumed(
        self,
        version: int,
        trained: Sequence[str],
        dropped: Sequence[DroppedRollout],
        given_up_after: int = 0,
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
        given_up, measured = self.given_up[given_up_after:], self.measured[measured_after:]
        return ConsumedReply(books, given_up, len(self.given_up), [], 0, measured, len(self.measured))

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
        self.submitted += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.given_up.append(prompt_id)

    def books(self) -> GateBooks:
        running = self.submitted - self.trained - sum(self.dropped.values())
        if self.abandoned is not None:
            return GateBooks(self.submitted, self.trained, dict(self.dropped), self.abandoned)
        return GateBooks(self.submitted, self.trained, dict(self.dropped), 0, running)

    async def status(self) -> GateStatus:
        description = f"gate: running 7; trained {self.trained}; servers: 0 updating"
        return GateStatus(0.0, frozenset(), description, dict(self.dropped))


@dataclass
class FakeRollouts:
    """The one RolloutWorker; its evaluations end when told to."""

    started: list[int] = field(default_factory=list)
    finish: asyncio.Event | None = None
    lengths: dict[int, int] = field(default_factory=dict)
    fail: Exception | None = None
    failing: tuple[str, ...] = ()

    async def call(self, request: Evaluate, *, timeout_s: float) -> EvaluationResult:
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
    data_state: Path | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    def announce_version(self, version: int, path: str) -> None:
        self.versions.append(version)

    def announced_version(self) -> int:
        return self.versions[-1] if self.versions else 0

    def announce_data_state(self, path: Path, dropped: Mapping[str, int]) -> None:
        self.data_state, self.dropped = path, dict(dropped)


class Run:
    """A loop with its fake peers."""

    def __init__(
        self,
        run_dir: Path,
        config: ExperimentConfig,
        workers: FakeWorkers | None = None,
        clock: AwakeClock | None = None,
        last_step: LastStep | None = None,
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
        self.last_step = self.workers.last_step = last_step or (None if follows is None else follows.last_step)
        self.loop = TrainLoop(config, run_dir, graph, peers, self.stop, clock, self.last_step, begun=self._begin)
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
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for is the loop itself
            await asyncio.sleep(0)


async def test_trains_every_step_and_leaves_rows_with_all_required_keys(
    tmp_path: Path, required_metrics: set[str]
) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    assert rows[0].keys() >= required_metrics
    assert rows[0]["reward/mean"] == 0.5
    assert rows[0]["ppo/loss_per_minibatch"] == [0.1, 0.2]
    assert run.board.versions == [1, 2, 3]
    assert run.summary()["books"] == {
        "submitted": 12, "trained": 12, "dropped": {}, "abandoned": 0, "running": 0, "finished_untrained": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("transport", "on_disk"), [("disk", [True] * 5), ("tensor", [False, True, False, True, True])])
async def test_weights_are_written_for_servers_that_read_them_with_checkpoints_and_at_the_end(
    tmp_path: Path, transport: str, on_disk: list[bool]
) -> None:
    config = make_config(total_train_steps=5, checkpoint__interval=2)
    config.manager.weight_transport = transport
    run = Run(tmp_path, config)
    await run.deliver(range(20), oldest=4)
    await run.loop.run()
    published = run.workers.requests(Publish)
    assert [(request.version, request.to_disk) for request in published] == list(enumerate(on_disk, start=1))
    kept = [request.keep for request in run.workers.requests(CollectWeights)]
    assert transport == "disk" or kept[3] == (2, 3), "the newest folder goes only when there is a newer one"


async def test_a_run_that_is_stopped_leaves_its_last_weights_on_disk(tmp_path: Path) -> None:
    config = make_config(total_train_steps=9, checkpoint__interval=0)
    config.manager.weight_transport = "tensor"
    run = Run(tmp_path, config)
    await run.deliver(range(4), oldest=0)
    async with running(run) as task:
        await until(lambda: run.board.versions == [1])
        run.stop.set()
        await task
    published = [(request.version, request.to_disk) for request in run.workers.requests(Publish)]
    assert published == [(1, False), (1, True)]


async def test_a_batch_is_in_data_order_and_every_rank_is_told_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1), FakeWorkers(count=2))
    for worker, orders in ((0, (5, 0)), (1, (3, 1))):
        for order in orders:
            await run.deliver(range(order, order + 1), worker=worker)
    await run.loop.run()
    steps = [request for _, request in run.workers.log if isinstance(request, BeginStep)]
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert [entry.rollout_id for entry in steps[0].assignment] == ["r0", "r1", "r3", "r5"]
    assert [entry.src for entry in steps[0].assignment] == [0, 1, 1, 0]
    assert sorted(entry.dst for entry in steps[0].assignment) == [0, 0, 1, 1]


async def test_trajectories_are_asked_of_the_heads_steps_of_all_and_weights_of_the_actors_ranks(tmp_path: Path) -> None:
    actor = WorkerGrid(data=2, tensor=2, pipeline=2)
    config = make_config(total_train_steps=2)
    config.algorithm.kl_coef = 0.1  # so there is a reference model
    placed = Placement({"actor": actor, "ref": WorkerGrid(data=1, first=8)})
    run = Run(tmp_path, config, FakeWorkers(placed=placed))
    await run.deliver(range(4), worker=1)
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        await run.deliver(range(1), oldest=1, worker=1, tag="again")
        await run.deliver(range(4, 8), oldest=1, worker=1)
        await task

    def asked(kind: type[Request[Any]], **fields: str) -> list[int]:
        found = [(worker, request) for worker, request in run.workers.log if isinstance(request, kind)]
        return [worker for worker, request in found if all(getattr(request, k) == v for k, v in fields.items())]

    assert asked(BeginStep) == list(range(9)) * 2
    assert asked(Publish) == list(range(8)) * 2
    assert asked(RunCall, name="ref_inf") == [8] * 2
    assert asked(RunCall, name="actor_train") == list(range(8)) * 2
    assert set(asked(SaveCheckpoint)) == set(range(9))
    steps = [request for _, request in run.workers.log if isinstance(request, BeginStep)]
    assert {(entry.src, entry.dst) for step in steps for entry in step.assignment} == {(1, 0), (1, 1)}
    discards = [(worker, request) for worker, request in run.workers.log if isinstance(request, Discard)]
    assert discards == [(2, Discard(("again0",)))], "the head of data index 1 is worker 2"


async def test_metadata_is_collected_while_a_step_trains(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=2))
    run.workers.train_gate = asyncio.Event()
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.workers.requests(RunCall) and "e0-0" not in run.loop.buffer.used)
        await run.deliver(range(4, 8))
        await until(lambda: len(run.loop.buffer) == 4)
        assert run.loop.version == 0
        run.workers.train_gate.set()
        await task
    assert run.loop.version == 2


async def test_stale_rollouts_are_dropped_freed_and_their_prompts_returned(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=3))
    await run.deliver(range(6), oldest=0)
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        await run.deliver(range(6, 8), oldest=1)
        await until(lambda: run.loop.version == 2)
        assert run.workers.discarded == []
        await run.deliver(range(8, 9), oldest=0, tag="late")
        await run.deliver(range(9, 13), oldest=2)
        await task
    assert run.workers.discarded == ["late8"]
    drops = [drop for _, _, drops in run.manager.reports for drop in drops]
    assert [(drop.rollout_id, drop.reason, drop.return_prompt) for drop in drops] == [("late8", "stale", True)]
    assert "e0-8" not in run.loop.buffer.used
    assert sum(row["rollout/dropped_stale"] for row in run.rows()) == 1
    assert max(row["staleness/max"] for row in run.rows()) <= 1


async def test_a_prompt_is_trained_once_though_two_attempts_arrive(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=2))
    await run.deliver(range(4), tag="first")
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        await run.deliver(range(2), oldest=1, tag="again")
        await run.deliver(range(4, 8), oldest=1)
        await task
    assert [rollout_id for rollout_id in run.workers.trained_rollouts() if rollout_id.startswith("again")] == []
    assert run.manager.dropped == {"duplicate_prompt": 2}


async def test_wait_holds_the_step_until_nothing_would_expire(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, on_stale="wait"))
    run.manager.expiring = [["r9"], ["r9"]]
    await run.deliver(range(4))
    await run.loop.run()
    assert run.manager.asked == [0, 0, 0]


async def test_wait_takes_what_arrived_by_the_time_the_way_was_clear(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, on_stale="wait"))
    await run.deliver(range(4, 8), oldest=1)

    async def clear_after_an_old_one_arrived(version: int, timeout_s: float) -> Sequence[str]:
        run.manager.submitted += 1
        run.workers.received[0].append(rollout(0, 0, "old"))  # without waking the poll that is open
        return []

    run.manager.wait_expiring = clear_after_an_old_one_arrived  # type: ignore[method-assign]
    await run.loop.run()
    assert run.workers.trained_rollouts() == ["old0", "r4", "r5", "r6"]


async def test_an_evaluation_pins_its_version_while_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, eval__interval=2))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.version == 2)
        assert run.rollouts.started == [0]
        assert run.board.versions == []  # version 0 is being measured
        run.rollouts.finish.set()
        await until(lambda: run.rollouts.started == [0, 2])
        run.rollouts.finish = None
        await run.deliver(range(8, 16), oldest=2)
        await task
    assert {2, 4} <= set(run.board.versions)  # a version that is measured is never skipped
    rows = {row["step"]: row for row in run.rows()}
    assert sorted(rows) == [0, 1, 2, 3, 4]
    measured = {"accuracy": 0.5, "reward_mean": 0.5, "len_mean": 6.0, "truncated": 0.5, "prompts": 2.0}
    measured["tool/search/calls"] = 2.0
    evaluation = {f"eval/held_out/{metric}": value for metric, value in measured.items()}
    assert rows[0] == {"step": 0, "policy_version": 0, **evaluation}
    assert [step for step, row in rows.items() if "eval/held_out/accuracy" in row] == [0, 2, 4]
    assert run.summary()["eval"] == {"held_out": {"version": 4, **measured}}
    assert [item["version"] for item in run.summary()["evaluations"]] == [0, 2, 4]
    assert run.summary()["evaluations_failed"] == []


async def test_a_failed_evaluation_does_not_hold_the_run_and_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(eval__interval=1))
    run.rollouts.fail = RuntimeError("no server")
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3]
    assert all(row["eval/held_out/failed"] == 1.0 and "eval/held_out/accuracy" not in row for row in run.rows())
    reason = "RuntimeError: no server"
    assert run.summary()["evaluations_failed"] == [
        {"version": version, "set": "held_out", "reason": reason} for version in range(4)
    ]


async def test_of_several_sets_each_has_its_interval_and_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    config = make_config(total_train_steps=3, eval__interval=1)
    config.eval.sets = [EvalSetConfig("easy", interval=2), EvalSetConfig("hard"), EvalSetConfig("never", interval=0)]
    run = Run(tmp_path, config)
    run.rollouts.failing = ("hard",)
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    rows = run.rows()
    assert [row["step"] for row in rows if "eval/easy/accuracy" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "eval/hard/failed" in row] == [0, 1, 2, 3]
    summary = run.summary()
    assert {name: found["version"] for name, found in summary["eval"].items()} == {"easy": 3}
    assert [(item["version"], item["set"]) for item in summary["evaluations_failed"]] == [(v, "hard") for v in range(4)]


async def test_an_evaluation_beyond_its_limit_names_the_setting(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(eval__interval=3, eval__timeout_s=0.01))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert run.summary()["evaluations_failed"][0]["reason"] == "TimeoutError: no result within eval.timeout_s=0.01 s"


async def test_a_slow_evaluation_that_holds_the_data_back_is_no_stall(tmp_path: Path) -> None:
    """The gate has no room before a newer version is served, and none is while the evaluation goes on."""
    run = Run(tmp_path, make_config(eval__interval=10, eval__timeout_s=1.0))
    run.loop._stall.limit_s = 0.2  # below the setting's least value
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.version == 2)
        await until(lambda: bool(run.board.versions) or task.done())
        run.rollouts.finish.set()
        await run.deliver(range(8, 12), oldest=2)
        await task
    assert run.board.versions == [2, 3]
    failed = [(item["version"], item["reason"]) for item in run.summary()["evaluations_failed"]]
    assert failed == [(0, "TimeoutError: no result within eval.timeout_s=1 s")]


async def test_no_data_after_an_evaluation_is_a_stall(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(eval__interval=10, eval__timeout_s=0.3))
    run.loop._stall.limit_s = 0.1  # below the setting's least value
    run.rollouts.finish = asyncio.Event()
    with pytest.raises(Stalled, match="step 0 waits for trajectories"):
        await run.loop.run()


async def test_a_stop_request_while_an_evaluation_holds_the_next_one_back_leaves_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=9, eval__interval=2))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(10), oldest=1)
    async with running(run) as task:
        await until(lambda: [request.version for request in run.workers.requests(Publish)] == [1, 2])
        run.stop.set()
        async with asyncio.timeout(60):
            await task
    assert run.workers.saved() == [2]
    assert [row["step"] for row in run.rows()] == [0, 1]
    assert run.workers.stored is not None
    assert [held["step"] for held in run.workers.stored["journal"]["rows"]] == [2], "its own evaluation is still due"
    assert sum(len(trained) for _, trained, _ in run.manager.reports) == 8
    assert run.board.versions == [], "what was served is what the evaluation measured"


async def test_a_finished_run_is_saved_before_its_last_evaluation_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, eval__interval=1))
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        run.rollouts.finish = asyncio.Event()
        await until(lambda: run.rollouts.started == [0, 1])
        await until(lambda: run.workers.saved() == [1])
        assert not task.done()
        run.rollouts.finish.set()
        await task
    assert [row["eval/held_out/accuracy"] for row in run.rows()] == [0.5, 0.5]


async def test_groups_that_filters_dropped_are_counted_where_they_were_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.filtered_in_graph = 2.0

    async def status() -> GateStatus:
        step = run.loop.version
        dropped = {"zero_variance": 3 * step, "too_hard": step, "stale": 7, "failed": 5, "worker_died": 1}
        return GateStatus(0.0, frozenset(), "", dropped | {"failed: reward my.py:score": step})

    run.manager.status = status  # type: ignore[method-assign]
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert [row["filter/dropped_groups"] for row in run.rows()] == [4 + 2] * 3
    assert [row["rollout/dropped_failed"] for row in run.rows()] == [5, 0, 0]
    assert [row["rollout/dropped_failed: reward my.py:score"] for row in run.rows()] == [1, 1, 1]


async def test_a_stop_request_ends_the_wait_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(5))
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        run.stop.set()
        await task
    assert run.workers.saved() == [1]
    assert run.summary()["steps"] == 1
    assert run.summary()["books"]["abandoned"] == 1


async def test_a_stop_request_lets_the_step_under_way_finish(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.train_gate = asyncio.Event()
    run.workers.on_train = run.stop.set
    await run.deliver(range(8))
    async with running(run) as task:
        await until(run.stop.is_set)
        run.workers.train_gate.set()
        await task
    assert run.loop.version == 1
    assert run.workers.saved() == [1]


async def test_a_resumed_run_trains_nothing_twice_and_has_every_row_once(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    await first.deliver(range(12), oldest=1)
    async with running(first) as task:  # killed in step 4, one step after the checkpoint
        await until(lambda: first.loop.version == 3)
        task.cancel()
    stored = first.workers.stored
    assert stored is not None

    second = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(stored=stored))
    async with running(second) as task:
        await until(lambda: second.board.data_state is not None)
        used = UsedPrompts.read(tmp_path / "data_state.json")
        assert sorted(used) == sorted(f"e0-{order}" for order in range(8))
        assert second.board.versions == [2]
        second.manager.submitted = second.manager.trained = 8  # as the gate counts after it saw version 2
        await second.deliver(range(12), oldest=3, tag="second")
        await second.deliver(range(12, 16), oldest=3, tag="second")
        await task
    assert second.workers.trained_rollouts() == [f"second{order}" for order in range(8, 16)]
    first_asked = next(request for _, request in second.workers.log if isinstance(request, CollectWeights | Publish))
    assert first_asked == CollectWeights("actor", (2,))  # version 3 was of a forgotten step
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.summary()["books"]["trained"] == 16


async def test_a_row_held_for_its_evaluation_survives_a_crash(tmp_path: Path) -> None:
    config = make_config(total_train_steps=3, checkpoint__interval=1, eval__interval=1)
    first = Run(tmp_path, config)
    await first.deliver(range(4))
    async with running(first):
        await until(lambda: first.rollouts.started == [0, 1])
        first.rollouts.finish = asyncio.Event()
        await first.deliver(range(4, 8), oldest=1)
        await until(lambda: first.workers.saved()[-1:] == [2])
        rows = first.rows()
        assert [row["step"] for row in rows] == [0, 1]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    second.manager.submitted = second.manager.trained = 8
    await second.deliver(range(8, 12), oldest=2)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3]
    assert second.rollouts.started == [2, 3], "what was cut off is evaluated again"
    summary = second.summary()
    assert [item["version"] for item in summary["evaluations"]] == [0, 1, 2, 3]
    assert summary["evaluations_failed"] == []


async def test_an_evaluation_of_a_version_before_the_checkpoint_counts_as_failed_after_a_crash(tmp_path: Path) -> None:
    """Nobody serves that version any more."""
    config = make_config(total_train_steps=4, checkpoint__interval=2, eval__interval=3)
    first = Run(tmp_path, config)
    first.rollouts.finish = asyncio.Event()
    await first.deliver(range(8), oldest=0)
    async with running(first):
        await until(lambda: first.workers.saved() == [2])
    (tmp_path / "metrics.jsonl").write_text("")

    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    second.manager.submitted = second.manager.trained = 8
    await second.deliver(range(8, 16), oldest=3)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3, 4]
    assert second.rollouts.started == [3, 4]
    failed = [{"version": 0, "set": "held_out", "reason": "cut off by a restart"}]
    assert second.summary()["evaluations_failed"] == failed


async def test_an_evaluation_that_ended_after_the_last_checkpoint_is_known_when_the_run_goes_on(tmp_path: Path) -> None:
    config = make_config(total_train_steps=2, checkpoint__interval=2, eval__interval=2)
    first = Run(tmp_path, config)
    await first.deliver(range(4))
    async with running(first) as task:
        await until(lambda: first.rollouts.started == [0])
        first.rollouts.finish = asyncio.Event()
        await first.deliver(range(4, 8), oldest=1)
        await until(lambda: first.workers.saved() == [2])
        first.rollouts.finish.set()
        await task
    assert [item["version"] for item in first.summary()["evaluations"]] == [0, 2]

    second = Run(tmp_path, make_config(total_train_steps=3, eval__interval=2), FakeWorkers(stored=first.workers.stored))
    second.manager.submitted = second.manager.trained = 8
    await second.deliver(range(8, 12), oldest=2)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3]
    summary = second.summary()
    assert [item["version"] for item in summary["evaluations"]] == [0, 2, 3]
    assert summary["evaluations_failed"] == []


async def test_a_run_that_was_stopped_before_its_first_step_begins_anew(tmp_path: Path) -> None:
    config = make_config(total_train_steps=1, eval__interval=1)
    first = Run(tmp_path, config)
    first.rollouts.finish = asyncio.Event()
    async with running(first) as task:
        await until(lambda: first.rollouts.started == [0])
        first.stop.set()
        await task
    assert [row["step"] for row in first.rows()] == [0]
    assert first.summary()["evaluations_failed"] == [
        {"version": 0, "set": "held_out", "reason": "given up, as the run ended"}
    ]

    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    await second.deliver(range(4))
    await second.loop.run()
    assert [(row["step"], row["eval/held_out/accuracy"]) for row in second.rows()] == [(0, 0.5), (1, 0.5)]
    assert second.summary()["evaluations_failed"] == []


async def test_a_stall_says_who_waits_for_what_on_which_counter(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.loop._stall.limit_s = 0.05  # below the setting's least value
    await run.deliver(range(3))
    with pytest.raises(Stalled) as stall:
        await run.loop.run()
    message = str(stall.value)
    assert "step 0 waits for trajectories" in message
    assert "3 of 4 rollouts in the buffer" in message
    assert "gate: running 7" in message


async def test_a_pause_of_the_master_is_no_stall(tmp_path: Path) -> None:
    now = 0.0
    run = Run(tmp_path, make_config(total_train_steps=2), clock=AwakeClock(lambda: now))
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.loop.version == 1 and len(run.rows()) == 1)
        await run.deliver(range(4, 5), oldest=1)
        await until(lambda: len(run.loop.buffer) == 1)
        now += 2 * run.config.system.stall_timeout_s  # the process is stopped
        await run.deliver(range(5, 6), oldest=1)
        await until(lambda: len(run.loop.buffer) == 2)
        await run.deliver(range(6, 8), oldest=1)
        await task
    assert run.loop.version == 2


async def test_a_stall_names_a_worker_that_is_silent(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.loop._stall.limit_s = 0.05
    run.loop._collector.silent.add(0)
    with pytest.raises(Stalled, match=r"data head 0 \(a ModelWorker\) is silent"):
        await run.loop.run()


async def test_a_failed_call_is_named_and_leaves_the_last_checkpoint_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.fail[RunCall] = RuntimeError("out of memory")
    await run.deliver(range(4))
    with pytest.raises(ExecutionError, match=r"call 'actor_inf'.*model_worker/0 failed: out of memory"):
        await run.loop.run()
    assert run.workers.saved() == []


async def test_complete_steps_are_saved_when_another_process_fails(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(8))
    run.workers.on_train = lambda: setattr(run.manager, "dead", True)
    with pytest.raises(ConnectionError):
        await run.loop.run()
    assert run.workers.saved() == [1]
    assert run.workers.stored is not None
    assert run.workers.stored["buffer"]["used_prompts"]["count"] == 4


async def test_training_goes_on_while_a_checkpoint_is_written_and_only_a_whole_one_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    written = run.workers.write_gate = asyncio.Event()
    async with running(run) as task:
        await run.deliver(range(8))
        await until(lambda: run.loop.version == 2)
        await run.deliver(range(8, 12), oldest=2)
        await until(lambda: run.loop.version == 3)
        assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [2]
        assert run.workers.saved() == []
        await run.deliver(range(12, 16), oldest=2)
        await until(lambda: run.loop.version == 4)
        assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [2], "the second waits for the first"
        written.set()
        await task
    assert run.workers.saved() == [2, 4]


async def test_the_best_checkpoint_stays_and_one_whose_evaluation_runs(tmp_path: Path) -> None:
    config = make_config(total_train_steps=6, checkpoint__interval=1, checkpoint__keep=1, eval__interval=2)
    config.checkpoint.keep_best, config.checkpoint.keep_best_direction = "eval/held_out/len_mean", "lowest"
    run = Run(tmp_path, config)
    run.rollouts.lengths = {0: 1, 2: 5, 4: 3, 6: 9}
    async with running(run) as task:
        for step in range(1, 7):
            if step == 4:
                await until(lambda: 2 in run.loop._journal.scores("eval/held_out/len_mean"))
                run.rollouts.finish = asyncio.Event()
            await run.deliver(range(4 * step, 4 * step + 4), oldest=step - 1)
            if step == 6:
                run.rollouts.finish.set()
            else:
                await until(lambda: len(run.workers.saved()) == step)  # noqa: B023 - called before the next round
        await task
    protected = {int(Path(save.path).name[1:]): save.protected for save in run.workers.requests(CommitCheckpoint)}
    assert protected[3] == (2, 3), "0 was the shortest, but has no checkpoint"
    assert protected[5] == (2, 4, 5), "the evaluation of 4 runs"
    assert protected[6] == (4, 6), "4 was shorter than 2"


async def test_no_step_is_trained_after_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    run.workers.fail[FinishShare] = OSError("disk full")
    async with running(run) as task:
        await run.deliver(range(4))
        await until(lambda: bool(run.workers.requests(FinishShare)))
        await run.deliver(range(4, 8))
        with pytest.raises(OSError, match="disk full"):
            await task
    assert run.loop.version == 1
    assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [1, 1], "tried once more at the end"
    assert run.workers.saved() == []


async def test_a_step_that_fails_leaves_the_checkpoint_under_way_to_be_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    written = run.workers.write_gate = asyncio.Event()
    async with running(run) as task:
        await run.deliver(range(4))
        await until(lambda: run.loop.version == 1)
        run.workers.fail[RunCall] = RuntimeError("out of memory")
        await run.deliver(range(4, 8))
        await until(lambda: len(run.workers.requests(BeginStep)) == 2)
        written.set()
        with pytest.raises(ExecutionError, match="out of memory"):
            await task
    assert run.workers.saved() == [1]


async def test_nothing_is_saved_through_a_worker_that_is_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(5))
    async with running(run) as task:
        await until(lambda: run.loop.version == 1)
        run.workers.fail[PollBuffer] = ConnectionError("model_worker/0 is gone")
        await run.deliver(range(5, 6))
        with pytest.raises(ConnectionError, match="model_worker/0"):
            await task
    assert run.workers.saved() == []


async def test_a_rollout_unaccounted_for_fails_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1))
    run.manager.lost = 1
    await run.deliver(range(6))
    with pytest.raises(BooksError, match="submitted 6, trained 4"):
        await run.loop.run()


async def test_weights_that_a_server_still_loads_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())

    async def status() -> GateStatus:
        return GateStatus(0.0, frozenset({0}), "")

    run.manager.status = status  # type: ignore[method-assign]
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    kept = [request.keep for request in run.workers.requests(CollectWeights)]
    assert kept == [(0,), (0, 1), (0, 1, 2), (0, 2, 3)]


async def test_what_workers_dropped_for_good_is_used_and_never_comes_again(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    await first.deliver(range(12), oldest=1)
    first.manager.give_up("e0-20", "zero_variance")
    async with running(first) as task:  # killed in step 4
        await until(lambda: first.loop.version == 2)
        first.manager.give_up("e0-21", "failed")
        await until(lambda: first.loop.version == 3)
        task.cancel()
    assert first.workers.stored is not None

    second = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(stored=first.workers.stored))
    async with running(second):
        await until(lambda: second.board.data_state is not None)
    used = UsedPrompts.read(tmp_path / "data_state.json")
    assert "e0-20" in used
    assert "e0-8" not in used
    assert len(used) in (9, 10), "of the second nobody may have heard before the checkpoint"


async def test_what_was_dropped_before_the_checkpoint_stays_in_the_books(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    await first.deliver(range(4), oldest=0)
    for prompt in ("e0-20", "e0-21"):
        first.manager.give_up(prompt, "zero_variance")
    async with running(first) as task:
        await until(lambda: first.workers.saved() == [1])
        task.cancel()

    config = make_config(total_train_steps=2, rollout__filters=[ChoiceConfig("zero_variance")])
    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    async with running(second) as task:
        await until(lambda: second.board.data_state is not None)
        assert second.board.dropped == {"zero_variance": 2}
        known = json.loads((tmp_path / "books.json").read_text())
        assert known["step"] == 1
        assert (known["books"]["submitted"], known["books"]["dropped"]) == (6, {"zero_variance": 2})
        second.manager.submitted, second.manager.trained = 6, 4
        second.manager.dropped = dict(second.board.dropped)  # as the gate counts from there on
        await second.deliver(range(4, 8), oldest=1)
        await task
    assert second.rows()[-1]["filter/dropped_groups"] == 0, "what the first launch dropped is in no row of the second"
    assert second.summary()["books"]["dropped"] == {"zero_variance": 2}


async def test_a_stop_after_a_checkpoint_saves_again_what_was_dropped_for_good_since(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(checkpoint__interval=1))
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.workers.saved() == [1])
        run.manager.give_up("e0-20")
        run.stop.set()
        await task
    assert run.workers.saved() == [1, 1]
    assert run.workers.stored is not None
    assert "e0-20" in UsedPrompts.from_json(run.workers.stored["buffer"]["used_prompts"])


async def test_a_failure_after_a_checkpoint_saves_again_what_was_dropped_for_good_since(tmp_path: Path) -> None:
    """Else the failing prompts that ended the run would be the first of every resume, and end that too."""
    run = Run(tmp_path, make_config(checkpoint__interval=1))
    run.loop._stall.limit_s = 0.05
    await run.deliver(range(4))
    run.manager.give_up("e0-20")
    async with running(run) as task:
        await until(lambda: run.workers.saved() == [1])
        run.manager.give_up("e0-21")
        with pytest.raises(Stalled):
            await task
    assert run.workers.stored is not None
    used = UsedPrompts.from_json(run.workers.stored["buffer"]["used_prompts"])
    assert {"e0-20", "e0-21"} <= set(used)
    assert json.loads((tmp_path / "books.json").read_text())["books"]["dropped"] == {"failed": 2}


async def test_a_stale_rollouts_prompt_is_not_used_but_a_filtered_group_of_the_batch_is(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=3))
    run.workers.filtered_in_graph = 2.0
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.version == 2)
        await run.deliver(range(8, 9), oldest=0, tag="late")
        await run.deliver(range(9, 13), oldest=2)
        await task
    assert sorted(run.loop.buffer.used) == sorted(f"e0-{order}" for order in range(13) if order != 8)


async def test_the_last_known_books_are_on_disk_from_the_beginning_and_after_every_step(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())

    def known() -> tuple[int, dict[str, Any]]:
        value = json.loads((tmp_path / "books.json").read_text())
        return value["step"], value["books"]

    async with running(run):
        await until(lambda: run.board.data_state is not None)
        assert known() == (0, run_books(0, 0))
        await run.deliver(range(7))
        await until(lambda: len(run.rows()) == 1 and known()[0] == 1)
        assert known() == (1, run_books(7, 4) | {"running": 3})


def run_books(submitted: int, trained: int) -> dict[str, Any]:
    return {"dropped": {}, "abandoned": 0, "running": 0, "finished_untrained": 0} | {
        "submitted": submitted,
        "trained": trained,
    }


async def test_without_the_manager_the_last_step_is_saved_and_its_books_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(5))
    async with running(run) as task:
        await until(lambda: run.loop.version == 1 and len(run.rows()) == 1)
        run.manager.dead = True
        run.stop.set()
        with pytest.raises(ConnectionError):
            await task
    assert run.workers.saved() == [1]
    assert json.loads((tmp_path / "books.json").read_text())["books"]["trained"] == 4


async def test_what_a_report_lets_the_manager_forget_is_in_the_data_state_before(tmp_path: Path) -> None:
    """Else a RolloutWorker that begins between the two would play it again."""
    run = Run(tmp_path, make_config())
    report = run.manager.report_consumed
    forgotten: set[str] = set()

    async def checked(
        version: int,
        trained: Sequence[str],
        dropped: Sequence[DroppedRollout],
        given_up_after: int = 0,
        events_after: int = 0,
        measured_after: int = 0,
    ) -> ConsumedReply:
        forgotten.update(f"e0-{rollout_id[1:]}" for rollout_id in trained)
        forgotten.update(run.manager.given_up[:given_up_after])
        assert run.board.data_state is not None
        assert forgotten <= set(UsedPrompts.read(run.board.data_state))
        return await report(version, trained, dropped, given_up_after, events_after, measured_after)

    run.manager.report_consumed = checked  # type: ignore[method-assign]
    await run.deliver(range(12), oldest=2)
    run.manager.give_up("e0-20")
    await run.loop.run()
    assert forgotten == {*(f"e0-{order}" for order in range(12)), "e0-20"}


async def test_measured_success_is_part_of_a_checkpoint_and_told_when_the_run_goes_on(tmp_path: Path) -> None:
    config = make_config(total_train_steps=1, checkpoint__interval=1)
    config.dataset.curriculum.high = 0.8
    first = Run(tmp_path, config)
    first.manager.measured = [("e0-1", 1.0), ("e0-2", 0.5)]
    await first.deliver(range(4))
    await first.loop.run()
    assert json.loads((tmp_path / "data_state.json").read_text())["curriculum"] == [[1, 0, 1.0], [2, 0, 0.5]]

    config = dataclasses.replace(config, total_train_steps=2)
    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    second.manager.submitted = second.manager.trained = 4
    await second.deliver(range(4, 8), oldest=1)
    await second.loop.run()
    assert json.loads((tmp_path / "data_state.json").read_text())["curriculum"] == [[1, 0, 1.0], [2, 0, 0.5]]


@pytest.fixture
def last_step(tmp_path: Path) -> Iterator[LastStep]:
    kept = LastStep(tmp_path)
    kept.begin()
    yield kept
    kept.remove()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_master_that_follows_goes_on_with_ranks_between_two_steps(
    tmp_path: Path, last_step: LastStep, ranks: int
) -> None:
    """Nothing is loaded, what waited in the ranks is trained, every row is there once."""
    first = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(ranks), last_step=last_step)
    async with running(first):  # killed while it waits for the data of step 3, of which a half is there
        await first.deliver(range(8), oldest=1)
        await first.deliver(range(8, 10), oldest=2)
        await until(lambda: len(first.manager.reports) == 2)
    asked = len(first.workers.log)

    second = Run(tmp_path, first.config, follows=first)
    async with running(second) as task:
        await until(lambda: second.begun == 1)
        await second.deliver(range(10, 16), oldest=2)
        await task
    asked_again = {type(request) for _, request in second.workers.log[asked:]}
    assert TakeUp in asked_again
    assert LoadCheckpoint not in asked_again
    assert second.workers.trained_rollouts() == [f"r{order}" for order in range(16)]
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.board.versions == [1, 2, 2, 3, 4]
    assert second.summary()["books"]["trained"] == 16
    lines = [json.loads(line) for line in (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()]
    assert [line["rollout"] for line in lines if line["kind"] == "trained"] == second.workers.trained_rollouts()
    assert [line["kind"] for line in lines if line["kind"] in ("begin", "end")] == ["begin", "end"]


async def test_a_master_that_follows_has_the_state_made_whole_before_others_hear_of_the_step(
    tmp_path: Path, last_step: LastStep
) -> None:
    """The one before it was killed after the ranks had copied it."""
    first = Run(tmp_path, make_config(total_train_steps=2), last_step=last_step)
    first.workers.write_gate = asyncio.Event()
    async with running(first):
        await first.deliver(range(8), oldest=0)
        await until(lambda: bool(first.workers.requests(FinishShare)))
    assert (first.board.versions, last_step.version) == ([], None)

    second = Run(tmp_path, first.config, follows=first)
    async with running(second) as task:
        await until(lambda: len(second.workers.requests(FinishShare)) == 2)
        assert second.board.versions == []
        second.workers.write_gate.set()
        await task
    assert second.board.versions == [1, 2]
    assert [row["step"] for row in second.rows()] == [1, 2]
    assert second.summary()["books"]["trained"] == 8


@pytest.mark.parametrize("stand", ["in a step", "after different steps", "one is gone"])
async def test_a_master_that_follows_touches_nothing_where_the_ranks_do_not_stand_between_two_steps(
    tmp_path: Path, last_step: LastStep, stand: str
) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(2), last_step=last_step)
    async with running(first):
        await first.deliver(range(8), oldest=1)
        await until(lambda: len(first.manager.reports) == 2)
    match stand:
        case "in a step":
            first.workers.standing[1] = Standing(in_step=True, master_state=None)
        case "after different steps":
            first.workers.standing[1] = Standing(in_step=False, master_state={"version": 1})
        case "one is gone":
            first.workers.fail[LookIntoStep] = PeerGone("killed")
    books = (tmp_path / "books.json").read_text()
    asked = len(first.workers.log)

    second = Run(tmp_path, first.config, follows=first)
    with pytest.raises(RestartTogether):
        await second.loop.run()
    assert {type(request) for _, request in second.workers.log[asked:]} <= {LookIntoStep, TakeUp}
    assert second.begun == 0
    assert (tmp_path / "books.json").read_text() == books


def kill(run: Run) -> None:
    """What ends from here on nobody hears of."""
    run.loop._announcer._on_end = run.loop._announcer._announce = lambda *_: None


@pytest.mark.parametrize("ranks_go_on", [True, False])
@pytest.mark.parametrize("next_is_due", [True, False])
async def test_an_evaluation_that_a_death_cut_off_is_made_again_before_a_newer_version_is_served(
    tmp_path: Path, last_step: LastStep, ranks_go_on: bool, next_is_due: bool
) -> None:
    """Also where the ranks were started again too, and load the last step."""
    config = make_config(total_train_steps=4, eval__interval=2 if next_is_due else 3)
    first = Run(tmp_path, config, last_step=last_step)
    first.rollouts.finish = asyncio.Event()
    async with running(first):
        await first.deliver(range(8), oldest=1)
        await until(lambda: last_step.version == 2)
        await until(lambda: next_is_due or len(first.manager.reports) == 2)
        kill(first)
    assert (first.rollouts.started, first.board.versions) == ([0], [])
    if not ranks_go_on:
        first.workers.kept = first.workers.stands(0).master_state
        first.workers.standing.clear()

    second = Run(tmp_path, config, follows=first)
    async with running(second) as task:
        await until(lambda: second.rollouts.started == [0, 0])
        assert (second.begun, second.board.versions) == (1, [])
        assert second.rows() == []
        second.rollouts.finish.set()
        await until(lambda: second.board.versions == [2])
        await second.deliver(range(8, 16), oldest=2)
        await task
    assert second.rollouts.started == ([0, 0, 2, 4] if next_is_due else [0, 0, 3, 4])
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3, 4]
    assert second.summary()["evaluations_failed"] == []
    assert [item["version"] for item in second.summary()["evaluations"]] == second.rollouts.started[1:]


@pytest.mark.parametrize("left", ["nothing", "an older version", "a part"])
async def test_where_the_last_step_is_not_whole_nobody_begins_with_what_is_left(
    tmp_path: Path, last_step: LastStep, left: str
) -> None:
    """As after the loss of two hosts, which had copies of each other's parts."""
    workers = FakeWorkers(kept={"version": 1} if left == "an older version" else None)
    if left == "a part":
        lost = Failure(KEPT_STEP_LOST, "shard-00001-of-00003.safetensors is whole on none", "")
        workers.fail[LoadLastStep] = RemoteError("model_worker/0", "load_last_step", lost)
    run = Run(tmp_path, make_config(), workers, last_step=last_step)
    run.board.versions = [2]
    with pytest.raises(RestartTogether, match="only a checkpoint is left"):
        await run.loop.run()
    assert not last_step.can_go_on(0)
    assert workers.requests(LoadCheckpoint) == workers.requests(Publish) == []


@pytest.mark.parametrize("cause", ["no room", "a rank died"])
async def test_a_step_that_is_not_kept_is_told_to_others_only_if_the_ranks_live(
    tmp_path: Path, last_step: LastStep, cause: str
) -> None:
    """Whoever goes on after a rank's death begins with the step before; without room nobody goes on from there."""
    first = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(2), last_step=last_step)
    kind = COPY_INTERRUPTED if cause == "a rank died" else "OSError"
    first.workers.fail[FinishShare] = RemoteError("model_worker/1", "finish_share", Failure(kind, "", ""))
    async with running(first) as task:
        await first.deliver(range(4), oldest=0)
        if cause == "a rank died":
            with pytest.raises(RemoteError):
                await task
        else:
            await until(lambda: bool(first.manager.reports))
    assert first.board.versions == ([] if cause == "a rank died" else [1])


async def test_the_users_order_goes_on_over_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    """What the order put back was never trained: its prompts are rolled out again, and it ranks them as before."""
    (tmp_path / "mine.py").write_text("def last_first(rollout):\n    return -rollout.order\n")
    config = make_config(total_train_steps=3, checkpoint__interval=1, max_head_offpolicyness=2)
    config.buffer.order.path = f"{tmp_path / 'mine.py'}:last_first"
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "whole", config)
    await whole.deliver(range(12))
    await whole.loop.run()
    assert [row["rollout/order_failed"] for row in whole.rows()] == [0.0, 0.0, 0.0]

    first = Run(tmp_path / "cut", dataclasses.replace(config, total_train_steps=1))
    await first.deliver(range(12))
    await first.loop.run()
    second = Run(tmp_path / "cut", config, FakeWorkers(stored=first.workers.stored))
    second.manager.submitted = second.manager.trained = 4
    await second.deliver([order for order in range(12) if f"r{order}" not in first.workers.trained_rollouts()])
    await second.loop.run()
    assert whole.workers.trained_rollouts() == [*first.workers.trained_rollouts(), *second.workers.trained_rollouts()]
    assert {name for name in whole.workers.trained_rollouts()[:4]} == {"r8", "r9", "r10", "r11"}

"""The parts of the MasterWorker's loop, and the version that the run is at.

`assemble` makes them for a run. `TrainLoop`, `StepEnd` and `Beginning` work on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.comm.waits.running_time import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import guests_of
from asyncrl.manager.client import ManagerClient
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.books.reports import Reports, ReportState
from asyncrl.master.data.batches import Batches
from asyncrl.master.data.buffer import SampleBuffer
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.score_ahead import AheadScorer, frozen_calls
from asyncrl.master.data.stall import LOOK_S, StallWatch
from asyncrl.master.graph.executor import Executor, column_moves
from asyncrl.master.graph.types import Graph
from asyncrl.master.guest_turns import DeviceTurns
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.master.offline.replay import OfflineGate
from asyncrl.master.peers.connections import Evaluates, NameBoard, evaluate
from asyncrl.master.peers.policy_versions import Publishing, VersionAnnouncer
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.recovery.checkpoints import Checkpoints, Progress
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer
from asyncrl.master.win_rates import WinRates
from asyncrl.models.weights.transports.base import weight_transport
from asyncrl.plugins.datasets.queue.curriculum import make_curriculum
from asyncrl.rollout.messages import EvaluationResult
from asyncrl.runtime.memory_checkpoint import MemoryCheckpoint
from asyncrl.runtime.process.starting import LONGEST_STARTS
from asyncrl.trainer.parallel.placement import Placement, worker_grid


@dataclass(frozen=True, slots=True)
class Peers:
    """The other processes.

    Attributes:
        workers: ModelWorkers by index.
        placement: roles of the ModelWorkers, and those that receive trajectories.
        rollouts: RolloutWorkers by index.
    """

    workers: Sequence[RequestClient]
    placement: Placement
    manager: ManagerClient | OfflineGate
    rollouts: Sequence[Evaluates]
    board: NameBoard


@dataclass
class Parts:
    """All parts of a run's loop, and the version that the run is at.

    Attributes:
        version: version of the policy: number of complete steps.
        stop: set when the run is asked to stop.
    """

    config: ExperimentConfig
    run_dir: Path
    peers: Peers
    stop: asyncio.Event
    clock: RunningClock
    ranks: RankClients
    executor: Executor
    buffer: SampleBuffer
    collector: Collector
    batches: Batches
    metrics_log: MetricsLog
    ledger: Ledger
    announcer: VersionAnnouncer
    stall: StallWatch
    checkpoints: Checkpoints
    steps: MemoryCheckpointer
    reported: ReportState
    reports: Reports
    publishing: Publishing
    turns: DeviceTurns
    win_rates: WinRates
    version: int = 0

    def state(self) -> dict[str, Any]:
        """Return the master's part of a checkpoint."""
        return {
            "version": self.version,
            "buffer": self.buffer.state(),
            "metrics_log": self.metrics_log.state(),
            "dropped": dict(self.reported.told.books.dropped),
            "curriculum": self.reported.curriculum.state(),
            "buffer_order": self.batches.order.state(),
            "win_rates": self.win_rates.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`; `metrics_log` reads its part when it is opened."""
        self.version = state["version"]
        self.buffer.restore(state["buffer"])
        self.buffer.expire(self.version)
        self.batches.order.restore(state.get("buffer_order"))
        self.win_rates.restore(state.get("win_rates"))
        measured = state.get("curriculum", ())  # a checkpoint of an earlier version of asyncrl has none
        curriculum = make_curriculum(self.config.dataset.curriculum, measured)
        self.reported.restore(self.version * self.config.train_batch_size, state.get("dropped", {}), curriculum)

    async def publish(self, *, to_disk: bool) -> str:
        """Make the actor's weights available as the current version; return its folder."""
        return await self.publishing.publish(self.version, self.reported.told.status.versions_in_use, to_disk=to_disk)

    async def save(self) -> None:
        """Begin a checkpoint of the current version, once the previous one is complete."""
        await self.checkpoints.finish()
        ledger = self.ledger.saved(self.version, self.reported.reported_books)
        await self.checkpoints.begin(self.progress, self.state() | {"ledger": ledger})

    @property
    def progress(self) -> Progress:
        """Return the progress of a checkpoint that would begin now."""
        return Progress(self.version, len(self.buffer.used))

    @property
    def unsaved(self) -> bool:
        """True if anything was trained or dropped for good since the last checkpoint."""
        return self.checkpoints.saved != self.progress

    @property
    def complete(self) -> bool:
        """True if all steps are trained."""
        return self.version >= self.config.total_train_steps

    @property
    def wants_folder(self) -> bool:
        """True if servers read this version's weights from disk, or a user may: each checkpoint comes with weights."""
        return weight_transport(self.config.manager.weight_transport).needs_folders or self.checkpoints.is_due(
            self.version
        )


def assemble(
    config: ExperimentConfig,
    run_dir: Path,
    graph: Graph,
    peers: Peers,
    stop: asyncio.Event,
    clock: RunningClock | None = None,
    memory_checkpoint: MemoryCheckpoint | None = None,
    incarnation: int = 0,
) -> Parts:
    """Make the parts of a run's loop.

    Args:
        memory_checkpoint: place where the state of each step is kept, and searched for at the start; None: nowhere.
        incarnation: number of earlier MasterWorkers, which died.
    """
    clock = clock or RunningClock()
    limit_s = config.system.stall_timeout_s
    load_s = max(limit_s, LONGEST_STARTS * config.system.start_timeout_s)
    ranks = RankClients(peers.workers, worker_grid(config).publisher, limit_s, incarnation, load_s)
    routes, grids = peers.placement.routing_table(), peers.placement.grids
    heads = [peers.workers[worker] for worker in routes.data_workers]
    roles = [ACTOR, *config.trained_policies]  # of the actors
    actors = {role: [peers.workers[worker] for worker in grids[role].members] for role in roles}

    buffer = SampleBuffer(config.train_batch_size, config.max_head_offpolicyness, config.on_stale)
    collector = Collector(heads, buffer)
    metrics_log = MetricsLog(config, collector, buffer)
    ledger = Ledger.of_run(run_dir, config)
    steps = MemoryCheckpointer(memory_checkpoint, ranks)
    win_rates = WinRates.of_run(config)
    announcer = _announcer(config, peers, metrics_log, clock, win_rates)
    starting = peers.board.producers_start
    stall = StallWatch(limit_s, clock, stop, lambda: announcer.free_since, peers.manager, buffer, collector, starting)
    curriculum = make_curriculum(config.dataset.curriculum)
    reported = ReportState(buffer, ledger, curriculum, steps)
    guests = guests_of(config.generation)
    turns = DeviceTurns(peers.board, peers.manager, stall, announcer, stop, len(guests), guests.start)
    lease_s = config.manager.rollout_lease_s
    calls = frozen_calls(config, graph, peers.placement)
    ahead = AheadScorer(calls, buffer, ranks, actors[ACTOR], heads=len(heads))
    reports = Reports(peers.manager, collector, reported, stop, limit_s=limit_s, lease_s=lease_s)
    return Parts(
        config=config,
        run_dir=run_dir,
        peers=peers,
        stop=stop,
        clock=clock,
        ranks=ranks,
        executor=_executor(config, graph, peers),
        buffer=buffer,
        collector=collector,
        batches=Batches(config, buffer, collector, peers.manager, stall, reports.report, turns, ahead),
        metrics_log=metrics_log,
        ledger=ledger,
        announcer=announcer,
        stall=stall,
        checkpoints=Checkpoints(config.checkpoint, run_dir, ranks, metrics_log.evaluations, check=collector.check),
        steps=steps,
        reported=reported,
        reports=reports,
        turns=turns,
        publishing=Publishing(ranks, actors, announcer, config.version_pools),
        win_rates=win_rates,
    )


def _executor(config: ExperimentConfig, graph: Graph, peers: Peers) -> Executor:
    """Make the part that runs the graph's calls on the ranks."""
    moves = column_moves(graph, {role: peers.placement.grid(role) for role in graph.roles()})
    placed = peers.placement.routing_table().placement
    return Executor(graph, placed, peers.workers, config.system.stall_timeout_s, moves)


def _announcer(
    config: ExperimentConfig, peers: Peers, metrics_log: MetricsLog, clock: RunningClock, win_rates: WinRates
) -> VersionAnnouncer:
    """Make the part that announces versions, and has those evaluated that are due."""

    async def evaluate_version(name: str, version: int) -> EvaluationResult:
        while peers.board.producers_start():  # noqa: ASYNC110 - the resolver's thread has no event of this loop
            await asyncio.sleep(LOOK_S)
        return await evaluate(peers.rollouts, name, version, config.eval.timeout_s)

    def announce(version: int, path: str) -> None:
        peers.board.announce_version(version, path, win_rates.at(version))

    return VersionAnnouncer(announce, evaluate_version, metrics_log.evaluations.due, metrics_log.evaluated, clock)

"""The parts of the MasterWorker's loop; `assemble` makes them for a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.comm.waits.limits import LOOK_S
from asyncrl.comm.waits.running_time import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.inference.settings import guests_of
from asyncrl.manager.client import ManagerClient
from asyncrl.master.data.batches import Batches
from asyncrl.master.data.buffer_order import ConfiguredOrder
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.score_ahead import AheadScorer, frozen_calls
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.graph.call_graph import Graph
from asyncrl.master.graph.executor import Executor, column_moves
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.master.metrics.win_rates import WinRates
from asyncrl.master.peers.connections import Evaluates, NameBoard, evaluate
from asyncrl.master.peers.guest_turns import DeviceTurns
from asyncrl.master.peers.policy_versions import Publishing, VersionAnnouncer
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.peers.reports import Reports
from asyncrl.master.recovery.checkpoints import Checkpoints
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer
from asyncrl.master.recovery.run_state import RunState
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord
from asyncrl.rollout.messages import EvaluationResult
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
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
    manager: ManagerClient
    rollouts: Sequence[Evaluates]
    board: NameBoard


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a run's loop.

    Attributes:
        stop: set when the run is asked to stop.
        memory_checkpointer: keeps the state of each step in memory.
    """

    config: ExperimentConfig
    run_dir: Path
    peers: Peers
    stop: asyncio.Event
    ranks: RankClients
    executor: Executor
    run: RunState
    collector: Collector
    batches: Batches
    metrics_log: MetricsLog
    announcer: VersionAnnouncer
    stall: StallWatch
    checkpoints: Checkpoints
    memory_checkpointer: MemoryCheckpointer
    reports: Reports
    publishing: Publishing
    turns: DeviceTurns


def assemble(
    config: ExperimentConfig,
    run_dir: Path,
    graph: Graph,
    peers: Peers,
    stop: asyncio.Event,
    clock: RunningClock | None = None,
    memory_checkpoint: MemoryCheckpoint | None = None,
) -> Parts:
    """Make the parts of a run's loop.

    Args:
        memory_checkpoint: place where the state of each step is kept, and searched for at the start; None: nowhere.
    """
    clock = clock or RunningClock()
    limit_s = config.system.stall_timeout_s
    ranks = RankClients(peers.workers, worker_grid(config).publisher, limit_s)
    routes, grids = peers.placement.routing_table(), peers.placement.grids
    heads = [peers.workers[worker] for worker in routes.data_workers]
    roles = [ACTOR, *config.trained_policies]  # of the actors
    actors = {role: [peers.workers[worker] for worker in grids[role].members] for role in roles}

    buffer = SampleBuffer(config.train_batch_size, config.max_head_offpolicyness, config.on_stale)
    collector = Collector(heads, buffer, peers.manager)
    metrics_log = MetricsLog(config, collector, buffer)
    memory_checkpointer = MemoryCheckpointer(memory_checkpoint, ranks)
    win_rates = WinRates.of_run(config)
    announcer = _announcer(config, peers, metrics_log, clock, win_rates)

    most_ahead = (config.max_head_offpolicyness + 1) * config.train_batch_size
    stall = StallWatch(
        limit_s,
        clock,
        stop,
        lambda: announcer.free_since,
        peers.manager,
        buffer,
        collector,
        peers.board.producers_start,
        most_ahead,
    )
    guests = guests_of(config.generation)
    turns = DeviceTurns(peers.board, peers.manager, stall, announcer, stop, len(guests), guests.start)
    calls = frozen_calls(config, graph, peers.placement)
    ahead = AheadScorer(calls, buffer, ranks, actors[ACTOR], heads=len(heads))
    reports = Reports(peers.manager, collector, buffer, stop, limit_s=limit_s)
    order = ConfiguredOrder(config.buffer.order)
    record = run_dir / DATA_RECORD_FILE
    data_record = DataRecord.read(record).checksum if record.is_file() else None
    run = RunState(config, buffer, order, reports, metrics_log, win_rates, data_record)
    return Parts(
        config=config,
        run_dir=run_dir,
        peers=peers,
        stop=stop,
        ranks=ranks,
        executor=_executor(config, graph, peers),
        run=run,
        collector=collector,
        batches=Batches(config, buffer, collector, peers.manager, stall, reports.dropped, turns, order, ahead),
        metrics_log=metrics_log,
        announcer=announcer,
        stall=stall,
        checkpoints=Checkpoints(config.checkpoint, run_dir, ranks, run, metrics_log.evaluations, check=collector.check),
        memory_checkpointer=memory_checkpointer,
        reports=reports,
        turns=turns,
        publishing=Publishing(ranks, actors, announcer, config.version_pools),
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
        return await evaluate(peers.rollouts, name, version, config.system.stall_timeout_s)

    def announce(version: int, path: str) -> None:
        peers.board.announce_version(version, path, win_rates.at(version))

    return VersionAnnouncer(announce, evaluate_version, metrics_log.evaluations.due, metrics_log.evaluated, clock)

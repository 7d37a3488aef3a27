"""The parts of the MasterWorker's loop."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.waits import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.inference.settings import guests_of
from asyncrl.manager.client import ManagerClient
from asyncrl.master.data.batches import AheadScorer, Batches, DeviceTurns, frozen_calls
from asyncrl.master.data.buffer_order import ConfiguredOrder
from asyncrl.master.data.collector import Collector, Reports
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.graph.call_graph import Graph
from asyncrl.master.graph.executor import Executor, column_moves
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.master.metrics.win_rates import WinRates
from asyncrl.master.peers.connections import NameBoard, ReplaceableWorker
from asyncrl.master.peers.policy_versions import Publishing, VersionAnnouncer
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.run_state import Checkpoints, MemoryCheckpointer, RunState
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord
from asyncrl.runtime.planning.process_kinds import SHARED_DEVICES
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
    rollouts: Sequence[ReplaceableWorker]
    board: NameBoard


class Parts:
    """All parts of a run's loop, in the order in which a rollout meets them.

    Args:
        stop: set when the run is asked to stop.
        memory_checkpoint: place where the state of each step is kept, and searched for at the start; None: nowhere.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        graph: Graph,
        peers: Peers,
        stop: asyncio.Event,
        clock: RunningClock | None = None,
        memory_checkpoint: MemoryCheckpoint | None = None,
    ) -> None:
        self.config, self.run_dir, self.peers, self.stop = config, run_dir, peers, stop
        clock = clock or RunningClock()
        limit_s = config.system.stall_timeout_s
        manager, board, placement = peers.manager, peers.board, peers.placement
        heads = [peers.workers[worker] for worker in placement.actor.data_heads]
        roles = [ACTOR, *config.trained_policies]  # of the actors
        actors = {role: [peers.workers[worker] for worker in placement.grid(role).members] for role in roles}
        self.ranks = RankClients(peers.workers, worker_grid(config).publisher, limit_s)

        # it arrives, and the manager is told
        buffer = SampleBuffer(config.train_batch_size, config.max_head_offpolicyness, config.on_stale)
        self.collector = Collector(heads, buffer, manager)
        self.reports = Reports(manager, self.collector, buffer, stop, limit_s=limit_s)

        # it waits until there is a batch
        self.metrics_log = MetricsLog(config, run_dir, self.collector, buffer)
        win_rates = WinRates.of_run(config)
        self.announcer = VersionAnnouncer(board, peers.rollouts, self.metrics_log, win_rates, clock, limit_s)
        ahead = (config.max_head_offpolicyness + 1) * config.train_batch_size
        self.stall = StallWatch(
            limit_s, clock, stop, self.announcer, board, manager, buffer, self.collector, ahead, run_dir
        )
        self.turns = DeviceTurns()
        if colocated := guests_of(config.generation):
            shared = pkgutil.resolve_name(SHARED_DEVICES)
            self.turns = shared(board, manager, self.stall, self.announcer, stop, len(colocated), colocated.start)
        order = ConfiguredOrder(config.buffer.order)
        scorer = AheadScorer(
            frozen_calls(config, graph, placement), buffer, self.ranks, actors[ACTOR], heads=len(heads)
        )
        self.batches = Batches(
            config, buffer, self.collector, manager, self.stall, self.reports, self.turns, order, scorer
        )

        # it is trained
        moves = column_moves(graph, {role: placement.grid(role) for role in graph.roles()})
        self.executor = Executor(graph, placement.members, peers.workers, limit_s, moves)

        # its step ends
        record = run_dir / DATA_RECORD_FILE
        data_record = DataRecord.read(record).checksum if record.is_file() else None
        self.run = RunState(config, buffer, order, self.reports, self.metrics_log, win_rates, data_record)
        self.memory_checkpointer = MemoryCheckpointer(memory_checkpoint, self.ranks)
        self.publishing = Publishing(self.ranks, actors, self.announcer, config.version_pools)
        self.checkpoints = Checkpoints(
            config.checkpoint, run_dir, self.ranks, self.run, self.metrics_log.evaluations, self.collector
        )

"""ModelWorker: one training rank. It holds the trajectories' tensors and runs the master's calls.

There are two I/O threads and one compute thread. The trajectory puller receives rollouts and acknowledges them once
they are in the inbox. The request server answers quick requests at once (metadata, discards) and queues those that
compute. The main thread answers these (`asyncrl.trainer.rank.requests`).

    RolloutWorkers ──▶ puller ──▶ inbox ──begin_step──▶ StepBatch ──run_call──▶ engines ──publish──▶ weights/<role>/v<N>
                                    │ poll_buffer          ▲
                                    └──▶ master ───────────┘ (metadata and names of calls only)
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers.utils.logging import disable_progress_bar

from asyncrl.comm import names
from asyncrl.comm.ended_rollouts import ids_remembered
from asyncrl.comm.name_resolve import NameEntryNotFound
from asyncrl.comm.names import ACTOR
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.request_reply import RequestServer
from asyncrl.config.run_dir import PROFILE_DIR, SPILLED_DIR
from asyncrl.master.graph import load_graph
from asyncrl.models.host_copies import copy_rate
from asyncrl.models.torch_device import choose_device, device_line
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.starting import LONGEST_STARTS
from asyncrl.runtime.process.waiting import stop_listener
from asyncrl.runtime.process.worker import Worker, WorkerSpec
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, cost_message, uses_memory_checkpoint
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.engines.role import RoleEngine
from asyncrl.trainer.model.layout_parity import layout_in_use
from asyncrl.trainer.parallel.placement import Placement, placement
from asyncrl.trainer.parallel.world import World, is_alone
from asyncrl.trainer.rank.inbox import TrajectoryCheck, TrajectoryReceiver
from asyncrl.trainer.rank.measures import MemoryShortage, StepMeasures, gpu_memory, peak_flops
from asyncrl.trainer.rank.requests import WAITING, ImmediateRequests, ModelCalls, QueuedRequests
from asyncrl.trainer.rank.training_rank import TrainingRank, Versions, build_rank

if TYPE_CHECKING:
    from asyncrl.trainer.parallel.process_groups import Collectives
    from asyncrl.trainer.rank.sample_log import SampleLog

_SERVE_S = 0.5  # longest wait for a request between two checks for a stop request
_MEET_LOOK_S = 0.1
_CLOSE_S = 1.0  # time limit for weights in transit at the end of the process


class ModelWorker(Worker):
    """One training rank: the two I/O threads, and the main thread that computes.

    A stop request comes only when no process needs the rank's answers any more. So the rank abandons a running call and
    aborts its collectives: the peers of a collective may never come.
    """

    interruptible = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._open = ExitStack()
        self._collectives: Collectives | None = None
        self._memory_checkpoint = MemoryCheckpoint.of_rank(self.config, self.run_dir)

    def start(self) -> int:
        with stop_listener(self._leave):
            return super().start()

    def _leave(self) -> None:
        """Abort the collectives.

        A thread calls this at a stop request, because the main thread may be waiting for a peer.
        """
        self.request_stop()
        if self._collectives is not None:
            self._collectives.abort()

    def configure(self) -> None:
        """Load the models, join the other ranks, serve."""
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        device = choose_device("trainer.device", config.trainer.device)
        graph = load_graph(config)
        placed = placement(config, graph)
        if placed.workers > 1:
            observer.stage("waits for the other ranks", Activity.blocked)
            self._meet(placed.workers)
        if device.type == "cuda":
            observer.gauges(partial(gpu_memory, device))
        memory = MemoryShortage(config, self.name, device, len(graph.roles()))
        with memory.explained("the load of its models"):
            self._world = self._join(placed, device)
            observer.stage("loads the models")
            self._rank: TrainingRank = build_rank(config, graph, self._world, device)
        dtype = getattr(torch, config.model.dtype.on(device.type))
        self.log.info("%s", device_line(device, dtype, self._attention(device, dtype)))
        if uses_memory_checkpoint(config):
            self.log.info("%s", cost_message(self._rank.state_bytes(), copy_rate(device)))
        self._open.callback(self._rank.disk_writer.close)
        self._open.callback(self._rank.memory_writer.close)
        calls = ModelCalls(config, graph, self._rank)
        profile = None
        if config.profile.steps:
            from asyncrl.trainer.rank.profile import StepProfile  # only with profile.steps

            profile = StepProfile(config.profile, self.index, self.run_dir / PROFILE_DIR, device)
        measures = StepMeasures(self._rank.engines, peak_flops(device, dtype), device, profile)
        observer.gauges(measures.gauges)
        sample_logs: dict[str, SampleLog] = {}
        if config.samples.every:
            from asyncrl.trainer.rank.sample_log import open_sample_logs  # only with samples.every

            sample_logs = open_sample_logs(config, self._world, self.run_dir)
        for log in sample_logs.values():
            self._open.callback(log.close)
        if self._collectives is not None:
            self._collectives.all_have_started(config.trainer.collective_timeout_s)
        heads = self._world.placement.actor.data_heads
        head = heads.index(self.index) if self._world.takes_trajectories else 0
        self._receiver = self._open_receiver(head)
        self._versions = Versions(config, self.run_dir, self._world, self._rank, self.http_security, device)
        queued = QueuedRequests(
            config,
            self._rank,
            receiver=self._receiver,
            versions=self._versions,
            memory_checkpoint=self._memory_checkpoint,
            calls=calls,
            measures=measures,
            memory=memory,
            sample_logs=sample_logs,
            device=device,
        )
        self._serve(head, queued)

    def _join(self, placed: Placement, device: torch.device) -> World:
        """Make the process groups of several ranks."""
        if is_alone(self.config, placed):
            return World()
        from asyncrl.trainer.parallel.process_groups import Collectives, training_world  # only with several ranks

        self._collectives = collectives = Collectives()
        if self.stop_requested.is_set():  # perhaps before there was anything to abort
            collectives.abort()
        start_s = LONGEST_STARTS * self.config.system.start_timeout_s  # the master detects ranks that no longer start
        world = training_world(
            self.config, self.index, placed, device, self.run_dir, self.resolver, collectives, start_s=start_s
        )
        return self._open.enter_context(world)

    def _meet(self, ranks: int) -> None:
        """Wait until all ranks are about to join: the first rank waits for all, the others for the first.

        Raises:
            NotStarted: none of the awaited processes made progress for `system.start_timeout_s`.
        """
        if self.index:
            key = f"name {names.TRAINING_WORLD_KEY!r} of the first rank"
            waiting = self.start_wait(names.MODEL_WORKER, key, whom="the first training rank")
            while names.TRAINING_WORLD_KEY not in self.resolver.get_subtree(names.TRAINING_WORLD_KEY):
                waiting.look()
                self.stop_requested.wait(_MEET_LOOK_S)
            return
        everyone = f"all {ranks} ranks to begin"
        waiting = self.start_wait(names.MODEL_WORKER, everyone, whom=everyone)
        keys = [names.incarnation_key(names.MODEL_WORKER, rank) for rank in range(ranks)]
        while True:
            living = waiting.living()  # incarnation by rank; an entry below names the oldest that still counts
            oldest = self.resolver.get_subtree(f"{names.INCARNATIONS}/{names.MODEL_WORKER}")
            if all(living.get(rank, -1) >= int(oldest.get(key, 0)) for rank, key in enumerate(keys)):
                return
            waiting.look()
            self.stop_requested.wait(_MEET_LOOK_S)

    def run(self) -> None:
        """Serve the master until a stop is requested."""
        self.ready()
        observer.stage(WAITING, Activity.serves)
        while not self.stop_requested.is_set():
            self._server.serve_one(_SERVE_S)

    def close(self) -> None:
        """Stop the threads and leave the world. After a stop request, stored trajectories are no longer needed."""
        self._open.close()
        if self.stop_requested.is_set():
            self._memory_checkpoint.leave()

    def _attention(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the layout and kernel that the policy trains with; on ranks without the policy, the setting."""
        engine, implementation = self._rank.engines.get(ACTOR), str(self.config.model.attn_implementation)
        if not isinstance(engine, RoleEngine) or not isinstance(engine, PolicyEngine):
            return implementation
        return str(layout_in_use(engine.model_config, engine.attention, implementation, device, dtype))

    def _serve(self, head: int, queued: QueuedRequests) -> None:
        """Begin to answer the master's requests, and to receive trajectories as data index `head`."""
        system = self.config.system
        immediate = ImmediateRequests(self._rank, self._receiver, self._versions, self._memory_checkpoint)
        self._server = RequestServer(
            system.host, self.security, immediate=immediate.handlers(), queued=queued.handlers()
        )
        self._open.callback(self._server.close)
        if self._world.publishes:
            self._open.callback(self._close_connections)
        remembered = ids_remembered(self.config.train_batch_size, self.config.max_head_offpolicyness)
        puller = TrajectoryPuller(
            system.host,
            self.security,
            on_message=self._receiver.receive,
            remembered=remembered,
            accepted=self._receiver.restored,
        )
        self._open.callback(puller.close)
        self._open.callback(self._receiver.inbox.close)  # before the puller: its thread may wait for room in the inbox
        address = names.WorkerAddress(self._server.endpoint, os.getpid()).encode()
        lease_s = system.lease_s
        self.resolver.add(names.worker_key(self.spec.kind, self.index), address, lease_s=lease_s, replace=True)
        if self._world.takes_trajectories:
            self.resolver.add(names.puller_key(head), puller.endpoint, lease_s=lease_s, replace=True)

    def _open_receiver(self, head: int) -> TrajectoryReceiver:
        config = self.config
        actor = self._rank.engines.get(ACTOR)
        receiver = TrajectoryReceiver(
            config.trainer,
            head,
            TrajectoryCheck.of_model(config, self._announced_version).check,
            lambda: self._server.loop,
            self._memory_checkpoint,
            self.run_dir / SPILLED_DIR / str(self.index),
            shares_prefixes=isinstance(actor, RoleEngine) and actor.attention.shares_prefixes,
        )
        self._open.callback(receiver.remove_spilled)
        if uses_memory_checkpoint(config):
            receiver.keep(receives=self._world.takes_trajectories)
        return receiver

    def _announced_version(self) -> int:
        """Return the newest version that servers may have; 0, the initial model, before the first is announced."""
        try:
            return names.PublishedVersion.decode(self.resolver.get(names.model_version_key(names.ACTOR))).version
        except NameEntryNotFound:
            return 0

    def _close_connections(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._versions.to_servers.close(), self._server.loop)
        try:
            closing.result(_CLOSE_S)
        except TimeoutError:
            self.log.warning("a server did not disconnect within %g s", _CLOSE_S)

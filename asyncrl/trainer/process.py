"""ModelWorker: one training rank. It holds the trajectories' tensors and computes what the master asks for.

There are two I/O threads and one that computes. The trajectory puller receives rollouts and acknowledges them once they
are in the inbox. The request server answers quick requests at once (metadata, discards) and queues those that compute.
The main thread answers these (`asyncrl.trainer.rank.queued_requests`).

    RolloutWorkers ──▶ puller ──▶ inbox ──begin_step──▶ StepBatch ──run_call──▶ engines ──publish──▶ weights/<role>/v<N>
                                    │ poll_buffer          ▲
                                    └──▶ master ───────────┘ (metadata and names of calls only)
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from asyncrl.comm import names
from asyncrl.comm.ended_rollouts.recent_ids import ids_remembered
from asyncrl.comm.name_resolve import NameEntryNotFound
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.request_reply import Done, RequestServer
from asyncrl.config.run_dir import PROFILE_DIR, SAMPLES_DIR, SPILLED_DIR
from asyncrl.config.token_ids import token_ids
from asyncrl.config.trained_policies import role_of_policy
from asyncrl.master.graph.builtin import load_graph
from asyncrl.models.host_copies import copy_rate
from asyncrl.models.pictures.picture_rules import placeholder_id
from asyncrl.models.routers import routing_shape_of
from asyncrl.observe import observer
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.runtime.process.starting import LONGEST_STARTS
from asyncrl.runtime.process.stopping import heard_at_once
from asyncrl.runtime.process.torch_device import attention_kernel, choose_device, device_line
from asyncrl.runtime.process.worker import Worker, WorkerSpec
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, price_line, uses_memory_checkpoint
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.engines.role import RoleEngine
from asyncrl.trainer.functions.calls import find_function
from asyncrl.trainer.messages import (
    CommitCheckpoint,
    Discard,
    FinishShare,
    IsStepRunning,
    PollBuffer,
    SendWeights,
    StepRunning,
    WrittenShare,
)
from asyncrl.trainer.model.layout_parity import SequenceLayout
from asyncrl.trainer.model.varlen_attention import VARLEN
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.parallel.process_groups import Collectives
from asyncrl.trainer.parallel.world import all_have_started, training_world
from asyncrl.trainer.rank.profile import StepProfile
from asyncrl.trainer.rank.queued_requests import WAITING, QueuedRequests, checkpoint_path
from asyncrl.trainer.rank.roles import ACTOR, TrainingRank, build_rank
from asyncrl.trainer.rank.sample_log import SampleLog
from asyncrl.trainer.rank.utilisation import Utilisation, peak_flops
from asyncrl.trainer.rank.versions import Versions
from asyncrl.trainer.settings import VisionMode
from asyncrl.trainer.trajectories.receiver import TrajectoryReceiver
from asyncrl.trainer.trajectories.trajectory_check import TrajectoryCheck

_SERVE_S = 0.5  # how long a request may be waited for before a stop request is looked at
_MEET_LOOK_S = 0.1
_CLOSE_S = 1.0  # how long the end waits for weights on their way


def _gpu_memory(device: torch.device) -> dict[str, float]:
    """Return bytes of the GPU's memory: in use by all processes, in total, and the peak of this process.

    Nothing where CUDA did not begin: torch's calls end the process with SIGSEGV then, in place of the error itself.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_used": total - free, "gpu_bytes": total, "gpu_peak": torch.cuda.max_memory_reserved(device)}


class ModelWorker(Worker):
    """One training rank; see the module's docstring.

    It receives a stop request only when no process needs its answers any more. So it abandons a running call and aborts
    its collectives: the peers of a collective may never come.
    """

    interruptible = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._open = ExitStack()
        self._collectives = Collectives()
        self._memory_checkpoint = MemoryCheckpoint.of_rank(self.config, self.run_dir)

    def start(self) -> int:
        with heard_at_once(self._leave):
            return super().start()

    def _leave(self) -> None:
        """Abort the collectives.

        A thread calls this at a stop request, because the main thread may be waiting for a peer.
        """
        self.request_stop()
        self._collectives.abort()

    def configure(self) -> None:
        """Load the models, join the other ranks, take connections."""
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        device = choose_device("trainer.device", config.trainer.device)
        graph = load_graph(config)
        placed = placement(config, graph)
        if placed.workers > 1:
            observer.stage("waits for the other ranks")
            self._meet(placed.workers)
        if device.type == "cuda":
            observer.gauges(partial(_gpu_memory, device))
        joining = (config, self.index, placed, device, self.run_dir, self.resolver, self._collectives)
        start_s = LONGEST_STARTS * config.system.start_timeout_s  # whether the others go on, the master sees
        self._world = self._open.enter_context(training_world(*joining, start_s=start_s))
        self._device = device
        observer.stage("loads the models")
        self._rank: TrainingRank = build_rank(config, graph, self._world, device)
        dtype = getattr(torch, config.model.dtype.on(device.type))
        self.log.info("%s", device_line(device, dtype, self._attention()))
        if uses_memory_checkpoint(config):
            self.log.info("%s", price_line(self._rank.state_bytes(), copy_rate(device)))
        self._open.callback(self._rank.checkpoints.close)
        self._open.callback(self._rank.memory_checkpoint.close)
        functions = {call.function: find_function(call.function) for call in graph.calls}
        utilisation = Utilisation(self._rank.engines, peak_flops(device, dtype))
        observer.gauges(utilisation.gauges)
        sample_logs = self._open_sample_logs()
        all_have_started(config)
        heads = self._world.placement.actor.data_heads
        head = heads.index(self.index) if self._world.takes_trajectories else 0
        self._receiver = self._open_receiver(head)
        self._versions = Versions(config, self.run_dir, self._world, self._rank, self.http_security, device)
        self._requests = QueuedRequests(
            config,
            self._world,
            self._rank,
            receiver=self._receiver,
            versions=self._versions,
            memory_checkpoint=self._memory_checkpoint,
            functions=functions,
            sample_logs=sample_logs,
            utilisation=utilisation,
            profile=StepProfile(config.profile, self.index, self.run_dir / PROFILE_DIR, device),
            device=device,
        )
        self._take_connections(head)

    def _meet(self, ranks: int) -> None:
        """Wait until all ranks are about to join: the first rank waits for the others' processes, and they wait for it.

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
        given_up = f"{names.INCARNATIONS}/{names.MODEL_WORKER}"
        while True:
            there, least = waiting.living(), self.resolver.get_subtree(given_up)
            if all(
                there.get(rank, -1) >= int(least.get(names.incarnation_key(names.MODEL_WORKER, rank), 0))
                for rank in range(ranks)
            ):
                return
            waiting.look()
            self.stop_requested.wait(_MEET_LOOK_S)

    def run(self) -> None:
        """Serve the master until a stop is requested."""
        self.ready()
        observer.stage(WAITING)
        while not self.stop_requested.is_set():
            self._server.serve_one(_SERVE_S)

    def close(self) -> None:
        """Stop the threads and leave the world. After a stop request, stored trajectories are no longer needed."""
        self._open.close()
        if self.stop_requested.is_set():
            self._memory_checkpoint.leave()

    def _attention(self) -> str:
        """Return the layout and kernel that the policy trains with; on ranks without the policy, what the setting
        names.
        """
        engine, implementation = self._rank.engines.get(ACTOR), str(self.config.model.attn_implementation)
        if not isinstance(engine, RoleEngine) or not isinstance(engine, PolicyEngine):
            return implementation
        dtype = getattr(torch, self.config.model.dtype.on(self._device.type))
        if str(engine.model_config.get_text_config()._attn_implementation).startswith(VARLEN):
            return str(SequenceLayout(engine.attention, "torch's variable-length kernel"))
        kernel = attention_kernel(engine.model_config.to_dict(), implementation, self._device, dtype)
        return str(SequenceLayout(engine.attention, kernel))

    def _take_connections(self, head: int) -> None:
        """Serve the master, and take trajectories as data index `head`."""
        system = self.config.system
        self._server = RequestServer(
            system.host,
            self.security,
            immediate={
                IsStepRunning: self._is_step_running,
                PollBuffer: self._receiver.poll,
                Discard: self._discard,
                SendWeights: self._send_weights,
                FinishShare: self._finish_share,
                CommitCheckpoint: self._commit_checkpoint,
            },
            queued=self._requests.handlers(),
        )
        self._open.callback(self._server.close)
        if self._world.publishes:
            self._open.callback(self._close_connections)
        remembered = ids_remembered(self.config.train_batch_size, self.config.max_head_offpolicyness)
        puller = TrajectoryPuller(system.host, self.security, on_message=self._receiver.receive, remembered=remembered)
        self._open.callback(puller.close)
        self._open.callback(self._receiver.inbox.close)  # first: its thread may wait for room there
        address = names.WorkerAddress(self._server.endpoint, os.getpid()).encode()
        lease_s = system.lease_s
        self.resolver.add(names.worker_key(self.spec.kind, self.index), address, lease_s=lease_s, replace=True)
        if self._world.takes_trajectories:
            self.resolver.add(names.puller_key(head), puller.endpoint, lease_s=lease_s, replace=True)

    def _open_receiver(self, head: int) -> TrajectoryReceiver:
        config, folder = self.config, str(self.config.model.path)
        model = json.loads((Path(folder) / "config.json").read_text())
        routing = routing_shape_of(folder) if config.moe.replay_routing else None
        pictures = config.model.vision != VisionMode.none and placeholder_id(model) is not None
        vocabulary = model.get("vocab_size")
        allowed = token_ids(config.rollout.sampling.allowed_token_ids)
        check = TrajectoryCheck(vocabulary, self._announced_version, routing, pictures=pictures, allowed=allowed).check
        actor = self._rank.engines.get(ACTOR)
        receiver = TrajectoryReceiver(
            config.trainer,
            head,
            check,
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

    # The request server's loop.

    async def _is_step_running(self, request: IsStepRunning) -> StepRunning:
        return StepRunning(self._requests.standing.in_step)

    async def _discard(self, request: Discard) -> Done:
        self._receiver.discard(request.rollout_ids)
        return Done()

    async def _send_weights(self, request: SendWeights) -> Done:
        await self._versions.to_servers.send(request)
        return Done()

    async def _finish_share(self, request: FinishShare) -> WrittenShare:
        share = self._rank.writer(request.in_memory).share(checkpoint_path(request, self._memory_checkpoint))
        return WrittenShare(await asyncio.shield(asyncio.wrap_future(share)))

    async def _commit_checkpoint(self, request: CommitCheckpoint) -> Done:
        if request.in_memory and not self._rank.folders.leads:
            return Done()
        writer = self._rank.writer(request.in_memory)
        commit = partial(writer.commit, keep=request.keep, protected=request.protected)
        await asyncio.to_thread(commit, checkpoint_path(request, self._memory_checkpoint), request.files)
        return Done()

    def _close_connections(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._versions.to_servers.close(), self._server.loop)
        try:
            closing.result(_CLOSE_S)
        except TimeoutError:
            self.log.warning("a server did not take leave within %g s", _CLOSE_S)

    def _open_sample_logs(self) -> dict[str, SampleLog]:
        """Open the writers of this rank's samples, by policy that it trains; none if none are to be kept."""
        samples, policies = self.config.samples, ("", *self.config.trained_policies)
        here = [policy for policy in policies if self._world.hosts(role_of_policy(policy, ACTOR))]
        if not samples.every or not here:
            return {}
        decode = load_tokenizer(str(self.config.model.path)).decode
        opened = {}
        for policy in here:
            place = self._world.place(role_of_policy(policy, ACTOR))
            ranks, max_bytes = place.data, int(samples.max_gb * 1e9 / place.data.world / len(policies))
            name = "-".join([f"head-{ranks.rank}", *([policy] if policy else [])])
            writer = name if place.copy.leads else None
            opened[policy] = SampleLog(self.run_dir / SAMPLES_DIR, samples.every, max_bytes, writer, decode)
            self._open.callback(opened[policy].close)
        return opened

"""ModelWorker: one training rank. It holds the trajectories' tensors and computes what the master asks for.

Two threads of I/O, one that computes. The trajectory puller takes in rollouts and acknowledges them once they are in
the inbox; the request server answers what is quick at once (metadata, discards) and queues what computes; the
main thread does the queued calls one after the other, in the order in which they came, so that collectives run in the
same order on all ranks.

    RolloutWorkers ──▶ puller ──▶ inbox ──begin_step──▶ StepBatch ──run_call──▶ engines ──publish──▶ weights/<role>/v<N>
                                    │ poll_buffer          ▲
                                    └──▶ master ───────────┘ (metadata and names of calls only)
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from asyncrl.comm import names
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.request_reply import Done, RequestServer
from asyncrl.config.setting import Device
from asyncrl.inference.settings import context_length
from asyncrl.master.graph.builtin import load_graph
from asyncrl.runtime.run_dir import ANNOUNCED_DIR, WEIGHTS_DIR
from asyncrl.runtime.worker import Worker, WorkerSpec
from asyncrl.trainer.calls import CallContext, find_function, run_call
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.inbox import Inbox
from asyncrl.trainer.messages import (
    BeginStep,
    CallStats,
    CollectWeights,
    Discard,
    EndStep,
    LoadCheckpoint,
    LoadedCheckpoint,
    PollBuffer,
    PolledBuffer,
    Publish,
    PublishedWeights,
    RunCall,
    SaveCheckpoint,
    SendWeights,
)
from asyncrl.trainer.redistribute import redistribute
from asyncrl.trainer.roles import TrainingRank, build_rank
from asyncrl.trainer.settings import worker_grid
from asyncrl.trainer.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.world import training_world
from asyncrl.weights import publishing
from asyncrl.weights.canary import Canary, canary_tokens
from asyncrl.weights.shared_files import SharedFiles
from asyncrl.weights.transports import weight_transport
from asyncrl.weights.transports.base import TrainerEnd

_SERVE_S = 0.5  # how long a request may be waited for before a stop request is looked at
_ROOM_S = 30.0  # how long a full inbox holds a trajectory back before its sender is told to offer it again
_CLOSE_S = 5.0  # how long the end waits for weights on their way


class ModelWorker(Worker):
    """See the module's docstring."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._open = ExitStack()
        self._batch: StepBatch | None = None

    def configure(self) -> None:
        """Load the models, join the other ranks, take connections."""
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        device = choose_device(config.trainer.device)
        self._place = self._open.enter_context(
            training_world(config, self.index, worker_grid(config), device, self.run_dir, self.resolver)
        )
        graph = load_graph(config)
        self._device = device
        self._rank: TrainingRank = build_rank(config, graph, self._place, device)
        self._functions = {call.function: find_function(call.function) for call in graph.calls}
        self._assets = publishing.tokenizer_assets(Path(str(config.model.path)))
        self._shared: dict[str, SharedFiles] = {}
        self._take_connections()

    def run(self) -> None:
        """Serve the master until a stop is requested."""
        self.ready()
        while not self.stop_requested.is_set():
            self._server.serve_one(_SERVE_S)

    def close(self) -> None:
        """Stop the threads, leave the world."""
        self._open.close()

    def _take_connections(self) -> None:
        system = self.config.system
        self._arrival: asyncio.Event | None = None
        self._inbox = Inbox(self._place.coordinates.data, self.config.trainer.buffer_capacity, self._on_arrival)
        self._server = RequestServer(
            system.host,
            self.security,
            immediate={
                PollBuffer: self._poll_buffer,
                Discard: self._discard,
                SendWeights: self._send_weights,
            },
            queued={
                BeginStep: self._begin_step,
                RunCall: self._run_call,
                EndStep: self._end_step,
                Publish: self._publish,
                CollectWeights: self._collect_weights,
                SaveCheckpoint: self._save_checkpoint,
                LoadCheckpoint: self._load_checkpoint,
            },
        )
        self._open.callback(self._server.close)
        self._to_servers = TrainerEnd()
        if self._place.publishes:
            transport = weight_transport(self.config.manager.weight_transport)
            self._to_servers = transport.trainer_end(self.config, self.token, self._device)
            self._open.callback(self._close_connections)
        receive = partial(self._inbox.put, timeout_s=_ROOM_S)
        self._puller = TrajectoryPuller(system.host, self.security, on_message=receive)
        self._open.callback(self._puller.close)
        address = names.WorkerAddress(self._server.endpoint, os.getpid()).encode()
        lease_s = system.heartbeat_s
        self.resolver.add(names.worker_key(self.kind, self.index), address, lease_s=lease_s, replace=True)
        if self._place.takes_trajectories:
            puller = names.puller_key(self._place.coordinates.data)
            self.resolver.add(puller, self._puller.endpoint, lease_s=lease_s, replace=True)

    # The puller's thread.

    def _on_arrival(self) -> None:
        if self._arrival is not None:  # else nobody waits, and waking the loop costs the main thread its turn
            self._server.loop.call_soon_threadsafe(self._wake_polls)

    # The request server's loop.

    def _wake_polls(self) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

    async def _poll_buffer(self, request: PollBuffer) -> PolledBuffer:
        try:
            async with asyncio.timeout(request.timeout_s):
                while True:
                    arrival = self._arrival = self._arrival or asyncio.Event()  # before looking: later arrivals set it
                    if (polled := self._inbox.poll(request.cursor)).rollouts:
                        return polled
                    await arrival.wait()
        except TimeoutError:
            return self._inbox.poll(request.cursor)

    async def _discard(self, request: Discard) -> Done:
        self._inbox.remove(request.rollout_ids)
        return Done()

    async def _send_weights(self, request: SendWeights) -> Done:
        await self._to_servers.send(request)
        return Done()

    # The main thread.

    def _close_connections(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._to_servers.close(), self._server.loop)
        try:
            closing.result(_CLOSE_S)
        except TimeoutError:
            self.log.warning("a server did not take leave within %g s", _CLOSE_S)

    def _begin_step(self, step: BeginStep) -> Done:
        here = self._place.coordinates.data
        leaving = [entry.rollout_id for entry in step.assignment if entry.src == here]
        trajectories = redistribute(step.assignment, self._inbox.get(leaving), self._place.data)
        self._batch = build_step_batch(
            trajectories,
            [entry.minibatch for entry in step.assignment if entry.dst == here],
            version=step.version,
            num_minibatches=step.num_minibatches,
            min_version=step.min_version,
            device=self._device,
        )
        self._inbox.remove(leaving)
        return Done()

    def _run_call(self, call: RunCall) -> CallStats:
        if self._batch is None:
            raise RuntimeError(f"call {call.name!r} came outside a step; the master sends begin_step first")
        context = CallContext(
            name=call.name,
            role=call.role,
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=self.config,
            engines=self._rank.engines,
            ranks=self._place.data,
            state=self._rank.state,
        )
        return CallStats(run_call(self._functions[call.function], context, self._batch))

    def _end_step(self, request: EndStep) -> Done:
        self._batch = None
        return Done()

    def _publish(self, request: Publish) -> PublishedWeights:
        """Make a version available: on disk if `to_disk`, and in memory where servers get it from there."""
        policy = self._rank.policy(request.role)
        canary = self._canary(policy)
        self._to_servers.hold(request.version, policy.published_tensors())
        shared = self._shared.setdefault(request.role, SharedFiles(policy.model_config, self._assets))
        published = publishing.publish(
            policy.published_tensors(),
            self.run_dir / (WEIGHTS_DIR if request.to_disk else ANNOUNCED_DIR),
            role=request.role,
            version=request.version,
            ranks=self._place.everyone,
            shared=shared if request.to_disk else None,
            canary=canary,
        )
        return PublishedWeights(str(published))

    def _canary(self, policy: PolicyEngine) -> Canary | None:
        """The canary of `policy` as it is now; None where nobody looks at it, or there is no room for one."""
        model_config = policy.model_config
        context = context_length(self.config, model_config.to_dict())
        tokens = canary_tokens(model_config.get_text_config().vocab_size, context)
        if not tokens or self.config.manager.canary_tolerance == 0:
            return None
        return Canary.of(tokens, policy.score_sequences(tokens))

    def _collect_weights(self, request: CollectWeights) -> Done:
        if self._place.publishes:
            for root in (WEIGHTS_DIR, ANNOUNCED_DIR):
                publishing.collect(self.run_dir / root, request.role, request.keep)
            self._to_servers.keep(request.keep)
        return Done()

    def _save_checkpoint(self, request: SaveCheckpoint) -> Done:
        self._rank.save_checkpoint(request)
        return Done()

    def _load_checkpoint(self, request: LoadCheckpoint) -> LoadedCheckpoint:
        return LoadedCheckpoint(self._rank.load_checkpoint(Path(request.root)))


def choose_device(setting: Device) -> torch.device:
    """`trainer.device` as a device; `auto` is the GPU where there is one."""
    if setting == Device.auto:
        setting = Device.cuda if torch.cuda.is_available() else Device.cpu
    return torch.device("cuda", 0) if setting == Device.cuda else torch.device("cpu")

"""ModelWorker: one training rank. It holds the trajectories' tensors and computes what the master asks for.

Two threads of I/O, one that computes. The trajectory puller takes in rollouts and acknowledges them once they are in
the inbox; the request server answers what is quick at once (metadata, discards, status) and queues what computes; the
main thread does the queued calls one after the other, in the order in which they came, so that collectives run in the
same order on all ranks.

    RolloutWorkers ──▶ puller ──▶ inbox ──begin_step──▶ StepBatch ──call──▶ engines ──publish──▶ weights/<role>/v<N>
                                    │ poll_buffer          ▲
                                    └──▶ master ───────────┘ (metadata and names of calls only)
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm import names
from asyncrl.comm.codec import Message
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.request_reply import RequestServer
from asyncrl.config.setting import Device
from asyncrl.inference.settings import context_length
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.run_files import ANNOUNCED_DIR, WEIGHTS_DIR
from asyncrl.runtime.worker import Worker, WorkerSpec
from asyncrl.trainer.calls import CallContext, ModelFunction, find_function, run_call
from asyncrl.trainer.engines.flat import PolicyEngine
from asyncrl.trainer.inbox import Inbox
from asyncrl.trainer.redistribute import Move, redistribute
from asyncrl.trainer.roles import TrainingRank, build_rank
from asyncrl.trainer.settings import data_parallel_ranks
from asyncrl.trainer.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.world import training_world
from asyncrl.weights import checkpoints, publishing
from asyncrl.weights.canary import Canary, canary_tokens
from asyncrl.weights.shared_files import SharedFiles
from asyncrl.weights.transports.delivery import SENDER
from asyncrl.weights.transports.sender import HeldWeights, WeightSender

_SERVE_S = 0.5  # how long a request may be waited for before a stop request is looked at
_ROOM_S = 30.0  # how long a full inbox holds a trajectory back before its sender is told to offer it again
_CLOSE_S = 5.0  # how long the end waits for weights on their way

Handler = Callable[[Mapping[str, Any]], dict[str, Any]]


class ModelWorker(Worker):
    """See the module's docstring."""

    kind = "model_worker"

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._open = ExitStack()
        self._functions: dict[str, ModelFunction] = {}
        self._batch: StepBatch | None = None

    def configure(self) -> None:
        """Load the models, join the other ranks, take connections."""
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        device = choose_device(config.trainer.device)
        ranks = self._open.enter_context(
            training_world(
                rank=self.index,
                world=data_parallel_ranks(config.trainer.parallel),
                device=device,
                host=config.system.host,
                run_dir=self.run_dir,
                resolver=self.resolver,
                join_timeout_s=config.system.start_timeout_s,
                collective_timeout_s=config.trainer.collective_timeout_s,
                lease_s=config.system.heartbeat_s,
            )
        )
        graph = load_graph(config)
        self._device = device
        self._rank: TrainingRank = build_rank(config, graph, ranks, device)
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
        security = None if self.secret is None else self.secret.sockets()
        self._news: asyncio.Event | None = None
        self._inbox = Inbox(self.config.trainer.buffer_capacity, self._tell_polls)
        queued: dict[str, Handler] = {
            "begin_step": self._begin_step,
            "call": self._call,
            "end_step": self._end_step,
            "publish": self._publish,
            "collect_weights": self._collect_weights,
            "save_checkpoint": self._save_checkpoint,
            "load_checkpoint": self._load_checkpoint,
        }
        self._held = HeldWeights()
        self._sender: WeightSender | None = None
        self._server = RequestServer(
            system.host,
            security,
            immediate={
                "poll_buffer": self._poll_buffer,
                "discard": self._discard,
                "status": self._status,
                "send_weights": self._send_weights,
            },
            queued={name: _as_method(name, handler) for name, handler in queued.items()},
        )
        self._open.callback(self._server.close)
        if self.index == SENDER and self.config.manager.weight_transport != "disk":
            token = None if self.secret is None else self.secret.token
            self._sender = WeightSender(self.config, self._held, token, self._device)
            self._open.callback(self._close_sender, self._sender)
        self._puller = TrajectoryPuller(system.host, security, on_message=self._receive)
        self._open.callback(self._puller.close)
        address = json.dumps({"endpoint": self._server.endpoint, "pid": os.getpid()})
        lease_s = system.heartbeat_s
        self.resolver.add(names.worker_key(self.kind, self.index), address, lease_s=lease_s, replace=True)
        self.resolver.add(names.puller_key(self.index), self._puller.endpoint, lease_s=lease_s, replace=True)

    # The puller's thread.

    def _receive(self, trajectory: Trajectory) -> None:
        self._inbox.put(trajectory, _ROOM_S)

    def _tell_polls(self) -> None:
        if self._news is not None:  # else nobody waits, and waking the loop costs the main thread its turn
            self._server.loop.call_soon_threadsafe(self._wake_polls)

    # The request server's loop.

    def _wake_polls(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def _poll_buffer(self, request: Message) -> Message:
        """What came since the acknowledged cursor, waited for up to `timeout_s`."""
        cursor, limit_s = int(request.meta["cursor"]), float(request.meta["timeout_s"])
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    news = self._news = self._news or asyncio.Event()  # before looking: what comes after it wakes us
                    if self._inbox.news(cursor)[1]:
                        break
                    await news.wait()
        except TimeoutError:
            pass  # nothing came: an empty answer says so
        cursor, rollouts = self._inbox.news(cursor)
        return Message("poll_buffer", {"cursor": cursor, "rollouts": rollouts})

    async def _discard(self, request: Message) -> Message:
        self._inbox.remove(request.meta["rollout_ids"])
        return Message("discard")

    async def _status(self, request: Message) -> Message:
        counters = self._puller.counters
        return Message(
            "status",
            {
                "held": len(self._inbox),
                "received": counters.received,
                "duplicates": counters.duplicates,
                "malformed": counters.malformed,
                "unauthenticated": counters.unauthenticated,
            },
        )

    async def _send_weights(self, request: Message) -> Message:
        """Bring a paused server to a version that is held in memory."""
        if self._sender is None:
            raise RuntimeError("this process sends no weights; set manager.weight_transport, and ask model_worker/0")
        meta = request.meta
        await self._sender.send(
            meta["server"],
            meta["url"],
            meta["version"],
            keep_cache=meta["keep_cache"],
            timeout_s=meta["timeout_s"],
        )
        return Message("send_weights")

    # The main thread.

    def _close_sender(self, sender: WeightSender) -> None:
        closing = asyncio.run_coroutine_threadsafe(sender.close(), self._server.loop)
        try:
            closing.result(_CLOSE_S)
        except TimeoutError:
            self.log.warning("a server did not take leave within %g s", _CLOSE_S)

    def _begin_step(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Bring this rank's rollouts of the step here and pack them."""
        assignment = meta["assignment"]
        moves = [Move(entry["rollout_id"], entry["src"], entry["dst"]) for entry in assignment]
        leaving = [move.rollout_id for move in moves if move.src == self.index]
        trajectories = redistribute(moves, self._inbox.get(leaving), self._rank.ranks)
        self._batch = build_step_batch(
            trajectories,
            [entry["minibatch"] for entry in assignment if entry["dst"] == self.index],
            version=meta["version"],
            num_minibatches=meta["num_minibatches"],
            min_version=meta["min_version"],
            device=self._device,
        )
        self._inbox.remove(leaving)
        return {"rollouts": len(trajectories), "tokens": self._batch.num_tokens}

    def _call(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        if self._batch is None:
            raise RuntimeError(f"call {meta['name']!r} came outside a step; the master sends begin_step first")
        context = CallContext(
            name=meta["name"],
            role=meta["role"],
            reads=tuple(meta["reads"]),
            writes=tuple(meta["writes"]),
            args=meta["args"],
            config=self.config,
            engines=self._rank.engines,
            ranks=self._rank.ranks,
            state=self._rank.state,
        )
        return {"stats": run_call(self._functions[meta["function"]], context, self._batch)}

    def _end_step(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        self._batch = None
        return {}

    def _publish(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Make a version available: on disk if `to_disk`, and in memory where servers get it from there."""
        role, version, ranks = meta["role"], meta["version"], self._rank.ranks
        policy = self._rank.policy(role)
        canary = self._canary(policy)
        if self._sender is not None:
            self._held.hold(version, publishing.published_tensors(policy.model))
        if meta["to_disk"]:
            published = publishing.publish(
                policy.model,
                self.run_dir / WEIGHTS_DIR,
                role=role,
                version=version,
                ranks=ranks,
                shared=self._shared.setdefault(role, SharedFiles(policy.model, self._assets)),
                canary=canary,
            )
        else:
            root = self.run_dir / ANNOUNCED_DIR
            published = publishing.announce(policy.model, root, role=role, version=version, ranks=ranks, canary=canary)
        return {"path": str(published.path), "bytes": published.bytes, "seconds": published.seconds}

    def _canary(self, policy: PolicyEngine) -> Canary | None:
        """The canary of `policy` as it is now; None where nobody looks at it, or there is no room for one."""
        model_config = policy.model.config
        context = context_length(self.config, model_config.to_dict())
        tokens = canary_tokens(model_config.get_text_config().vocab_size, context)
        if not tokens or self.config.manager.canary_tolerance == 0:
            return None
        return Canary(tokens, tuple(policy.sequence_logprobs(tokens)))

    def _collect_weights(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        removed: list[int] = []
        if self.index == 0:
            for root in (WEIGHTS_DIR, ANNOUNCED_DIR):
                removed += publishing.collect(self.run_dir / root, meta["role"], meta["keep"])
            self._held.keep(meta["keep"])
        return {"removed": removed}

    def _save_checkpoint(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        checkpoints.save(
            self._rank,
            Path(meta["path"]),
            version=meta["version"],
            master_state=meta["master_state"],
            keep=meta["keep"],
        )
        return {"path": meta["path"]}

    def _load_checkpoint(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {"master_state": checkpoints.load(self._rank, Path(meta["path"]))}


def choose_device(setting: Device) -> torch.device:
    """`trainer.device` as a device; `auto` is the GPU where there is one."""
    if setting == Device.auto:
        setting = Device.cuda if torch.cuda.is_available() else Device.cpu
    return torch.device("cuda", 0) if setting == Device.cuda else torch.device("cpu")


def _as_method(name: str, handler: Handler) -> Callable[[Message], Message]:
    return lambda request: Message(name, handler(request.meta))

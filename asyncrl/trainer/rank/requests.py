"""Requests to a training rank: those that compute, and those that are answered at once.

The rank's main thread answers the former in order of arrival, so that collectives run in the same order on all ranks
(`QueuedRequests`). The latter are answered on the request server's loop, even while the rank computes
(`ImmediateRequests`). Model functions run as calls of a step's graph, and ahead of a step on rollouts that wait for it
(`ModelCalls`).

Each role processes all samples of a step, distributed over its grid of ranks. So a rank has a batch for every grid that
it is part of. If several policies are trained, each trains on its own samples, in its own minibatches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from asyncrl.api.trajectory import Trajectory, policy_of
from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply import Done
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import config_of_policy, policy_and_role, role_of_policy
from asyncrl.master.graph import Graph
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.starting import io_bytes
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.batches.exchange import exchange_trajectories, hand_down
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch, detach, scores_of
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, find_function, run_call
from asyncrl.trainer.messages import (
    AskPulse,
    BeginStep,
    CallStats,
    CollectWeights,
    CommitCheckpoint,
    Discard,
    EndedStep,
    EndStep,
    FinishShare,
    GridShare,
    LoadCheckpoint,
    LoadedCheckpoint,
    LoadMemoryCheckpoint,
    MoveColumns,
    PollBuffer,
    Publish,
    PublishedWeights,
    RankPulse,
    RunCall,
    SaveCheckpoint,
    ScoreAhead,
    SendWeights,
    WrittenShare,
)
from asyncrl.trainer.parallel.placement import WorkerGrid
from asyncrl.trainer.rank.inbox import TrajectoryReceiver
from asyncrl.trainer.rank.measures import MemoryShortage, StepMeasures
from asyncrl.trainer.rank.training_rank import TrainingRank, Versions

if TYPE_CHECKING:
    from asyncrl.trainer.rank.sample_log import SampleLog


class ModelCalls:
    """Runs model functions, each with the settings, engines and ranks of its call's policy and role.

    Raises:
        PluginError: a call of `graph` names no model function.
    """

    def __init__(self, config: ExperimentConfig, graph: Graph, rank: TrainingRank) -> None:
        self._states, self._world = rank.states, rank.world
        self._functions = {call.function: find_function(call.function) for call in graph.calls}
        self._roles = {call.role: policy_and_role(config, call.role) for call in graph.calls}
        self._of_policies = {name: config_of_policy(config, name) for name in ("", *config.trained_policies)}
        self._engines = {name: rank.engines_of(name) for name in self._of_policies}
        self._hosted = {name: rank.roles_of(name) for name in self._of_policies}

    def run(self, call: RunCall, batch: StepBatch) -> StatValues:
        """Run `call` on `batch`; return its statistics."""
        policy = call.policy
        # The settings of a critic that policies share are those of the run's own policy, "".
        settings, role = self._roles[call.role]
        context = CallContext(
            name=call.name,
            role=role,
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=self._of_policies[settings],
            engines=self._engines[policy],
            ranks=self._world.position(call.role).data,
            state=self._states[policy],
            roles=self._hosted[policy],
        )
        return run_call(self._functions[call.function], context, batch)


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """The rollouts with samples of `policy`, reduced to these, in canonical order, and the minibatches of each."""

    policy: str
    trajectories: Sequence[Trajectory]
    minibatches: Sequence[Sequence[int]]


def parts_of_policies(
    trajectories: Sequence[Trajectory], minibatches: Sequence[Sequence[int]], policies: Sequence[str]
) -> Iterator[PolicyPart]:
    """Yield the part of each policy, that of the run's own first.

    Args:
        minibatches: for each rollout, the minibatches of the run's own policy in each pass, then of each further
            policy.
        policies: names of the policies that are trained beside the run's own.
    """
    if not policies:
        yield PolicyPart("", trajectories, minibatches)
        return
    for number, policy in enumerate(("", *policies)):
        kept: list[Trajectory] = []
        dealt: list[Sequence[int]] = []
        for trajectory, steps in zip(trajectories, minibatches, strict=True):
            own = [sample for sample in trajectory.columns if policy_of(sample.group, policies) == policy]
            if own:
                passes = len(steps) // (1 + len(policies))
                kept.append(replace(trajectory, samples=own))
                dealt.append(steps[number * passes : (number + 1) * passes])
        yield PolicyPart(policy, kept, dealt)


WAITING = "waits for the master"

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


@contextmanager
def _doing(name: str, **about: Any) -> Iterator[None]:
    """Report that this rank computes `name` within this block, and waits for the master afterwards."""
    with observer.doing(f"computes {name}", name, **about):
        yield
    observer.stage(WAITING, Activity.serves)


def checkpoint_path(request: SaveCheckpoint | FinishShare | CommitCheckpoint, memory: MemoryCheckpoint) -> Path:
    """Return the folder of a checkpoint, on disk or in the host's memory."""
    return memory.state_root / request.path if request.in_memory else Path(request.path)


class QueuedRequests:
    """Answers the requests that compute, and holds the batches of the step in training.

    Args:
        rank: engines and checkpoints of the rank.
        receiver: holds the received trajectories.
        versions: publishes weights.
        memory_checkpoint: folder of the checkpoint in the host's memory.
        calls: runs model functions.
        measures: measures the steps.
        memory: explains errors of the device's memory.
        sample_logs: writers of the rank's samples, by policy.
        device: device of the batches.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        rank: TrainingRank,
        *,
        receiver: TrajectoryReceiver,
        versions: Versions,
        memory_checkpoint: MemoryCheckpoint,
        calls: ModelCalls,
        measures: StepMeasures,
        memory: MemoryShortage,
        sample_logs: Mapping[str, SampleLog],
        device: torch.device,
    ) -> None:
        self._rank, self._world, self._receiver, self._versions = rank, rank.world, receiver, versions
        self._memory_checkpoint, self._device = memory_checkpoint, device
        self._calls, self._measures, self._memory, self._sample_logs = calls, measures, memory, sample_logs
        self._policies, self._columns = config.trained_policies, config.columns
        self._batches: dict[tuple[str, WorkerGrid], StepBatch] = {}
        self._shares: dict[tuple[str, WorkerGrid], GridShare] = {}
        self._newest = 0

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """Return the function that answers each kind of request."""
        return {
            ScoreAhead: self._observed("score_ahead", self.score_ahead, forward=True),
            BeginStep: self._observed("begin_step", self.begin_step),
            RunCall: self.run_call,
            MoveColumns: self._observed("move_columns", self.move_columns),
            EndStep: self._observed("end_step", self.end_step),
            Publish: self._observed("publish", self.publish),
            CollectWeights: self.collect_weights,
            SaveCheckpoint: self._observed("save_checkpoint", self.save_checkpoint),
            LoadCheckpoint: self._observed("load_checkpoint", self.load_checkpoint),
            LoadMemoryCheckpoint: self._observed("load_memory_checkpoint", self.load_memory_checkpoint),
        }

    def _observed(
        self, name: str, answer: Callable[[_Request], _Reply], *, forward: bool = False
    ) -> Callable[[_Request], _Reply]:
        """Wrap `answer` so that its duration is reported, and a lack of memory is explained."""

        def observed(request: _Request) -> _Reply:
            what = f"{name} (newest step: {self._newest})"
            with _doing(name), self._memory.explained(what, forward=forward):
                return answer(request)

        return observed

    def score_ahead(self, request: ScoreAhead) -> Done:
        """Score rollouts that wait for their step by frozen models. The head of each copy has received them, and keeps
        the scores. Called by all ranks of the actor.
        """
        position, inbox = self._world.position(ACTOR), self._receiver.inbox
        held = inbox.get(request.rollout_ids[position.coordinates.data]) if position.copy.leads else {}
        trajectories, _ = detach(hand_down(list(held.values()), position.copy))
        no_steps, version = [0] * len(trajectories), request.version
        batch = build_step_batch(
            trajectories, no_steps, version=version, num_minibatches=1, own=self._columns, device=self._device
        )
        with self._measures.computing():
            for call in request.calls:
                self._calls.run(call, batch)
            scores = scores_of(batch, [key for call in request.calls for key in call.writes])
        if position.copy.leads:
            inbox.keep_scores(scores)
        return Done()

    def begin_step(self, step: BeginStep) -> Done:
        """Bring the samples to every grid's ranks, and build this rank's batches. Called by all ranks."""
        self._newest = step.version + 1
        self._measures.begin(self._newest)
        held = self._receiver.inbox.get(step.leaving)
        self._shares = {}
        for grid, targets, share in zip(self._world.placement.distinct, step.targets, step.shares, strict=True):
            position = self._world.positions.get(grid)
            leaving = dict(zip(step.leaving, targets, strict=True))
            expected = {}
            if share is not None and position is not None and position.copy.leads:
                expected = dict(zip(share.rollout_ids, share.sources, strict=True))
            arrived = exchange_trajectories(leaving, expected, held, self._world.everyone)
            if share is not None and position is not None:
                self._build(step, grid, share, hand_down(arrived, position.copy))
        self._receiver.begin_step(step.leaving)
        return Done()

    def _build(self, step: BeginStep, grid: WorkerGrid, share: GridShare, handed: Sequence[Trajectory]) -> None:
        """Build the batch of each policy for `grid`."""
        trajectories, ahead = detach(handed)
        for part in parts_of_policies(trajectories, share.minibatches, self._policies):
            ids = {trajectory.rollout_id for trajectory in part.trajectories}
            self._shares[part.policy, grid] = share.keeping(ids) if self._policies else share
            batch = self._batches[part.policy, grid] = build_step_batch(
                part.trajectories,
                part.minibatches,
                version=step.version,
                num_minibatches=step.num_minibatches,
                min_version=step.min_version,
                own=self._columns,
                device=self._device,
            )
            batch.ahead = {key: torch.from_numpy(own).to(self._device) for key, own in ahead.items()}
            if part.policy in self._sample_logs and grid == self._actor_grid(part.policy):
                self._sample_logs[part.policy].begin(part.trajectories, batch)

    def move_columns(self, request: MoveColumns) -> Done:
        """Copy columns of the step's batches from one grid's ranks to another's."""
        from asyncrl.trainer.batches.column_moves import move_columns  # only if roles have grids of their own

        batches = {grid: batch for (policy, grid), batch in self._batches.items() if policy == request.policy}
        shares = {grid: share for (policy, grid), share in self._shares.items() if policy == request.policy}
        move_columns(request, self._world, shares, batches)
        return Done()

    def run_call(self, call: RunCall) -> CallStats:
        """Run a call of the step's graph on the batch of its policy on the grid of its role.

        Raises:
            RuntimeError: no step is in training.
        """
        grid = self._world.placement.grid(call.role)
        if (batch := self._batches.get((call.policy, grid))) is None:
            raise RuntimeError(f"call {call.name!r} came outside a step; the master sends begin_step first")
        explained = self._memory.explained(
            f"call {call.name!r} (role {call.role!r}) of step {self._newest}", forward=True, backward=not call.writes
        )
        with _doing(call.name, role=call.role), self._measures.call(call.name), explained:
            stats = self._calls.run(call, batch)
        if call.policy in self._sample_logs and grid == self._actor_grid(call.policy):
            self._sample_logs[call.policy].called(call.writes, batch)
        return CallStats(stats)

    def end_step(self, request: EndStep) -> EndedStep:
        """Complete the samples that are kept, and release the step's batches; return memory and speed."""
        for policy, log in self._sample_logs.items():
            if (batch := self._batches.get((policy, self._actor_grid(policy)))) is not None:
                log.end(batch)
        self._batches.clear()
        return self._measures.end()

    def publish(self, request: Publish) -> PublishedWeights:
        """Make a version available to servers."""
        return PublishedWeights(str(self._versions.publish(request)))

    def collect_weights(self, request: CollectWeights) -> Done:
        """Remove versions that no process reads."""
        self._versions.collect(request)
        return Done()

    def save_checkpoint(self, request: SaveCheckpoint) -> Done:
        """Begin to write a checkpoint; this rank's part is copied when this returns."""
        path = checkpoint_path(request, self._memory_checkpoint)
        self._rank.save_checkpoint(msgspec.structs.replace(request, path=str(path)))
        return Done()

    def load_checkpoint(self, request: LoadCheckpoint) -> LoadedCheckpoint:
        """Load the newest checkpoint on disk."""
        return self._loaded(self._rank.load_checkpoint(Path(request.root)))

    def load_memory_checkpoint(self, request: LoadMemoryCheckpoint) -> LoadedCheckpoint:
        """Load the last step from the host's memory."""
        state = self._rank.load_memory_checkpoint(
            self._memory_checkpoint.state_root, invalid=self._memory_checkpoint.invalid
        )
        return LoadedCheckpoint(None) if state is None else self._loaded(state)  # the run may resume from the disk

    def _loaded(self, state: Any) -> LoadedCheckpoint:
        """Remove kept samples of steps after the one from which the run resumes."""
        for log in self._sample_logs.values():
            log.forget_after(state["version"] if state else 0)
        return LoadedCheckpoint(state)

    def _actor_grid(self, policy: str) -> WorkerGrid:
        """Return the grid of a trained policy's actor, whose heads record its samples."""
        return self._world.placement.grid(role_of_policy(policy, ACTOR))


PIECE_BYTES = 16 << 20
"""Data that counts as a sign of life once it is read or written: far more than a waiting process reads or writes."""


class ImmediateRequests:
    """Answers the requests that do not compute.

    Args:
        rank: writes the checkpoints.
        receiver: holds the received trajectories.
        versions: sends weights from memory.
        memory_checkpoint: folder of the checkpoint in the host's memory.
    """

    def __init__(
        self,
        rank: TrainingRank,
        receiver: TrajectoryReceiver,
        versions: Versions,
        memory_checkpoint: MemoryCheckpoint,
    ) -> None:
        self._rank, self._receiver, self._versions = rank, receiver, versions
        self._memory_checkpoint = memory_checkpoint

    def handlers(self) -> dict[type, Callable[[Any], Awaitable[Any]]]:
        """Return the coroutine that answers each kind of request."""
        return {
            AskPulse: self.pulse,
            PollBuffer: self._receiver.poll,
            Discard: self.discard,
            SendWeights: self.send_weights,
            FinishShare: self.finish_share,
            CommitCheckpoint: self.commit_checkpoint,
        }

    async def pulse(self, request: AskPulse) -> RankPulse:
        """Return the rank's signs of life."""
        pieces = sum(engine.pieces for engine in self._rank.engines.values()) + io_bytes() // PIECE_BYTES
        return RankPulse(pieces, time.process_time())

    async def discard(self, request: Discard) -> Done:
        """Forget rollouts that will not be trained."""
        self._receiver.discard(request.rollout_ids)
        return Done()

    async def send_weights(self, request: SendWeights) -> Done:
        """Send a version from this rank's memory to servers."""
        await self._versions.to_servers.send(request)
        return Done()

    async def finish_share(self, request: FinishShare) -> WrittenShare:
        """Wait until this rank's files of a checkpoint are written."""
        share = self._rank.writer(request.in_memory).share(checkpoint_path(request, self._memory_checkpoint))
        return WrittenShare(await asyncio.shield(asyncio.wrap_future(share)))

    async def commit_checkpoint(self, request: CommitCheckpoint) -> Done:
        """Make a checkpoint visible that all ranks have written."""
        if request.in_memory and not self._rank.folders.leads:
            return Done()
        writer = self._rank.writer(request.in_memory)
        commit = partial(writer.commit, keep=request.keep, protected=request.protected)
        await asyncio.to_thread(commit, checkpoint_path(request, self._memory_checkpoint), request.files)
        return Done()

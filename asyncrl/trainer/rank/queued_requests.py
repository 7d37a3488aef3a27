"""Requests to a training rank that compute.

The rank's main thread answers them in order of arrival, so that collectives run in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.comm.request_reply import Done
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    BeginStep,
    CallStats,
    CollectWeights,
    CommitCheckpoint,
    EndedStep,
    EndStep,
    FinishShare,
    LoadCheckpoint,
    LoadedCheckpoint,
    LoadMemoryCheckpoint,
    MoveColumns,
    Publish,
    PublishedWeights,
    RunCall,
    SaveCheckpoint,
    ScoreAhead,
)
from asyncrl.trainer.rank.current_step import CurrentStep
from asyncrl.trainer.rank.measures import StepMeasures
from asyncrl.trainer.rank.memory_shortage import MemoryShortage
from asyncrl.trainer.rank.model_calls import ModelCalls, RolloutScorer
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.rank.versions import Versions
from asyncrl.trainer.trajectories.receiver import TrajectoryReceiver

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
    """Answers the requests that compute.

    Args:
        rank: engines and checkpoints of the rank.
        receiver: holds the received trajectories.
        versions: publishes weights.
        memory_checkpoint: folder of the checkpoint in the host's memory.
        step: the batches of the step in training.
        calls: runs model functions.
        scorer: scores rollouts ahead of their step.
        measures: measures the steps.
        memory: explains errors of the device's memory.
    """

    def __init__(
        self,
        rank: TrainingRank,
        *,
        receiver: TrajectoryReceiver,
        versions: Versions,
        memory_checkpoint: MemoryCheckpoint,
        step: CurrentStep,
        calls: ModelCalls,
        scorer: RolloutScorer,
        measures: StepMeasures,
        memory: MemoryShortage,
    ) -> None:
        self._rank, self._receiver, self._versions = rank, receiver, versions
        self._memory_checkpoint = memory_checkpoint
        self._step, self._calls, self._scorer, self._measures = step, calls, scorer, measures
        self._memory = memory
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
        """Score what the head of each copy received, and keep the scores there."""
        self._scorer.score(request)
        return Done()

    def begin_step(self, step: BeginStep) -> Done:
        """Bring the samples to every grid's ranks, and build the step's batches."""
        self._newest = step.version + 1
        self._measures.begin(self._newest)
        self._step.begin(step, self._receiver.inbox.get(step.leaving))
        self._receiver.left(step.leaving)
        return Done()

    def move_columns(self, request: MoveColumns) -> Done:
        """Copy columns of the step's batches from one grid's ranks to another's."""
        self._step.move_columns(request)
        return Done()

    def run_call(self, call: RunCall) -> CallStats:
        """Run a call of the step's graph on the batch of its policy."""
        batch = self._step.batch_of(call)
        explained = self._memory.explained(
            f"call {call.name!r} (role {call.role!r}) of step {self._newest}", forward=True, backward=not call.writes
        )
        with _doing(call.name, role=call.role), self._measures.call(call.name), explained:
            stats = self._calls.run(call, batch)
        self._step.called(call, batch)
        return CallStats(stats)

    def end_step(self, request: EndStep) -> EndedStep:
        """Release the step's batches; return memory and speed."""
        self._step.end()
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
        self._step.forget_samples_after(state["version"] if state else 0)
        return LoadedCheckpoint(state)

"""The step in training, on one rank: its batches, one for each trained policy and grid of ranks.

Each role processes all samples of a step, distributed over its grid. So a rank has a batch for every grid that it is
part of. If several policies are trained, each trains on its own samples, in its own minibatches.

The log of samples
------------------
Trained samples are written to files (`samples.every`): the head of each data index writes its own files.

All log-probabilities are those of training. The behaviour policy's came with the trajectory; the proximal and the
reference policy's are recorded as calls write them. Deferred ones are computed for the kept samples alone, before the
actor changes, and do not replace anything that training reads. So training is the same with and without the log. A
thread writes the files while training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.api.trajectory import Trajectory, policy_of
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SAMPLES_DIR
from asyncrl.config.variants import role_of_policy
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.observe.samples import TOKEN_SCORES, Row, forget_after, rows_of, write_samples
from asyncrl.trainer.batches.exchange import exchange_trajectories, hand_down
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch, detach
from asyncrl.trainer.messages import BeginStep, GridShare, MoveColumns, RunCall
from asyncrl.trainer.parallel.placement import WorkerGrid
from asyncrl.trainer.parallel.world import World

_log = logging.getLogger(__name__)


class SampleLog:
    """Writes samples of one rank.

    Args:
        folder: folder of the files.
        every: keep every N-th rollout of the data order.
        max_bytes: limit on the size of all of this rank's files.
        writer: this rank's name in the files; None if another rank with the same samples writes.
        decode: turns token ids into text.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        max_bytes: int,
        writer: str | None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._folder, self._every, self._max_bytes = folder, every, max_bytes
        self._writer, self._decode = writer, decode
        self._trajectories: list[tuple[Trajectory, int]] = []  # each with the position of its first token
        self._wanted_T = torch.zeros(0, dtype=torch.bool)
        self._scores: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[Path] | None = None

    def begin(self, trajectories: Sequence[Trajectory], batch: StepBatch) -> None:
        """Select the samples to keep of a step that begins with `batch`, built from `trajectories`."""
        self._trajectories, self._scores, start = [], {}, 0
        self._wanted_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
        for trajectory in trajectories:
            size = int(trajectory.columns.lengths.sum())
            if trajectory.order % self._every == 0:
                self._trajectories.append((trajectory, start))
                self._wanted_T[start : start + size] = True
            start += size

    def called(self, writes: Sequence[str], batch: StepBatch) -> None:
        """Record the columns `writes` that a call wrote. Called on every rank of the batch: it may run a collective."""
        for key in writes:
            if key in TOKEN_SCORES and (compute := batch.deferred(key)) is not None:
                self._scores[key] = compute(self._wanted_T & batch["loss_mask"])

    def end(self, batch: StepBatch) -> None:
        """Begin to write the kept samples of the step, which is complete."""
        kept, self._trajectories = self._trajectories, []
        if self._writer is None or not kept:
            return
        for key in TOKEN_SCORES:
            if key not in self._scores and key in batch and batch.deferred(key) is None:
                self._scores[key] = batch[key]
        scores = {key: column.detach().to("cpu", torch.float32).numpy().copy() for key, column in self._scores.items()}
        self._scores = {}
        self._finish()
        self._writing = self._thread.submit(self._write, kept, batch.version + 1, self._writer, scores)

    def forget_after(self, version: int) -> None:
        """Forget samples after `version`, from which the run resumes."""
        if self._writer is not None:
            forget_after(self._folder, version, self._writer)

    def close(self) -> None:
        """Wait for the write in progress."""
        self._finish()
        self._thread.shutdown()

    def _finish(self) -> None:
        """Wait for the last write and log its failure.

        Training does not read the samples, so a lost sample must not fail a step.
        """
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.exception()) is not None:
            _log.warning("the samples of a step could not be kept in %s: %r", self._folder, error)

    def _write(
        self, kept: Sequence[tuple[Trajectory, int]], step: int, writer: str, scores: dict[str, NDArray[np.float32]]
    ) -> Path:
        rows: list[Row] = []
        for trajectory, start in kept:
            stop = start + int(trajectory.columns.lengths.sum())
            rows += rows_of(trajectory, step, self._decode, {key: values[start:stop] for key, values in scores.items()})
        return write_samples(self._folder, step, writer, rows, self._max_bytes)


def open_sample_logs(config: ExperimentConfig, world: World, run_dir: Path) -> dict[str, SampleLog]:
    """Open the writers of this rank's samples, by trained policy; none if no samples are to be kept."""
    samples, policies = config.samples, ("", *config.trained_policies)
    here = [policy for policy in policies if world.hosts(role_of_policy(policy, ACTOR))]
    if not samples.every or not here:
        return {}
    decode = load_tokenizer(str(config.model.path)).decode
    opened = {}
    for policy in here:
        place = world.place(role_of_policy(policy, ACTOR))
        ranks, max_bytes = place.data, int(samples.max_gb * 1e9 / place.data.world / len(policies))
        name = "-".join([f"head-{ranks.rank}", *([policy] if policy else [])])
        writer = name if place.copy.leads else None
        opened[policy] = SampleLog(run_dir / SAMPLES_DIR, samples.every, max_bytes, writer, decode)
    return opened


class CurrentStep:
    """Builds the batches of a step, finds the batch of a call, and records the samples that are kept.

    Args:
        sample_logs: writers of the rank's samples, by policy.
        device: device of the batches.
    """

    def __init__(
        self, config: ExperimentConfig, world: World, sample_logs: Mapping[str, SampleLog], device: torch.device
    ) -> None:
        self._world, self._device, self._sample_logs = world, device, sample_logs
        self._policies, self._columns = config.trained_policies, config.columns
        self._batches: dict[tuple[str, WorkerGrid], StepBatch] = {}
        self._shares: dict[tuple[str, WorkerGrid], GridShare] = {}

    def begin(self, step: BeginStep, held: Mapping[str, Trajectory]) -> None:
        """Bring the samples to every grid's ranks, and build this rank's batches. Called by all ranks.

        Args:
            held: the trajectories that this rank received, by rollout id.
        """
        self._shares = {}
        for grid, targets, share in zip(self._world.placement.distinct, step.targets, step.shares, strict=True):
            place = self._world.places.get(grid)
            leaving = dict(zip(step.leaving, targets, strict=True))
            expected = {}
            if share is not None and place is not None and place.copy.leads:
                expected = dict(zip(share.rollout_ids, share.sources, strict=True))
            arrived = exchange_trajectories(leaving, expected, held, self._world.everyone)
            if share is not None and place is not None:
                self._build(step, grid, share, hand_down(arrived, place.copy))

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
            if grid == self._actor_grid(part.policy) and part.policy in self._sample_logs:
                self._sample_logs[part.policy].begin(part.trajectories, batch)

    def batch_of(self, call: RunCall) -> StepBatch:
        """Return the batch of the call's policy on the grid of its role.

        Raises:
            RuntimeError: no step is in training.
        """
        if (batch := self._batches.get((call.policy, self._world.placement.grid(call.role)))) is None:
            raise RuntimeError(f"call {call.name!r} came outside a step; the master sends begin_step first")
        return batch

    def called(self, call: RunCall, batch: StepBatch) -> None:
        """Record what `call` wrote in the samples that are kept."""
        if self._world.placement.grid(call.role) == self._actor_grid(call.policy) and call.policy in self._sample_logs:
            self._sample_logs[call.policy].called(call.writes, batch)

    def move_columns(self, request: MoveColumns) -> None:
        """Copy columns of the step's batches from one grid's ranks to another's."""
        from asyncrl.trainer.batches.column_moves import move_columns  # only if roles have grids of their own

        batches = {grid: batch for (policy, grid), batch in self._batches.items() if policy == request.policy}
        shares = {grid: share for (policy, grid), share in self._shares.items() if policy == request.policy}
        move_columns(request, self._world, shares, batches)

    def end(self) -> None:
        """Complete the samples that are kept, and release the batches."""
        for policy, log in self._sample_logs.items():
            if (batch := self._batches.get((policy, self._actor_grid(policy)))) is not None:
                log.end(batch)
        self._batches.clear()

    def forget_samples_after(self, version: int) -> None:
        """Remove kept samples of steps after `version`, from which the run resumes."""
        for log in self._sample_logs.values():
            log.forget_after(version)

    def _actor_grid(self, policy: str) -> WorkerGrid:
        """Return the grid of a trained policy's actor, whose heads record its samples."""
        return self._world.placement.grid(role_of_policy(policy, ACTOR))


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

"""The step in training, on one rank: its batches, one for each trained policy and grid of ranks.

Each role processes all samples of a step, distributed over its grid. So a rank has a batch for every grid that it is
part of. If several policies are trained, each trains on its own samples, in its own minibatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from asyncrl.api.trajectory import Trajectory, policy_of
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import role_of_policy
from asyncrl.trainer.batches.exchange import exchange_trajectories, hand_down
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch, detach
from asyncrl.trainer.messages import BeginStep, GridShare, MoveColumns, RunCall
from asyncrl.trainer.parallel.placement import WorkerGrid
from asyncrl.trainer.parallel.world import World

if TYPE_CHECKING:
    from asyncrl.trainer.rank.sample_log import SampleLog


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

"""Training on kept samples instead of new rollouts: a RolloutWorker that reads files (`samples.replay`).

The kept rollouts take the place of the dataset's rows, in the order in which they were trained (step, then data order).
The gate admits them like any other, B in each step of the replay. Behaviour log-probabilities and rewards are as
recorded, and so is every token's age. If all rollouts of a run were saved, in batches of B, so are the versions;
otherwise a token of age a at its training gets the version v - a (at least 0) in the step from version v. Rollouts that
no step trained, which `rollout` makes, keep their version, 0.

A step's rollouts are sent to the training ranks only once its version is announced: ranks accept no token of a version
that has not been published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver, NameResolveTimeout
from asyncrl.comm.push_pull import TrajectoryPusher
from asyncrl.comm.waits import CLOSE_S, HOLD_S, LOOK_S
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import FinishedRollout, GrantedRollout
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.observe.samples import read_samples, sample_files, trajectories
from asyncrl.rollout.loop import RolloutSlots
from asyncrl.rollout.process import RolloutWorker


async def replay(worker: RolloutWorker) -> None:
    """Have `worker` send kept rollouts in place of new ones, until it is stopped."""
    manager, batch_size = await worker.find_manager(), worker.config.train_batch_size
    pusher = TrajectoryPusher((), worker.security, identity=worker.name)
    try:
        kept = KeptRollouts(Path(worker.config.samples.replay), batch_size)
        loop = ReplayLoop(manager, pusher.push, worker.resolver, kept, batch_size)
        worker.ready()
        observer.stage("replays", Activity.serves)
        await worker.until_stopped(loop.run(), pusher)
    finally:
        await pusher.close(CLOSE_S)
        await manager.close()


class KeptRollouts:
    """The kept rollouts of a folder by their place, from 0, in the order of the replay. Reads files as they are needed.

    Raises:
        ValueError: a file holds no samples; the message names it.
    """

    def __init__(self, folder: Path, batch_size: int) -> None:
        self._folder, self._batch_size = folder, batch_size
        self._rollouts, self._next = _in_order(folder), 0
        self._read: dict[int, Trajectory] = {}

    def take(self, index: int) -> Trajectory:
        """Return the rollout at `index`, with the versions that it has in the step of the replay."""
        if index < self._next and index not in self._read:  # it was taken before
            self._rollouts, self._next, self._read = _in_order(self._folder), 0, {}
        while self._next <= index:
            step, trajectory = next(self._rollouts)
            self._read[self._next] = as_of(trajectory, step, self._next // self._batch_size)
            self._next += 1
        return self._read.pop(index)


class ReplayLoop:
    """Sends the kept rollouts that the gate admits, each once the version is announced from which its step starts.

    Args:
        push: sends a trajectory to a training rank; returns once it is acknowledged.
    """

    def __init__(
        self,
        manager: ManagerClient,
        push: Callable[[Trajectory], Awaitable[None]],
        resolver: NameResolver,
        kept: KeptRollouts,
        batch_size: int,
    ) -> None:
        self._manager, self._push, self._resolver = manager, push, resolver
        self._kept, self._batch_size = kept, batch_size
        self._reading = asyncio.Lock()
        self._version, self._announced = 0, asyncio.Condition()

    async def run(self) -> NoReturn:
        """Send rollouts until cancelled.

        Raises:
            InvalidTrajectory: a rank refused a rollout.
        """
        slots = RolloutSlots(self._manager, 2 * self._batch_size)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_versions())
            tasks.create_task(self._keep_lease())
            while True:
                for grant in await slots.granted():
                    tasks.create_task(self._send(grant)).add_done_callback(lambda _: slots.free())

    async def _keep_lease(self) -> NoReturn:
        """Call the manager now and then: a step, in which nothing else is to be said, may take long."""
        losses = -1
        while True:
            losses = (await self._manager.lost_servers(losses, HOLD_S)).seq

    async def _send(self, grant: GrantedRollout) -> None:
        async with self._announced:
            await self._announced.wait_for(lambda: self._version >= grant.order // self._batch_size)
        async with self._reading:
            kept = await asyncio.to_thread(self._kept.take, grant.order)
        await self._push(replace(kept, rollout_id=grant.rollout_id, prompt_id=grant.prompt_id, order=grant.order))
        self._manager.finish([FinishedRollout(grant.rollout_id, accepted=True)])

    async def _follow_versions(self) -> NoReturn:
        key, last = names.model_version_key(names.ACTOR), None
        while True:
            try:
                last = await asyncio.to_thread(self._resolver.watch, key, LOOK_S, last)
            except NameResolveTimeout:
                continue
            if last is not None:
                async with self._announced:
                    self._version = names.PublishedVersion.decode(last).version
                    self._announced.notify_all()


def as_of(trajectory: Trajectory, step: int, version: int) -> Trajectory:
    """Return `trajectory`, which `step` trained (0: none), with versions that keep its tokens' ages in the step from
    `version`.
    """
    shift = version - (step - 1)
    if not step or not shift:
        return trajectory
    return replace(trajectory, samples=[_shifted(sample, shift) for sample in trajectory.samples])


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """Summary of a folder: number of rollouts, age of the oldest token at its training, True if all were trained."""

    rollouts: int
    oldest_age: int
    all_trained: bool


def summary_of(folder: Path) -> SampleSummary:
    """Return the summary of `folder`.

    Raises:
        ValueError: a file holds no samples; the message names it.
    """
    rollouts, oldest, all_trained = set(), 0, True
    for row in read_samples(sample_files(folder), ["rollout", "step", "staleness"]):
        rollouts.add(row["rollout"])
        oldest = max(oldest, row["staleness"] or 0)
        all_trained &= row["step"] > 0
    return SampleSummary(len(rollouts), oldest, all_trained)


def _in_order(folder: Path) -> Iterator[tuple[int, Trajectory]]:
    """Yield the rollouts by step, then in data order, over the files of all ranks; one step at a time is in memory."""
    files = sample_files(folder)
    by_step: dict[str, list[Path]] = {}
    for file in files:
        by_step.setdefault(file.name.partition(".")[0], []).append(file)
    for group in by_step.values():
        yield from sorted(trajectories(read_samples(group)), key=lambda one: (one[1].order, one[1].rollout_id))


def _shifted(sample: Sample, shift: int) -> Sample:
    moved = np.maximum(sample.versions + shift, 0)
    versions = np.where(sample.loss_mask.astype(bool), moved, -1).astype(np.int32)
    return replace(sample, versions=versions)

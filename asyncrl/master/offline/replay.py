"""Training on kept samples instead of new rollouts: the substitutes for servers, manager and RolloutWorkers.

The kept rollouts are used in the order in which they were trained (step, then data order), B in each step of the
replay. Behaviour log-probabilities and rewards are as recorded, and so is every token's age. If all rollouts of a run
were saved, in batches of B, so are the versions; otherwise a token of age a at its training gets the version v - a (at
least 0) in the step from version v. Rollouts that no step trained, which `rollout` makes, keep their version, 0.

A step's rollouts are sent to the training ranks only once its version is announced: ranks accept no token of a version
that has not been published.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.ended_rollouts.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes, RolloutLine
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.names import PULLERS, WinRatesOfPools
from asyncrl.comm.push_pull import TrajectoryPusher
from asyncrl.manager.client import GateStatus
from asyncrl.manager.messages import (
    Books,
    ConsumedReply,
    DroppedRollout,
    GateBooks,
    ReceivedRollout,
    RunReport,
    WaitRestingReply,
)
from asyncrl.master.peers.connections import NameBoard
from asyncrl.observe.samples import read_samples, sample_files, trajectories
from asyncrl.runtime.process.worker import AsyncWorker

WORKER = "replay/0"
"""Name of the worker in the ledger's lines."""


class OfflineGate:
    """The manager's calls that the train loop needs, for rollouts that all ended long ago. Keeps the books."""

    def __init__(self, batch_size: int) -> None:
        self.begun = asyncio.Event()
        self._batch_size = batch_size
        self._lines: list[RolloutLine] = []
        self._live: set[str] = set()
        self._submitted = self._trained = self._abandoned = 0
        self._dropped: Counter[str] = Counter()

    async def report_run(self, report: RunReport) -> int:
        """Begin, or continue from a checkpoint."""
        if not self.begun.is_set():
            self._trained, self._dropped = report.version * self._batch_size, Counter(report.dropped)
            self._submitted = self._trained + self._dropped.total()
            self.begun.set()
        return 0

    def submitted(self, trajectory: Trajectory, version: int) -> None:
        """Count `trajectory`, which the ranks are about to receive in the step from `version`."""
        rollout = trajectory.rollout_id
        self._submitted += 1
        self._live.add(rollout)
        oldest = min((int(v) for sample in trajectory.samples for v in sample.versions if v >= 0), default=version)
        head = (rollout, trajectory.prompt_id, trajectory.order, 0, WORKER, oldest)
        self._lines.append(Admitted(*head, self._now()))
        tokens = sum(len(sample.tokens) for sample in trajectory.samples)
        self._lines.append(Finished(rollout, tokens, self._now()))

    async def received(self, rollouts: Sequence[ReceivedRollout]) -> list[str]:
        """Return nothing: all that is sent counts."""
        return []

    async def report_consumed(
        self,
        version: int,
        trained: Sequence[str],
        dropped: Sequence[DroppedRollout],
        events_after: int = 0,
        measured_after: int = 0,
    ) -> ConsumedReply:
        """See `ManagerClient`. No reply is ever lost here, so reported lines are forgotten."""
        for rollout in trained:
            self._live.discard(rollout)
            self._trained += 1
        for drop in dropped:
            self._live.discard(drop.rollout_id)
            self._dropped[drop.reason] += 1
            self._lines.append(Dropped(drop.rollout_id, drop.reason, PromptGoes.returned, self._now()))
        lines, self._lines = self._lines, []
        books = Books(
            submitted=self._submitted,
            trained=self._trained,
            dropped=dict(self._dropped),
            abandoned=self._abandoned,
            finished_untrained=len(self._live),
            version=version,
            trained_version=version,
        )
        return ConsumedReply(books, lines, events_after + len(lines), [], measured_after)

    async def wait_expiring(self, version: int, timeout_s: float) -> list[str]:
        """Return nothing: no rollout runs."""
        return []

    async def wait_resting(self, turn: int, timeout_s: float) -> WaitRestingReply:
        """Return no servers: a replay has none."""
        return WaitRestingReply([])

    async def close_gate(self) -> None:
        """Do nothing: this gate admits no rollouts."""

    async def abandon(self) -> GateBooks:
        """Abandon the rollouts that were sent but not trained; return the books."""
        for rollout in sorted(self._live):
            self._abandoned += 1
            self._lines.append(Abandoned(rollout, self._now()))
        self._live.clear()
        return GateBooks(self._submitted, self._trained, dict(self._dropped), self._abandoned)

    async def status(self) -> GateStatus:
        """Return the gate's status; no server has a version."""
        return GateStatus(dropped=self._dropped)

    async def describe(self) -> str:
        """Describe the rollouts that wait to be trained."""
        return f"replay: {len(self._live)} rollouts sent and not trained"

    @staticmethod
    def _now() -> float:
        return round(time.time(), 3)


class ReplayBoard(NameBoard):
    """Announces versions to the ranks, and shows the feeder the first and the newest version."""

    def __init__(self, resolver: NameResolver) -> None:
        super().__init__(resolver)
        self.version = 0
        self.changed = asyncio.Event()

    def announce_version(self, version: int, path: str, win_rates: WinRatesOfPools | None = None) -> None:
        super().announce_version(version, path, win_rates)
        self.version = version
        self.changed.set()


def batches(folder: Path, batch_size: int) -> Iterator[tuple[int, list[Trajectory]]]:
    """Yield the kept rollouts of `folder` in batches, each with the version from which its step starts; see the
    module.

    Raises:
        ValueError: a file holds no samples; the message names it.
    """
    rollouts = _in_order(folder)
    version = 0
    while len(batch := list(islice(rollouts, batch_size))) == batch_size:
        yield version, [as_of(trajectory, step, version) for step, trajectory in batch]
        version += 1


def as_of(trajectory: Trajectory, step: int, version: int) -> Trajectory:
    """Return `trajectory`, which `step` trained (0: none), with versions that keep its tokens' ages in the step from
    `version`.
    """
    shift = version - (step - 1)
    if not step or not shift:
        return trajectory
    return replace(trajectory, samples=[_shifted(sample, shift) for sample in trajectory.samples])


async def feed(
    worker: AsyncWorker, board: ReplayBoard, gate: OfflineGate, folder: Path, batch_size: int, total: int
) -> None:
    """Send each step's rollouts to the training ranks once its version is announced, up to version `total`.

    Raises:
        ValueError: see `batches`.
        InvalidTrajectory: a rank refused a rollout.
    """
    await gate.begun.wait()
    first = board.version
    pullers = await asyncio.to_thread(worker.resolver.get_subtree, PULLERS)
    pusher = TrajectoryPusher(pullers.values(), worker.security, identity=WORKER)
    try:
        for version, batch in islice(batches(folder, batch_size), first, total):
            while board.version < version:
                board.changed.clear()
                await board.changed.wait()
            for trajectory in batch:
                gate.submitted(trajectory, version)
            await asyncio.gather(*(pusher.push(trajectory) for trajectory in batch))
        await asyncio.Event().wait()  # nothing more to send; the train loop ends by itself
    finally:
        await pusher.close(0.0)


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

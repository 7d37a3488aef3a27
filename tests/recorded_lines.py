"""A ledger in memory, for tests of what is recorded."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.comm.ended_rollouts import RolloutCounts, RolloutLine
from asyncrl.manager.messages import TrainedRollout


class RecordedLines(list[RolloutLine]):
    """The lines about single rollouts, but for `trained` ones; `steps` are the ids that each step trained."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0
        self.steps: list[tuple[int, list[str]]] = []
        self.ends: list[tuple[int, RolloutCounts]] = []

    def add(self, line: RolloutLine) -> None:
        self.lines += 1
        self.append(line)

    def step(self, step: int, rollouts: Sequence[TrainedRollout], counts: RolloutCounts) -> None:
        self.steps.append((step, [each.rollout_id for each in rollouts]))

    def end(self, version: int, counts: RolloutCounts) -> None:
        self.ends.append((version, counts))

"""The row of metrics of a train step, and the wait of a row for its evaluation.

The step that makes version s has row s: `step` = `policy_version` = s, the statistics of the rollouts it trained,
and, where version s was evaluated, `eval/<set>/accuracy` of version s. That evaluation runs while training goes on,
so the row is held until it ends, and the rows after it too: every row is written once, in order. The first row also
carries the accuracy before training, `eval/<set>/initial_accuracy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.master.buffer import Batch
from asyncrl.rollout.messages import EvaluationResult

Row = dict[str, Any]

FULL_REWARD = 1.0 - 1e-6
"""An answer counts as right for `eval/<set>/accuracy` from this reward on; rewards of answers are 1 where right."""


def batch_statistics(batch: Batch) -> Row:
    """Statistics of a batch's rollouts: rewards, lengths (generated tokens per sample), ages of the trained tokens."""
    rewards = np.array([reward for record in batch.records for reward in record.rewards])
    generated = np.array([length for record in batch.records for length in record.generated])
    truncated = np.array([flag for record in batch.records for flag in record.truncated])
    flat = sum(len(set(record.rewards)) == 1 for record in batch.records)
    by_version: Counter[int] = Counter()
    for record in batch.records:
        by_version.update(record.version_tokens)
    ages = {batch.version - version: count for version, count in by_version.items() if version >= batch.min_version}
    tokens = max(1, sum(ages.values()))
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/groups_without_variance": flat / len(batch.records),
        "rollout/len_mean": float(generated.mean()),
        "rollout/len_max": float(generated.max()),
        "rollout/truncated": float(truncated.mean()),
        "staleness/max": float(max(ages, default=0)),
        "staleness/mean": sum(age * count for age, count in ages.items()) / tokens,
        "tokens/trained": float(sum(ages.values())),
        "tokens/batch": float(sum(record.tokens for record in batch.records)),
    }


def evaluation_statistics(name: str, result: EvaluationResult, prefix: str = "") -> Row:
    """The metrics of one evaluation on the set `name`."""
    rewards = np.array(result.rewards, dtype=float)
    return {
        f"eval/{name}/{prefix}accuracy": float((rewards >= FULL_REWARD).mean()),
        f"eval/{name}/{prefix}reward_mean": float(rewards.mean()),
        f"eval/{name}/{prefix}len_mean": float(np.mean(result.lengths)),
    }


@dataclass(slots=True)
class _Held:
    step: int
    row: Row
    awaited: set[int] = field(default_factory=set)


class RowQueue:
    """Rows in the order of their steps, each held until the evaluations it waits for have ended. Pure."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._early: dict[int, Mapping[str, float]] = {}

    def add(self, step: int, row: Row, awaited: Iterable[int] = ()) -> None:
        """Take the row of `step`, which waits for the evaluations of the versions `awaited`; some may have ended."""
        held = _Held(step, dict(row), set(awaited))
        for version in held.awaited & self._early.keys():
            held.awaited.remove(version)
            held.row |= self._early.pop(version)
        self._held.append(held)

    def evaluated(self, version: int, statistics: Mapping[str, float]) -> None:
        """The evaluation of `version` has ended; empty `statistics` if it failed."""
        waiting = [held for held in self._held if version in held.awaited]
        if not waiting:
            self._early[version] = statistics
        for held in waiting:
            held.awaited.remove(version)
            held.row |= statistics

    def pop_ready(self) -> list[tuple[int, Row]]:
        """The rows that need not wait any longer, in order."""
        ready = []
        while self._held and not self._held[0].awaited:
            held = self._held.pop(0)
            ready.append((held.step, held.row))
        return ready

    def state(self) -> list[dict[str, Any]]:
        """The held rows as JSON values, for a checkpoint."""
        return [{"step": held.step, "row": held.row} for held in self._held]

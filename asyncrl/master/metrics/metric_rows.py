"""The row of metrics of a train step, and the wait of a row for its evaluation.

The step that makes version s has row s: `step` = `policy_version` = s and the statistics of the rollouts it trained. If
version s was evaluated, the row has the metrics of each set, for example `eval/<set>/reward_mean`
(`evaluation_statistics`). A set without a result has `eval/<set>/failed` = 1, or `eval/<set>/cut_short` = 1 if the run
was stopped meanwhile. If the initial model is evaluated, row 0 has only that. The evaluation runs while training
continues, so its row is held until it ends, and so are later rows: every row is written once, in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.comm.ended_rollouts.drop_reasons import LOST_EPISODES
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.plugins.datasets.queue.order import epoch_of
from asyncrl.trainer.messages import EndedStep

Row = dict[str, Any]


def batch_statistics(batch: TrainBatch) -> Row:
    """Return statistics of a batch's rollouts: rewards of episodes, lengths of samples, ages of trained tokens, the
    epoch.

    `rollout/len_...` counts a sample's generated tokens, `rollout/context_len_...` all others: prompt, environment,
    tools. The rollouts' own metrics are averaged over the rollouts that have them; lost episodes are added up.
    """
    rewards = np.array([reward for record in batch.records for reward in record.episode_rewards])
    generated = np.array([length for record in batch.records for length in record.generated])
    lengths = np.array([length for record in batch.records for length in record.lengths])
    truncated = np.array([flag for record in batch.records for flag in record.truncated])
    flat = sum(
        not record.has_signal or (len(record.episode_rewards) == 1 and not record.groups) for record in batch.records
    )
    by_version: Counter[int] = Counter()
    for record in batch.records:
        by_version.update(record.version_tokens)
    ages = {batch.version - version: count for version, count in by_version.items() if version >= batch.min_version}
    tokens = max(1, sum(ages.values()))
    own: defaultdict[str, list[float]] = defaultdict(list)
    for record in batch.records:
        for name, value in record.metrics.items():
            own[name].append(value)
    lost = {name: sum(own.pop(name)) for name in list(own) if name.startswith(LOST_EPISODES)}
    return (
        {name: sum(values) / len(values) for name, values in own.items()}
        | lost
        | {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/frac_zero_std": flat / len(batch.records),
            "rollout/samples_per_episode": len(generated) / len(rewards),
            "rollout/len_mean": float(generated.mean()),
            "rollout/len_min": float(generated.min()),
            "rollout/len_max": float(generated.max()),
            "rollout/context_len_mean": float((lengths - generated).mean()),
            "rollout/context_len_max": float((lengths - generated).max()),
            "rollout/truncated": float(truncated.mean()),
            "staleness/max": float(max(ages, default=0)),
            "staleness/mean": sum(age * count for age, count in ages.items()) / tokens,
            "data/epoch": float(max(epoch_of(record.prompt_id) for record in batch.records)),
            "tokens/trained": float(sum(ages.values())),
            "tokens/batch": float(sum(record.tokens for record in batch.records)),
        }
    )


def buffered_s(batch: TrainBatch, now: float) -> Row:
    """Return the mean time since the trainer received a rollout of `batch`, at `now` in seconds since 1970."""
    waited = [max(0.0, now - record.received_at) for record in batch.records if record.received_at]
    return {"rollout/buffered_s": sum(waited) / len(waited)} if waited else {}


def of_ranks(ended: Sequence[EndedStep]) -> Row:
    """Return the use that the training ranks made of their devices: the most memory, and means of what is counted."""
    row: Row = {"rank/memory_bytes": max(rank.memory_bytes for rank in ended)}
    speeds = [rank.flops_per_s for rank in ended if rank.flops_per_s is not None]
    shares = [rank.mfu for rank in ended if rank.mfu is not None]
    if len(speeds) == len(shares) == len(ended):
        row |= {"rank/tflops_per_s": sum(speeds) / len(speeds) / 1e12, "rank/mfu": sum(shares) / len(shares)}
    return row


@dataclass(slots=True)
class _Held:
    row: Row
    awaits_evaluation: bool


class RowQueue:
    """Rows in the order of their steps, each held until its evaluation has ended. Pure."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._early: dict[int, Row] = {}

    def add(self, step: int, row: Row, *, awaits_evaluation: bool = False) -> None:
        """Add the row of `step`; the evaluation of that version may have ended already."""
        early = self._early.pop(step, None)
        self._held[step] = _Held(row | (early or {}), awaits_evaluation and early is None)

    def evaluated(self, version: int, statistics: Row) -> None:
        """Add `statistics` to the row of `version`, whose evaluation has ended."""
        held = self._held.get(version)
        if held is None:
            self._early[version] = statistics
        else:
            held.row |= statistics
            held.awaits_evaluation = False

    def pop_ready(self) -> list[tuple[int, Row]]:
        """Return the rows that are complete, in order."""
        ready = []
        for step, held in list(self._held.items()):
            if held.awaits_evaluation:
                break
            ready.append((step, held.row))
            del self._held[step]
        return ready

    def awaited(self) -> int | None:
        """Return the first step whose row waits for its evaluation."""
        return next((step for step, held in self._held.items() if held.awaits_evaluation), None)

    def state(self) -> list[dict[str, Any]]:
        """Return the held rows as JSON values, for a checkpoint."""
        return [{"step": step, "row": held.row} for step, held in self._held.items()]

"""The sample buffer, which decides which received rollouts are trained next and which never.

It is a pure state machine over metadata (`RolloutRecord`); the tensors wait in the ModelWorkers.

Life of a record

    add ──▶ live ──take──▶ taken ──trained──▶ trained
      │       └──expired at take──▶ dropped: stale             (its prompt waits again)
      ├──▶ dropped: stale                                      (expired before it arrived)
      └──▶ a second copy of a known rollout id: freed at the worker that holds it, not counted

The gate has one live rollout of a prompt at most, and only records that it counts come here (`collector`).

The rule at consumption. The step that takes the policy from version v to v + 1 may train tokens of versions v - η to
v. Admission alone cannot guarantee this (a long rollout is overtaken by others), so `take(v)` checks the oldest token
of every live record. Under `drop` and `wait` it drops a record with an older token; under `mask` only a record without
any token in range, and the batch's `min_version` tells the workers which tokens carry no loss. Under `wait` the master
holds the step until no running rollout would expire; the check remains as a last safeguard.

Oldest first. A batch takes the records with the oldest tokens, as they expire next, and among equals in data order.
Example, η = 2, B = 2, version 3: of live records with oldest versions {a: 3, b: 2, c: 0, d: 3} (data order a b c d),
c is dropped (3 - 0 > 2), b goes first, then a; d waits. Within the batch the order is the data order: a, b.

The user's order (`buffer.order.path`) ranks the records that could wait for another step. Those that could not are
taken before them, oldest first, so an order never loses a rollout that this step can train and never trains a stale
token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from asyncrl.comm.ended_rollouts.drop_reasons import DropReason
from asyncrl.comm.ended_rollouts.recent_ids import RecentIds, ids_remembered
from asyncrl.manager.messages import DroppedRollout
from asyncrl.master.data.live_records import LiveRecords
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """A received rollout that will not be trained, and why."""

    record: RolloutRecord
    reason: str

    @property
    def message(self) -> DroppedRollout:
        """The report of this drop to the manager."""
        return DroppedRollout(self.record.rollout_id, self.reason)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The rollouts of the step that makes `version` + 1, in data order; tokens below `min_version` carry no loss."""

    version: int
    min_version: int
    records: tuple[RolloutRecord, ...]


class SampleBuffer:
    """The metadata of received rollouts, and the decision which of them are trained next.

    Args:
        batch_size: B, rollouts per train step.
        eta: largest allowed age of a trained token, in versions.
        on_stale: treatment of records beyond `eta`.
        remembered: number of finished rollout ids kept to recognise late copies; None: `ids_remembered`.
    """

    def __init__(
        self,
        batch_size: int,
        eta: int,
        on_stale: OnStale,
        remembered: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.received = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._live = LiveRecords(eta, on_stale)
        self._taken: dict[str, RolloutRecord] = {}
        self._finished: RecentIds[None] = RecentIds(
            ids_remembered(batch_size, eta) if remembered is None else remembered
        )
        self._drops: list[Drop] = []

    def __len__(self) -> int:
        """Live records."""
        return len(self._live)

    def add(self, records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
        """Add received rollouts; return second copies, which are to be freed at the workers that hold them."""
        copies = []
        for record in records:
            known = self._live.get(record.rollout_id) or self._taken.get(record.rollout_id)
            if known or record.rollout_id in self._finished:
                if known is None or known.head != record.head:  # else a lost reply was sent again
                    copies.append(record)
                continue
            self.received += 1
            if not self._live.add(record):
                self._drop(record, DropReason.stale)
        return copies

    def refuse(self, rollout_ids: Iterable[str]) -> list[RolloutRecord]:
        """Remove live records that the gate does not count; return them, which are to be freed."""
        refused = [self._live.pop(each) for each in rollout_ids if self._live.get(each) is not None]
        for record in refused:
            self._finished.put(record.rollout_id, None)
        return refused

    def expire(self, version: int) -> None:
        """Drop the live records that neither the step at `version` nor a later one may train."""
        for record in self._live.expire(version):
            self._drop(record, DropReason.stale)

    def live(self) -> list[RolloutRecord]:
        """Return the live records."""
        return list(self._live)

    def take(self, version: int, ranks: Mapping[str, float] | None = None) -> TrainBatch | None:
        """Take the batch of the step at `version`; None while fewer than B live records are left after the expiry
        check.

        `ranks`: the user's order, by rollout id; records without a rank, which arrived later, come last.
        """
        self.expire(version)
        if len(self._live) < self.batch_size:
            return None
        known = ranks or {}

        def turn(record: RolloutRecord) -> tuple[bool, float, int, int, str]:
            can_wait, rank = not self._live.expires(record, version + 1), known.get(record.rollout_id, inf)
            return can_wait, rank, record.oldest_version, *_data_order(record)

        chosen = sorted(self._live, key=turn)[: self.batch_size]
        for record in chosen:
            self._taken[record.rollout_id] = self._live.pop(record.rollout_id)
        return TrainBatch(version, max(0, version - self._live.eta), tuple(sorted(chosen, key=_data_order)))

    def mark_trained(self, batch: TrainBatch) -> None:
        """Record that the step of `batch` is complete.

        Raises:
            KeyError: a record was not taken, or is trained twice.
        """
        for record in batch.records:
            del self._taken[record.rollout_id]
            self._finished.put(record.rollout_id, None)
            self.trained += 1

    @property
    def has_drops(self) -> bool:
        """True if `pop_drops` has something to return."""
        return bool(self._drops)

    def pop_drops(self) -> list[Drop]:
        """Return the drops since the last call; each is returned exactly once."""
        drops, self._drops = self._drops, []
        return drops

    def describe(self) -> str:
        """Describe the counters, for a message about a stall."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"{len(self._live)} of {self.batch_size} rollouts in the buffer "
            f"({self.received} received, {self.trained} trained, {len(self._taken)} in training, dropped: {reasons})"
        )

    def state(self) -> dict[str, Any]:
        """Return the buffer's part of a checkpoint: its counters. The ranks have the live records."""
        return {
            "trained": self.trained,
            "dropped": {str(reason): count for reason, count in self.dropped.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.trained = state["trained"]
        self.dropped = Counter(state["dropped"])

    def _drop(self, record: RolloutRecord, reason: str) -> None:
        self.dropped[reason] += 1
        self._drops.append(Drop(record, reason))
        self._finished.put(record.rollout_id, None)


def _data_order(record: RolloutRecord) -> tuple[int, str]:
    return (record.order, record.rollout_id)

"""The sample buffer, which decides which received rollouts are trained next and which never.

It is a pure state machine over metadata (`RolloutRecord`); the tensors wait in the ModelWorkers.

Life of a record

    add ──▶ live ──take──▶ taken ──trained──▶ trained
      │       └──expired at take──▶ dropped: stale             (its prompt waits again)
      ├──▶ dropped: stale                                      (expired before it arrived)
      └──▶ a second copy of a known rollout id: freed at the worker that holds it, not counted

The gate has one live rollout of a prompt at most, and only records that it counts come here (`collector`).

The rule at consumption. The step that takes the policy from version v to v + 1 may train tokens of versions v - η to v.
Admission alone cannot guarantee this (a long rollout is overtaken by others), so `take(v)` drops what has expired.
Under `drop` and `wait` a record expires by its oldest token; under `mask` by its newest, and the batch's `min_version`
tells the workers which tokens carry no loss. A record without generated tokens never expires. Under `wait` the master
holds the step until no running rollout would expire; the check remains as a last safeguard.

The order (`take`) decides which live records a step takes. Those that could not wait for another step are taken before
all others, so no order loses a rollout that this step can train or trains a stale token. Within the batch the order is
the data order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from asyncrl.comm.ended_rollouts import DropReason, RecentIds, ids_remembered
from asyncrl.manager.messages import DroppedRollout
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
        self._eta, self._on_stale = eta, on_stale
        self._live: dict[str, RolloutRecord] = {}
        self._by_age: dict[int, dict[str, RolloutRecord]] = {}  # by the version that decides when they expire
        self._version = 0  # of the policy, as far as is known
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
            if self._expires(record, self._version):
                self._drop(record, DropReason.stale)
                continue
            self._live[record.rollout_id] = record
            if record.generated_tokens:
                self._by_age.setdefault(self._decisive(record), {})[record.rollout_id] = record
        return copies

    def expire(self, version: int) -> None:
        """Drop the live records that neither the step at `version` nor a later one may train.

        The cost of a call grows with the number of expired records, not with the number of live ones.
        """
        self._version = max(self._version, version)
        while self._by_age and version - (oldest := min(self._by_age)) > self._eta:
            for record in self._by_age.pop(oldest).values():
                del self._live[record.rollout_id]
                self._drop(record, DropReason.stale)

    def live(self) -> list[RolloutRecord]:
        """Return the live records."""
        return list(self._live.values())

    def take(self, version: int, ranks: Mapping[str, float] | None = None) -> TrainBatch | None:
        """Take the batch of the step at `version`; None while fewer than B live records are left after the expiry
        check.

        The order is the user's (`buffer.order.path`), then the oldest tokens first, then the data order. The oldest
        expire next, so this order loses the fewest as stale. `ranks` has the user's, by rollout id; records without a
        rank, which arrived later, come last.

        Example, η = 2, B = 2, version 3, no ranks: of live records with oldest versions {a: 3, b: 2, c: 0, d: 3} (data
        order a b c d), c is stale (3 - 0 > 2), b goes first, then a; d waits.
        """
        self.expire(version)
        if len(self._live) < self.batch_size:
            return None
        known = ranks or {}

        def turn(record: RolloutRecord) -> tuple[bool, float, int, int, str]:
            can_wait, rank = not self._expires(record, version + 1), known.get(record.rollout_id, inf)
            return can_wait, rank, record.oldest_version, *_data_order(record)

        chosen = sorted(self._live.values(), key=turn)[: self.batch_size]
        for record in chosen:
            self._taken[record.rollout_id] = self._live.pop(record.rollout_id)
            if record.generated_tokens:
                same_age = self._by_age[self._decisive(record)]
                del same_age[record.rollout_id]
                if not same_age:
                    del self._by_age[self._decisive(record)]
        return TrainBatch(version, max(0, version - self._eta), tuple(sorted(chosen, key=_data_order)))

    def mark_trained(self, batch: TrainBatch) -> None:
        """Record that the step of `batch` is complete; each of its records was taken once."""
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

    def _expires(self, record: RolloutRecord, version: int) -> bool:
        """True if the step at `version` may not train `record`."""
        return bool(record.generated_tokens) and version - self._decisive(record) > self._eta

    def _decisive(self, record: RolloutRecord) -> int:
        """Return the version of the token whose age decides when the record expires."""
        return record.newest_version if self._on_stale == OnStale.mask else record.oldest_version

    def _drop(self, record: RolloutRecord, reason: str) -> None:
        self.dropped[reason] += 1
        self._drops.append(Drop(record, reason))
        self._finished.put(record.rollout_id, None)


def _data_order(record: RolloutRecord) -> tuple[int, str]:
    return (record.order, record.rollout_id)

"""Live records of the sample buffer, and when each expires.

The step that takes the policy from version v to v + 1 may train tokens of versions v - η to v. Under `drop` and `wait`
a record expires by its oldest token. Under `mask` it expires by its newest, as older tokens carry no loss. A record
without generated tokens never expires.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord


class LiveRecords:
    """Records by rollout id. None of them is expired at the newest version that `expire` was called with.

    Args:
        eta: largest allowed age of a trained token, in versions.
        on_stale: treatment of records beyond `eta`.
    """

    def __init__(self, eta: int, on_stale: OnStale) -> None:
        self.eta, self._on_stale = eta, on_stale
        self._records: dict[str, RolloutRecord] = {}
        self._by_age: dict[int, dict[str, RolloutRecord]] = {}  # by the version that decides when they expire
        self._version = 0  # of the policy, as far as is known

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RolloutRecord]:
        return iter(self._records.values())

    def get(self, rollout_id: str) -> RolloutRecord | None:
        """Return the record of this rollout; None if it is not live."""
        return self._records.get(rollout_id)

    def add(self, record: RolloutRecord) -> bool:
        """Add `record`; return False, without adding it, if it has expired."""
        if self.expires(record, self._version):
            return False
        self._records[record.rollout_id] = record
        if record.generated_tokens:
            self._by_age.setdefault(self._decisive(record), {})[record.rollout_id] = record
        return True

    def pop(self, rollout_id: str) -> RolloutRecord:
        """Remove the record of this rollout, and return it."""
        record = self._records.pop(rollout_id)
        if record.generated_tokens:
            same_age = self._by_age[self._decisive(record)]
            del same_age[rollout_id]
            if not same_age:
                del self._by_age[self._decisive(record)]
        return record

    def expire(self, version: int) -> list[RolloutRecord]:
        """Remove and return the records that neither the step at `version` nor a later one may train.

        The cost of a call grows with the number of expired records, not with the number of live ones.
        """
        self._version = max(self._version, version)
        expired: list[RolloutRecord] = []
        while self._by_age and version - (oldest := min(self._by_age)) > self.eta:
            expired += self._by_age.pop(oldest).values()
        for record in expired:
            del self._records[record.rollout_id]
        return expired

    def expires(self, record: RolloutRecord, version: int) -> bool:
        """True if the step at `version` may not train `record`."""
        return bool(record.generated_tokens) and version - self._decisive(record) > self.eta

    def _decisive(self, record: RolloutRecord) -> int:
        """Return the version of the token whose age decides when the record expires."""
        return record.newest_version if self._on_stale == OnStale.mask else record.oldest_version

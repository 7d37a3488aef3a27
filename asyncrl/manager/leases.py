"""Leases of the workers: which of them have called recently."""

from __future__ import annotations


class WorkerLeases:
    """A worker's lease is renewed by every call it makes and runs out after `lease_s` of silence.

    Pure state: the caller brings the clock, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._called_at: dict[str, float] = {}

    @property
    def workers(self) -> list[str]:
        """Every worker whose lease has not run out."""
        return list(self._called_at)

    def renew(self, worker: str, now: float) -> None:
        """`worker` is alive at `now`."""
        self._called_at[worker] = now

    def keep(self, worker: str, now: float) -> bool:
        """A call of `worker` is held, and looks again: it is alive, unless its lease has ended since; whether not."""
        if worker not in self._called_at:
            return False
        self._called_at[worker] = now
        return True

    def expired(self, now: float) -> list[str]:
        """Workers whose lease has run out; each is named once, until it calls again."""
        late = [worker for worker, called_at in self._called_at.items() if now - called_at > self._lease_s]
        for worker in late:
            del self._called_at[worker]
        return late

    def end(self, worker: str) -> None:
        """`worker` is known to be dead."""
        self._called_at.pop(worker, None)

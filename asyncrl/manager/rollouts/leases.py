"""Leases of the workers: which of them have called recently."""

from __future__ import annotations


class WorkerLeases:
    """A worker's lease is renewed by every call it makes and runs out after `lease_s` of silence.

    Pure state: the caller passes the time, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._called_at: dict[str, float] = {}

    @property
    def workers(self) -> list[str]:
        """Workers whose lease has not run out."""
        return list(self._called_at)

    def renew(self, worker: str, now: float) -> None:
        """Record that `worker` called at `now`."""
        self._called_at[worker] = now

    def keep(self, worker: str, now: float) -> bool:
        """Renew the lease of a worker whose call is held; return False if the lease has ended meanwhile."""
        if worker not in self._called_at:
            return False
        self._called_at[worker] = now
        return True

    def expired(self, now: float) -> list[str]:
        """Return workers whose lease has run out; each is returned once, until it calls again."""
        late = [worker for worker, called_at in self._called_at.items() if now - called_at > self._lease_s]
        for worker in late:
            del self._called_at[worker]
        return late

    def end(self, worker: str) -> None:
        """End the lease of a dead worker."""
        self._called_at.pop(worker, None)

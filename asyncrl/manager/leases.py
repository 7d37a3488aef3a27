"""Which workers are alive, by when they were last heard of. Pure state: the caller brings the clock, in seconds."""

from __future__ import annotations


class WorkerLeases:
    """A worker's lease is renewed by every call it makes and runs out after `lease_s` of silence."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[str, float] = {}

    @property
    def workers(self) -> list[str]:
        """Every worker whose lease has not run out."""
        return list(self._heard)

    def renew(self, worker: str, now: float) -> None:
        """`worker` is alive at `now`."""
        self._heard[worker] = now

    def expired(self, now: float) -> list[str]:
        """Workers whose lease has run out; each is named once, until it is heard of again."""
        late = [worker for worker, heard in self._heard.items() if now - heard > self._lease_s]
        for worker in late:
            del self._heard[worker]
        return late

    def end(self, worker: str) -> bool:
        """`worker` is known to be dead; whether it had a lease."""
        return self._heard.pop(worker, None) is not None

"""Live rollouts of the staleness gate: by id, by worker, and counted by version of admission. Pure state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RolloutTicket(NamedTuple):
    """One rollout. `owner` is the worker that runs it; the other fields name its prompt and try."""

    rollout_id: str
    owner: str
    prompt_id: str = ""
    order: int = 0
    attempt: int = 0
    failures: int = 0


@dataclass(slots=True)
class LiveRollout:
    """A rollout that was admitted at `version`, and runs or is `finished`."""

    ticket: RolloutTicket
    version: int
    finished: bool = False


class LiveRollouts:
    """Indices and counts of the rollouts that joined and have not parted.

    Every method takes time independent of the number of rollouts, except for those that it returns, and `running_at`.

    Attributes:
        running_count: number of running rollouts.
    """

    def __init__(self) -> None:
        self.running_count = 0
        self._by_id: dict[str, LiveRollout] = {}
        self._by_owner: dict[str, dict[str, LiveRollout]] = {}
        self._running_at: Counter[int] = Counter()  # by the version of admission
        self._finished_at: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def get(self, rollout_id: str) -> LiveRollout | None:
        """Return the rollout; None if it is not live."""
        return self._by_id.get(rollout_id)

    def ticket(self, rollout_id: str) -> RolloutTicket | None:
        """Return the ticket of a live rollout; None for any other."""
        live = self._by_id.get(rollout_id)
        return None if live is None else live.ticket

    def running(self, rollout_id: str) -> RolloutTicket | None:
        """Return the ticket of a running rollout; None for any other."""
        live = self._by_id.get(rollout_id)
        return None if live is None or live.finished else live.ticket

    @property
    def owners(self) -> set[str]:
        """Workers that have live rollouts."""
        return set(self._by_owner)

    def running_of(self, owner: str) -> list[str]:
        """Return the rollouts that run on worker `owner`."""
        return [key for key, live in self._by_owner.get(owner, {}).items() if not live.finished]

    def prompts_of(self, owner: str) -> list[str]:
        """Return the prompts of the rollouts that run on worker `owner`."""
        return [live.ticket.prompt_id for live in self._by_owner.get(owner, {}).values() if not live.finished]

    def by_version(self) -> list[tuple[int, int, int]]:
        """Return each version of admission, ascending, with the numbers of its running and its finished rollouts."""
        versions = sorted(self._running_at.keys() | self._finished_at.keys())
        return [(version, self._running_at[version], self._finished_at[version]) for version in versions]

    def running_at(self, versions: Collection[int]) -> list[str]:
        """Return the running rollouts that were admitted at these versions, oldest first. Looks at all rollouts."""
        found = [live for live in self._by_id.values() if not live.finished and live.version in versions]
        return [live.ticket.rollout_id for live in sorted(found, key=lambda live: live.version)]

    def join(self, live: LiveRollout) -> None:
        """Add a rollout."""
        ticket = live.ticket
        self._by_id[ticket.rollout_id] = live
        self._by_owner.setdefault(ticket.owner, {})[ticket.rollout_id] = live
        self._count(live)

    def finish(self, live: LiveRollout) -> None:
        """Record that a running rollout is finished."""
        self._uncount(live)
        live.finished = True
        self._count(live)

    def part(self, rollout_id: str) -> LiveRollout | None:
        """Remove a rollout, and return it; None if it is not live."""
        live = self._by_id.pop(rollout_id, None)
        if live is None:
            return None
        of_owner = self._by_owner[live.ticket.owner]
        del of_owner[rollout_id]
        if not of_owner:
            del self._by_owner[live.ticket.owner]
        self._uncount(live)
        return live

    def _count(self, live: LiveRollout) -> None:
        self._counts_of(live)[live.version] += 1
        self.running_count += not live.finished

    def _uncount(self, live: LiveRollout) -> None:
        counts = self._counts_of(live)
        counts[live.version] -= 1
        if not counts[live.version]:
            del counts[live.version]
        self.running_count -= not live.finished

    def _counts_of(self, live: LiveRollout) -> Counter[int]:
        """Return the counts, by version of admission, that a rollout of this state belongs to."""
        return self._finished_at if live.finished else self._running_at

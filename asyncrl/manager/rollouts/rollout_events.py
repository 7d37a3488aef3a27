"""Numbered lines of facts that only the manager sees, kept until the master has recorded them.

The master acknowledges the last number that it has recorded, so a lost reply loses no line. Lines about rollouts reach
the run's ledger this way, in the same reply as the counters, so the two agree. Measured success rates reach the
master's checkpoints.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from asyncrl.comm.ended_rollouts.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes, RolloutLine
from asyncrl.manager.rollouts.live_rollouts import RolloutTicket

T = TypeVar("T")


def first_number(manager: int) -> int:
    """Return the number above which the numbers of this manager begin: above all that its predecessors gave out."""
    return manager << 40


class NumberedLog(Generic[T]):
    """A queue with acknowledgement. Pure state, bounded by what arrives between two reports of the master.

    Args:
        after: numbers begin above this; a new manager must begin above the numbers of its predecessor.
    """

    def __init__(self, after: int) -> None:
        self.last_seq = after
        self._entries: deque[T] = deque()

    @property
    def unrecorded(self) -> list[T]:
        """Return the entries that the master may not know yet, in order; the last has number `last_seq`."""
        return list(self._entries)

    def add(self, entry: T) -> None:
        """Give `entry` the next number."""
        self.last_seq += 1
        self._entries.append(entry)

    def forget(self, seq: int) -> None:
        """Remove the entries with numbers up to `seq`, which the master has recorded."""
        while self._entries and self.last_seq - len(self._entries) < seq:
            self._entries.popleft()


class RolloutEvents(NumberedLog[RolloutLine]):
    """The ledger's lines about rollouts.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, after: int = 0, now: Callable[[], float] = time.time) -> None:
        super().__init__(after)
        self._now = now

    def admitted(self, ticket: RolloutTicket, version: int, *, adopted: bool = False) -> None:
        """Add that the gate, or an earlier manager's if `adopted`, admitted the rollout while `version` was served."""
        head = (ticket.rollout_id, ticket.prompt_id, ticket.order, ticket.attempt, ticket.owner, version)
        self.add(Admitted(*head, self._at(), ticket.failures, adopted))

    def finished(self, rollout_id: str, tokens: int) -> None:
        """Add that the trainer has the rollout."""
        self.add(Finished(rollout_id, tokens, self._at()))

    def dropped(
        self, rollout_id: str, reason: str, prompt: PromptGoes, attempt: int | None = None, failures: int = 0
    ) -> None:
        """Add that the rollout left the count for `reason`. A returned prompt is tried again with this `attempt`."""
        again = (attempt, failures) if prompt is PromptGoes.returned else ()
        self.add(Dropped(rollout_id, reason, prompt, self._at(), *again))

    def abandoned(self, rollout_id: str) -> None:
        """Add that the run ended before the rollout did."""
        self.add(Abandoned(rollout_id, self._at()))

    def _at(self) -> float:
        return round(self._now(), 3)

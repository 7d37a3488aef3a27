"""What became of rollouts, on its way to the master, which writes it into the run's ledger.

Each line gets a number. The master asks for those after the last number it saw, in the same call that brings the books,
so that the two agree: a lost reply loses none, and what it has seen is forgotten here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from asyncrl.comm.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes, RolloutLine
from asyncrl.manager.staleness_gate import Ticket


class EventsState(Struct, frozen=True):
    """What `RolloutEvents` holds."""

    last_seq: int
    lines: list[RolloutLine]


class RolloutEvents:
    """See the module's docstring. Bounded by what happens between two reports of the master.

    Args:
        after: numbers begin above this; a manager that is restarted must not begin below what its predecessor gave out.
        now: seconds since 1970.
    """

    def __init__(self, after: int = 0, now: Callable[[], float] = time.time) -> None:
        self.last_seq = after
        self._now = now
        self._lines: deque[RolloutLine] = deque()

    def admitted(self, ticket: Ticket, version: int) -> None:
        """The gate let the rollout start while `version` was served."""
        prompt, order, attempt = ticket.prompt_id, ticket.order, ticket.attempt
        self._add(Admitted(ticket.rollout_id, prompt, order, attempt, ticket.owner, version, self._at()))

    def finished(self, rollout_id: str, tokens: int) -> None:
        """The trainer has the rollout, also if it was given up before."""
        self._add(Finished(rollout_id, tokens, self._at()))

    def dropped(
        self, rollout_id: str, reason: str, prompt: PromptGoes, attempt: int | None = None, failures: int = 0
    ) -> None:
        """The rollout left the count for `reason`; a prompt that is returned is tried again as its `attempt`."""
        again = (attempt, failures) if prompt is PromptGoes.returned else ()
        self._add(Dropped(rollout_id, reason, prompt, self._at(), *again))

    def abandoned(self, rollout_id: str) -> None:
        """The run ends before the rollout does."""
        self._add(Abandoned(rollout_id, self._at()))

    @property
    def untold(self) -> list[RolloutLine]:
        """The lines that the master may not have written yet, in order; the last has number `last_seq`."""
        return list(self._lines)

    def forget(self, seq: int) -> None:
        """The master has written the lines with numbers up to `seq`."""
        while self._lines and self.last_seq - len(self._lines) < seq:
            self._lines.popleft()

    def begin_above(self, seq: int) -> None:
        """Numbers begin above `seq`; nothing happened yet."""
        self.last_seq = seq

    def state(self) -> EventsState:
        """All there is; `restore` takes it."""
        return EventsState(self.last_seq, list(self._lines))

    def restore(self, state: EventsState) -> None:
        """Be as `state` says."""
        self.last_seq, self._lines = state.last_seq, deque(state.lines)

    def _add(self, line: RolloutLine) -> None:
        self.last_seq += 1
        self._lines.append(line)

    def _at(self) -> float:
        return round(self._now(), 3)

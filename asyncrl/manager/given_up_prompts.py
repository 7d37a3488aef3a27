"""Prompts that RolloutWorkers dropped for good, on their way to the master, which records them as used.

A worker gives a prompt up when it failed too often, makes no prompt, took too long, or was rejected by a filter or its
agent without being given back. Only the manager hears of that. Each gets a number; the master asks for those after the
last number it saw, so a lost reply loses none, and what it has seen is forgotten here.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct


class GivenUpState(Struct, frozen=True):
    """What `GivenUpPrompts` holds."""

    last_seq: int
    prompts: list[str]


class GivenUpPrompts:
    """See the module's docstring. Pure state; bounded by what is given up between two reports of the master.

    Args:
        after: numbers begin above this; a manager that is restarted must not begin below what its predecessor gave out.
    """

    def __init__(self, after: int = 0) -> None:
        self.last_seq = after
        self._prompts: deque[str] = deque()

    @property
    def unrecorded(self) -> list[str]:
        """Those that the master may not know yet."""
        return list(self._prompts)

    def begin_above(self, seq: int) -> None:
        """Numbers begin above `seq`; nothing was given up yet."""
        self.last_seq = seq

    def state(self) -> GivenUpState:
        """All there is; `restore` takes it."""
        return GivenUpState(self.last_seq, list(self._prompts))

    def restore(self, state: GivenUpState) -> None:
        """Be as `state` says."""
        self.last_seq, self._prompts = state.last_seq, deque(state.prompts)

    def add(self, prompt_id: str) -> None:
        """`prompt_id` will not be tried again."""
        self.last_seq += 1
        self._prompts.append(prompt_id)

    def forget(self, seq: int) -> None:
        """The master has recorded the prompts with numbers up to `seq`."""
        while self._prompts and self.last_seq - len(self._prompts) < seq:
            self._prompts.popleft()

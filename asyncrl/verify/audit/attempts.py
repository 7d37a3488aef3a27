"""The rules of attempts: a prompt is used at most once, and its attempts are numbered by the rollouts before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted


class PromptAttempts:
    """Attempts at each prompt of a ledger's history, and how the prompt was used.

    Args:
        report: called with an error in the current line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._used: dict[str, str] = {}  # trained, or dropped for good: by prompt where that is written
        self._put_off: set[str] = set()  # prompts whose next attempt is to come after the rest of their epoch
        self._attempts: Counter[str] = Counter()  # rollouts of a prompt

    def settled(self) -> list[str]:
        """Return the prompts that the launch which begins now need not run in their place."""
        return [*self._used, *self._put_off]

    def admit(self, line: Admitted) -> None:
        """Count an attempt."""
        if line.adopted:  # what was before it may have died with a manager
            self._attempts[line.prompt] = max(self._attempts[line.prompt], line.attempt)
        before_it = self._attempts[line.prompt]
        if not 0 <= line.attempt <= before_it:
            self._report(f"rollout {line.rollout} is attempt {line.attempt} at a prompt that had {before_it} before")
        self._attempts[line.prompt] += 1
        self._put_off.discard(line.prompt)

    def put_off(self, prompt: str) -> None:
        """Count on a later attempt, which may come after the rest of the epoch."""
        self._put_off.add(prompt)

    def use(self, prompt: str, how: str, place: str) -> bool:
        """Count the prompt as used at `place`; return False if it was used before."""
        if prompt in self._used:
            self._report(f"prompt {prompt} is {how}, and was {self._used[prompt]}")
            return False
        self._used[prompt] = f"{how} ({place})"
        return True

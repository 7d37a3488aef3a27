"""The rules of attempts: a prompt is used at most once, and the number of its attempts follows from its earlier
rollouts.
"""

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
        self._used: dict[str, str] = {}  # by prompt, the place of the line that trained it or dropped it for good
        self._put_off: set[str] = set()  # prompts whose next attempt comes after the rest of their epoch
        self._attempts: Counter[str] = Counter()  # rollouts of a prompt

    def settled(self) -> list[str]:
        """Return the prompts that a launch that begins now need not run at their place in the order."""
        return [*self._used, *self._put_off]

    def admit(self, line: Admitted) -> None:
        """Count an attempt."""
        if line.adopted:  # lines about earlier attempts may be lost with a manager
            self._attempts[line.prompt] = max(self._attempts[line.prompt], line.attempt)
        before_it = self._attempts[line.prompt]
        if not 0 <= line.attempt <= before_it:
            self._report(f"rollout {line.rollout} is attempt {line.attempt} at a prompt that had {before_it} before")
        self._attempts[line.prompt] += 1
        self._put_off.discard(line.prompt)

    def put_off(self, prompt: str) -> None:
        """Expect a later attempt of the prompt, which may come after the rest of the epoch."""
        self._put_off.add(prompt)

    def use(self, prompt: str, how: str, place: str) -> bool:
        """Count the prompt as used at `place`; return False if it was used before."""
        if prompt in self._used:
            self._report(f"prompt {prompt} is {how}, and was {self._used[prompt]}")
            return False
        self._used[prompt] = f"{how} ({place})"
        return True

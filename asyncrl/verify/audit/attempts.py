"""The rules of prompts: a prompt has one live rollout at most, is used at most once and not run after that, and the
number of an attempt follows from the earlier ones.
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
        self._live: dict[str, str] = {}  # by prompt, its live rollout
        self._put_off: set[str] = set()  # prompts that had a later attempt, which comes after the rest of their epoch
        self._attempts: Counter[str] = Counter()  # rollouts of a prompt

    def begin(self) -> list[str]:
        """Begin a lineage without live rollouts.

        Returns:
            The prompts that it need not run at their place in the order.
        """
        self._live.clear()
        return [*self._used, *self._put_off]

    def admit(self, line: Admitted) -> None:
        """Count an attempt."""
        if (how := self._used.get(line.prompt)) is not None:
            self._report(f"rollout {line.rollout} was admitted, and its prompt {line.prompt} was {how}")
        if (other := self._live.setdefault(line.prompt, line.rollout)) != line.rollout:
            self._report(f"rollout {line.rollout} was admitted, and rollout {other} of prompt {line.prompt} is live")
        if line.adopted:  # lines about earlier attempts may be ruled out, or lost with a manager
            self._attempts[line.prompt] = max(self._attempts[line.prompt], line.attempt)
        before_it = self._attempts[line.prompt]
        if not 0 <= line.attempt <= before_it:
            self._report(f"rollout {line.rollout} is attempt {line.attempt} at a prompt that had {before_it} before")
        self._attempts[line.prompt] += 1
        if line.attempt:
            self._put_off.add(line.prompt)

    def end(self, prompt: str, rollout_id: str) -> None:
        """Record that the rollout of the prompt is no longer live."""
        if self._live.get(prompt) == rollout_id:
            del self._live[prompt]

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

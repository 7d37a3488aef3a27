"""Detect steps from which the policy learns nothing, because the rewards do not distinguish answers.

Group advantages compare the answers to one prompt. If all rewards of each group are equal, every advantage is 0 and the
policy's gradient too. If every reward of the step is the same number, a critic has nothing to learn from either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAT_STEPS = 3
"""Consecutive steps that cause a warning: a single small batch may be all right or all wrong by chance."""
ADVICE = "look at the reward function, at how hard the prompts are, and at group_size"
_ZERO = 1e-6


def is_flat(row: Mapping[str, Any]) -> bool:
    """True if nothing can be learnt from the rewards of the step with this row of metrics."""
    if row.get("reward/frac_zero_std") != 1.0:
        return False
    return is_constant(row) or abs(row.get("advantage/abs_mean", 0.0)) < _ZERO


def is_constant(row: Mapping[str, Any]) -> bool:
    """True if all rewards of the step are the same number."""
    return bool(row.get("reward/std") == 0.0)


class FlatSteps:
    """Counts the steps from which nothing can be learnt, in the order of the rows."""

    def __init__(self) -> None:
        self.count = self.constant = self.steps = 0
        self._in_a_row = 0
        self._warned = False

    def take(self, row: Mapping[str, Any]) -> str | None:
        """Add a row. Return the warning, once, after `FLAT_STEPS` consecutive steps of this kind."""
        if "reward/mean" not in row:  # step 0: evaluations alone
            return None
        self.steps += 1
        self._in_a_row = self._in_a_row + 1 if is_flat(row) else 0
        self.count += self._in_a_row > 0
        self.constant += self._in_a_row > 0 and is_constant(row)
        if self._warned or self._in_a_row < FLAT_STEPS:
            return None
        self._warned = True
        what = f"are all {row['reward/mean']:g}" if is_constant(row) else "are equal within each group"
        return f"WARNING: the rewards of the last {FLAT_STEPS} steps {what}, so nothing is learnt from them; {ADVICE}"

    def summary(self) -> str | None:
        """Return a line for the summary; None if every step had something to learn."""
        if not self.count:
            return None
        equal = "all their rewards" if self.constant == self.count else "all rewards of each group"
        advice = ADVICE if 2 * self.count > self.steps else "their prompts were all too easy or too hard"
        return f"nothing was learnt from {self.count} of {self.steps} steps: {equal} were equal; {advice}"

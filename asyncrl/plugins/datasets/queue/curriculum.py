"""Curriculum by measured success: prompts that are too easy or too hard now are left out of some epochs.

Mechanism. Each rollout measures the success of its prompt: the share of the group's answers that are right. A row whose
newest measurement, of epoch m, lies outside `low` to `high` rests in the epochs m + 1 to m + `rest`: its prompt is
dropped for good as `curriculum` when its turn comes, without a rollout. In epoch m + rest + 1 it is drawn and measured
again. So a row that stays outside is drawn once in `rest` + 1 epochs.

Which prompts rest depends on the measurements alone, so that a run that is continued with those of its checkpoint goes
on as it would have. A measurement that comes after the row's turn in a later epoch (a dataset of no more rows than
there are rollouts under way) counts from the epoch after that.

Example, low 0.1, high 0.9, rest 2: a row with success 1.0 in epoch 0 rests in 1 and 2; measured 0.5 in epoch 3, it is
drawn in epoch 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.plugins.datasets.queue.used_prompts import parse_prompt_id


class Curriculum:
    """See the module's docstring. Pure state.

    Args:
        low, high: the success that keeps a row in every epoch, both included.
        rest: epochs in which a row outside is left out.
        state: of an earlier one, what `state` returned.
    """

    def __init__(self, low: float, high: float, rest: int, state: Iterable[Sequence[float]] = ()) -> None:
        self._low, self._high, self._rest = low, high, rest
        self._newest: dict[int, tuple[int, float]] = {
            int(row): (int(epoch), float(success)) for row, epoch, success in state
        }

    def measured(self, prompt_id: str, success: float) -> None:
        """A rollout of `prompt_id` had `success`, 0 to 1. An older epoch's does not replace a newer one's."""
        parsed = parse_prompt_id(prompt_id)
        if parsed is None:  # of a stream of the user's own, whose rows have no epochs
            return
        epoch, row = parsed
        if row not in self._newest or self._newest[row][0] <= epoch:
            self._newest[row] = (epoch, success)

    def rests(self, prompt_id: str) -> bool:
        """True if `prompt_id` is left out of its epoch."""
        parsed = parse_prompt_id(prompt_id)
        if parsed is None or (newest := self._newest.get(parsed[1])) is None:
            return False
        epoch, success = newest
        return not self._low <= success <= self._high and epoch < parsed[0] <= epoch + self._rest

    def state(self) -> list[tuple[int, int, float]]:
        """Row, epoch and success of the newest measurements, for JSON."""
        return [(row, epoch, success) for row, (epoch, success) in sorted(self._newest.items())]

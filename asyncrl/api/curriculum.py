"""Your own curriculum, which leaves rows out of some epochs: a class named in `dataset.curriculum.path`."""

from __future__ import annotations

from typing import Any, Protocol


class Curriculum(Protocol):
    """Decide from measured success rates which rows are left out of an epoch.

    The GserverManager and the MasterWorker each have their own object, and a resumed run makes new ones. So decisions
    must depend only on the measurements, not on their order or on repetitions.

    Methods must be quick: their processes wait for the answer. A call that takes longer than 10 s fails.
    """

    def measured(self, row: int, epoch: int, success: float) -> None:
        """Record that the share `success`, 0 to 1, of a group's answers to `row` was right in `epoch`.

        An answer is right if its reward is at least `dataset.curriculum.right_at`.
        """
        ...

    def rests(self, row: int, epoch: int) -> bool:
        """True if `row` is left out of `epoch`; called when the row would be played."""
        ...

    def state(self) -> Any:
        """Return all that `restore` needs, as plain data for JSON; every checkpoint holds it."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from `state`, the result of an earlier `state()`."""
        ...

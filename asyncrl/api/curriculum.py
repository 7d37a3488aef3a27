"""A curriculum of your own, which leaves rows out of some epochs: a class named in `dataset.curriculum.path`."""

from __future__ import annotations

from typing import Any, Protocol


class Curriculum(Protocol):
    """Decides by what was measured which rows are left out of an epoch.

    The GserverManager and the MasterWorker each have one, and a run that is resumed has others. So decisions follow
    from the measurements alone, in whatever order they come and however often one is repeated. Methods are quick.
    """

    def measured(self, row: int, epoch: int, success: float) -> None:
        """In `epoch` the share `success`, 0 to 1, of a group's answers to `row` was right (`curriculum.right_at`)."""
        ...

    def rests(self, row: int, epoch: int) -> bool:
        """True if `row` is left out of `epoch`; asked when its turn comes."""
        ...

    def state(self) -> Any:
        """All that `restore` needs, as plain data for JSON; it is in every checkpoint."""
        ...

    def restore(self, state: Any) -> None:
        """Become the one that gave `state`."""
        ...

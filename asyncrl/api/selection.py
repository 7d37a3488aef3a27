"""Your own selection: which queued rollouts are trained first (a function named in `buffer.order.path`), and which rows
an epoch leaves out (a class named in `dataset.curriculum.path`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ReadyRollout:
    """A finished rollout in the queue for training.

    Attributes:
        prompt_id: the prompt's name in its epoch, `e<epoch>-<row>`.
        order: its position in the data order.
        age: number of versions from the group's oldest token to the current policy.
        rewards: reward of each sample, shaping included.
        generated: number of tokens that the policy generated, for each sample.
        truncated: True for each sample that a length limit cut off.
        metrics: the rollout's own numbers, for example times and rewards by name.
    """

    prompt_id: str
    order: int
    age: int
    rewards: tuple[float, ...]
    generated: tuple[int, ...]
    truncated: tuple[bool, ...]
    metrics: Mapping[str, float]


class BufferOrder(Protocol):
    """Rank queued rollouts.

    A function, or a class from which one object is made with `buffer.order.args`. A thread of the MasterWorker calls it
    for each queued rollout before every step; `buffer.order.timeout_s` limits all calls of a step together.

    An object may also have these methods. `trained(rollouts)` receives the rollouts that a step takes. `state()`
    returns plain data for JSON, which every checkpoint holds, and `restore(state)` takes the data back when a run
    resumes.
    """

    def __call__(self, rollout: ReadyRollout) -> float:
        """Return the rank of `rollout`, a finite number. Lower ranks are trained first."""
        ...


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

    def skips(self, row: int, epoch: int) -> bool:
        """True if `row` is left out of `epoch`; called when the row would be played."""
        ...

    def state(self) -> Any:
        """Return all that `restore` needs, as plain data for JSON; every checkpoint holds it."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from `state`, the result of an earlier `state()`."""
        ...

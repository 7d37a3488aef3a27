"""The order in which queued rollouts are trained, given by a function named in `buffer.order.path`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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

"""The order in which finished rollouts are trained, where several wait: a function named in `buffer.order.path`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadyRollout:
    """A finished rollout that waits to be trained.

    Attributes:
        prompt_id: the prompt's name in its epoch, `e<epoch>-<row>`.
        order: its position in the data order.
        age: versions between the policy and the group's oldest token.
        rewards: of each sample, shaping included.
        generated: tokens that the policy wrote, of each sample.
        truncated: whether each was cut off.
        metrics: the rollout's own numbers: times, rewards by name.
    """

    prompt_id: str
    order: int
    age: int
    rewards: tuple[float, ...]
    generated: tuple[int, ...]
    truncated: tuple[bool, ...]
    metrics: Mapping[str, float]


class BufferOrder(Protocol):
    """Ranks waiting rollouts. It runs in a thread of the MasterWorker before each step, for each of them:
    `buffer.order.timeout_s` is the limit of all together.

    A function, or a class, of which one object is made with `buffer.order.args`. That may have two more pairs of eyes:
    `trained(rollouts)` is told which ones a step takes; `state()` and `restore(state)`, plain data for JSON, go with
    every checkpoint, so that a run that is resumed goes on with what the object knew after the step it resumes at.
    """

    def __call__(self, rollout: ReadyRollout) -> float:
        """The rank of `rollout`, a finite number: the least are trained first, of equals the oldest."""
        ...

"""A step's trajectories by trained policy: each trains on its own samples, in minibatches of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl.api.trajectory import Trajectory, policy_of


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """The rollouts with samples of `policy`, in canonical order, these samples alone, and the minibatches of each."""

    policy: str
    trajectories: Sequence[Trajectory]
    minibatches: Sequence[Sequence[int]]


def parts_of_policies(
    trajectories: Sequence[Trajectory], minibatches: Sequence[Sequence[int]], policies: Sequence[str]
) -> Iterator[PolicyPart]:
    """Yield the part of each policy, that of the run's own first.

    Args:
        minibatches: of each rollout, those of the run's own policy in each pass, then those of each further one.
        policies: that are trained beside the run's own.
    """
    if not policies:
        yield PolicyPart("", trajectories, minibatches)
        return
    for number, policy in enumerate(("", *policies)):
        kept: list[Trajectory] = []
        dealt: list[Sequence[int]] = []
        for trajectory, steps in zip(trajectories, minibatches, strict=True):
            own = [sample for sample in trajectory.columns if policy_of(sample.group, policies) == policy]
            if own:
                passes = len(steps) // (1 + len(policies))
                kept.append(replace(trajectory, samples=own))
                dealt.append(steps[number * passes : (number + 1) * passes])
        yield PolicyPart(policy, kept, dealt)

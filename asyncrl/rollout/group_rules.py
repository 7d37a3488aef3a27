"""Optional: rules for a group that was played (`rollout.filters`, `rollout.shaping`, `dataset.curriculum`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from asyncrl.algorithms.filters import FilterDecision, GroupView
from asyncrl.api import Sample
from asyncrl.api.columns import numbers_of
from asyncrl.api.trajectory import compared_episodes, named_columns
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.rollout.settings import RolloutConfig

Filter = Callable[[GroupView], FilterDecision]
Shaping = Callable[[GroupView], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Filters, shaping of rewards, and which answers are right.

    Attributes:
        filters: a group is dropped if one rejects it.
        shapings: change rewards in this order, separately in each comparison group.
        right_at: reward from which on an answer counts as right, for a curriculum; None without one.
    """

    filters: Sequence[Filter] = ()
    shapings: Sequence[Shaping] = ()
    right_at: float | None = None

    @classmethod
    def of(cls, config: RolloutConfig, registered_in: Sequence[str] = (), right_at: float | None = None) -> Self:
        """Build the rules of these settings."""
        filters, shapings = (
            [resolve(kind, choice.name, choice.params, registered_in) for choice in choices]
            for kind, choices in (("filter", config.filters), ("shaping", config.shaping))
        )
        return cls(filters, shapings, right_at)

    def judge(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return a decision to keep if the filters keep any comparison group, else the first group's rejection."""
        decisions = [self._judge_group([samples[at] for at in positions]) for positions in compared(samples)]
        return next((decision for decision in decisions if decision.keep), decisions[0])

    def _judge_group(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return the first rejection, or a decision to keep."""
        view, _ = view_of(samples)
        rejections = (decision for accept in self.filters if not (decision := accept(view)).keep)
        return next(rejections, FilterDecision(True))

    def success(self, samples: Sequence[Sample]) -> float | None:
        """Return the share of samples that count as right, by all their rewards; None without a curriculum."""
        if self.right_at is None:
            return None
        return sum(sample.total_reward >= self.right_at for sample in samples) / len(samples)

    def shape(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Apply the shapings to the rewards. The change of an episode's reward is added to each of its samples.

        Raises:
            ValueError: a shaping does not return one reward for each episode.
        """
        shaped = list(samples)
        for positions in compared(samples):
            group = self._shape_group([samples[at] for at in positions])
            for at, sample in zip(positions, group, strict=True):
                shaped[at] = sample
        return tuple(shaped)

    def _shape_group(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        for reshape in self.shapings:
            view, positions = view_of(samples)
            rewards = reshape(view)
            if len(rewards) != len(view.rewards_S):
                raise ValueError(
                    f"a shaping gave {len(rewards)} rewards for {len(view.rewards_S)} episodes; give one each"
                )
            alone = len(samples) == len(rewards)
            samples = [
                replace(sample, reward=_shaped(sample, float(rewards[at]), float(view.rewards_S[at]), alone=alone))
                for sample, at in zip(samples, positions, strict=True)
            ]
        return samples


def compared(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the positions of the samples of each comparison group, in order of first appearance."""
    by_name: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        by_name.setdefault(sample.group, []).append(position)
    return list(by_name.values())


def view_of(samples: Sequence[Sample]) -> tuple[GroupView, list[int]]:
    """Build the view of one comparison group for filters and shaping: its episodes, and for each sample the position
    of its episode.
    """
    view, position = GroupView.of_samples(
        rewards=[sample.reward for sample in samples],
        token_rewards=[sample.token_rewards for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        truncated=[sample.truncated for sample in samples],
        episodes=compared_episodes([sample.episode for sample in samples], [sample.group for sample in samples]),
        columns=named_columns([numbers_of(sample) for sample in samples]),
    )
    return view, position.tolist()


def _shaped(sample: Sample, reward: float, before: float, *, alone: bool) -> float:
    """Return the sample's new reward after its episode's total changed from `before` to `reward`.

    The result is exactly `reward` if all episodes have one sample (`alone`) and the sample has no rewards of turns.
    """
    if alone and sample.token_rewards is None:
        return reward
    return sample.reward + (reward - before)

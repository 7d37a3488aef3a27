"""Filters and reward shaping, which RolloutWorkers run on a finished group. Numpy only.

Filters are `(GroupView, *, params) -> FilterDecision`, reward shaping is `(GroupView, *, params) -> rewards_S`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.algorithms.registry import filter_, shaping


@dataclass(frozen=True, eq=False)
class GroupView:
    """The finished episodes of one prompt: arrays of shape [S], one entry for each episode, in order of their numbers.

    This is all that a filter or a shaping sees: rewards, lengths and numbers by name, but no tokens, texts, pictures or
    versions. `of_samples` alone builds it, for RolloutWorkers and for the graph's call `filter`.

    An episode of several samples has the mean of their rewards (rewards of turns included), the sum of their lengths,
    in generated tokens, and is truncated if one of them is. `sample_rewards_U` holds the rewards of the samples
    themselves, in any order; without it, each episode is one sample. `turn_rewards_U` holds the rewards of each
    sample's turns (`rewards_of_turns`), in the same order.

    Raises:
        ValueError: the arrays differ in length or are empty.
    """

    rewards_S: NDArray[np.float64]
    lengths_S: NDArray[np.int64]
    truncated_S: NDArray[np.bool_]
    sample_rewards_U: NDArray[np.float64] | None = None
    turn_rewards_U: Sequence[tuple[float, ...]] | None = None
    columns_S: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Numbers by name: `reward/<part>`, `agent/<name>`, `row/<field>`; NaN for episodes without the number."""

    def __post_init__(self) -> None:
        shapes = {self.rewards_S.shape, self.lengths_S.shape, self.truncated_S.shape}
        if len(shapes) != 1 or self.rewards_S.ndim != 1 or self.rewards_S.size == 0:
            raise ValueError(f"GroupView arrays have shapes {sorted(shapes)}; give one value per episode, at least one")

    def values_S(self, on: str | None) -> NDArray[np.float64]:
        """Return the rewards, or the numbers of the column `on` if it is given.

        Raises:
            ValueError: an episode has no such number.
        """
        if on is None:
            return self.rewards_S
        found = self.columns_S.get(on)
        if found is None or np.isnan(found).any():
            raise ValueError(f"an episode has no {on!r}; there are {', '.join(self.columns_S) or 'none'}")
        return found

    @classmethod
    def of_samples(
        cls,
        *,
        rewards: Sequence[float],
        token_rewards: Sequence[NDArray[np.float32] | None],
        loss_masks: Sequence[ArrayLike],
        truncated: ArrayLike,
        episodes: ArrayLike,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> tuple[GroupView, NDArray[np.int64]]:
        """Return the view of a group of samples, and for each sample the position of its episode in the view.

        Args:
            rewards: reward of each sample without those of its turns; all others have one entry per sample, too.
            token_rewards: rewards of turns, shape [T]; None for a sample without them.
            loss_masks: nonzero at generated tokens, shape [T].
            columns: numbers by name; an episode has the mean over its samples with the number.
        """
        numbers, position, counts = np.unique(np.asarray(episodes), return_inverse=True, return_counts=True)
        rewards_S, lengths_S = np.zeros(len(numbers)), np.zeros(len(numbers), np.int64)
        truncated_S = np.zeros(len(numbers), np.bool_)
        of_turns_U = [0.0 if each_T is None else float(np.sum(each_T, dtype=np.float64)) for each_T in token_rewards]
        rewards_U = np.asarray(rewards, np.float64) + of_turns_U
        np.add.at(rewards_S, position, rewards_U)
        np.add.at(lengths_S, position, [np.count_nonzero(mask_T) for mask_T in loss_masks])
        np.logical_or.at(truncated_S, position, np.asarray(truncated, np.bool_))
        columns_S = {name: _means(np.asarray(own, np.float64), position) for name, own in (columns or {}).items()}
        turn_rewards_U = [rewards_of_turns(*each) for each in zip(rewards, token_rewards, loss_masks, strict=True)]
        view = cls(rewards_S / counts, lengths_S, truncated_S, rewards_U, turn_rewards_U, columns_S)
        return view, position.astype(np.int64)


def _means(values_U: NDArray[np.float64], position_U: NDArray[np.intp]) -> NDArray[np.float64]:
    there = ~np.isnan(values_U)
    sums, counts = np.zeros(int(position_U.max()) + 1), np.zeros(int(position_U.max()) + 1)
    np.add.at(sums, position_U[there], values_U[there])
    np.add.at(counts, position_U[there], 1.0)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def rewards_of_turns(reward: float, token_rewards_T: ArrayLike | None, loss_mask_T: ArrayLike) -> tuple[float, ...]:
    """Return the rewards of a sample's turns, each an unbroken run of policy tokens. The last turn has the sample's
    `reward`.

    Args:
        token_rewards_T: rewards of turns, shape [T].
        loss_mask_T: nonzero at policy tokens, shape [T].
    """
    mask_T = np.asarray(loss_mask_T).astype(bool)
    turn_T = np.cumsum(mask_T & ~np.concatenate(([False], mask_T[:-1]))) - 1
    rewards_K = np.zeros(int(turn_T[-1]) + 1 if mask_T.any() else 1)
    if token_rewards_T is not None:
        np.add.at(rewards_K, turn_T[mask_T], np.asarray(token_rewards_T, np.float64)[mask_T])
    rewards_K[-1] += reward
    return tuple(rewards_K.tolist())


@dataclass(frozen=True)
class FilterDecision:
    """Decision on a group: train it or not; if not, the counted reason, and if its prompt returns to the dataset."""

    keep: bool
    reason: str = ""
    return_prompt: bool = False


@filter_("success_rate")
def success_rate(
    group: GroupView,
    *,
    low: float = 0.0,
    high: float = 1.0,
    threshold: float = 0.5,
    return_prompt: bool = False,
    on: str | None = None,
) -> FilterDecision:
    """Keep a group whose share of rewards >= `threshold` lies in [low, high].

    `on` names a part of the reward or another number in place of the sum, `reward/correct` for one.

    A prompt that is too hard may return to the dataset for a better policy (`return_prompt`), one that is too easy may
    not.

    Raises:
        ValueError: not 0 <= low <= high <= 1, or an episode lacks what `on` names.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"success_rate bounds are [{low}, {high}]; set 0 <= low <= high <= 1")
    rate = float(np.mean(group.values_S(on) >= threshold))
    if rate < low:
        return FilterDecision(False, "too_hard", return_prompt)
    if rate > high:
        return FilterDecision(False, "too_easy")
    return FilterDecision(True)


@filter_("zero_variance")
def zero_variance(
    group: GroupView,
    *,
    tolerance: float = 1e-8,
    return_prompt: bool = False,
    turns: bool = False,
    on: str | None = None,
) -> FilterDecision:
    """Drop a group whose samples' rewards differ by at most `tolerance`: its group-relative advantages are all 0.

    DAPO's dynamic sampling (arXiv:2503.14476) eq. 11. A group of one episode is dropped too. Episodes of equal means
    are kept if their samples differ, as in a zero-sum game between copies of the policy. With `turns` a group is kept
    if its samples' turns differ though their sums are equal, as an advantage with `turn_discount` compares turns.
    `on` names a part of the reward or another number that has to differ between episodes, in place of the sum.

    Raises:
        ValueError: `turns` is set and the group has no rewards of turns, or an episode lacks what `on` names.
    """
    if turns and _turns_differ(group, tolerance) and len(group.rewards_S) > 1:
        return FilterDecision(True)
    rewards_U = group.values_S(on) if on is not None or group.sample_rewards_U is None else group.sample_rewards_U
    if len(group.rewards_S) == 1 or float(np.ptp(rewards_U)) <= tolerance:
        return FilterDecision(False, "zero_variance", return_prompt)
    return FilterDecision(True)


def _turns_differ(group: GroupView, tolerance: float) -> bool:
    if group.turn_rewards_U is None:
        raise ValueError("zero_variance with turns=true needs the rewards of the group's turns, and there are none")
    if len({len(turns) for turns in group.turn_rewards_U}) > 1:
        return True
    return bool((np.ptp(np.asarray(group.turn_rewards_U), axis=0) > tolerance).any())


@shaping("overlong")
def overlong(group: GroupView, *, max_length: int, margin: int, penalty: float = 1.0) -> NDArray[np.float64]:
    """Return rewards minus a penalty that grows from 0 at `max_length - margin` tokens to `penalty` at `max_length` and
    stays.

    DAPO's soft over-long punishment (arXiv:2503.14476) eq. 13; lengths in generated tokens.

    Raises:
        ValueError: not 0 < margin <= max_length, or a negative penalty.
    """
    if not 0 < margin <= max_length:
        raise ValueError(f"margin is {margin} and max_length {max_length} tokens; set 0 < margin <= max_length")
    if penalty < 0.0:
        raise ValueError(f"penalty is {penalty}; a negative one rewards length, set it to 0 or more")
    excess_S = (group.lengths_S - (max_length - margin)) / margin
    return group.rewards_S - penalty * np.clip(excess_S, 0.0, 1.0)

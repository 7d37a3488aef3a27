"""View of a group for filters and shaping functions, and a filter's decision. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class GroupView:
    """The finished episodes of one prompt: arrays of shape [S], one entry for each episode, in order of their numbers.

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
        rewards: ArrayLike,
        lengths: ArrayLike,
        truncated: ArrayLike,
        episodes: ArrayLike,
        turn_rewards: Sequence[tuple[float, ...]] | None = None,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> tuple[GroupView, NDArray[np.int64]]:
        """Return the view of a group of samples, and for each sample the position of its episode in the view.

        Args:
            rewards: reward of each sample, its turns' included; all other arrays have one entry per sample, too.
            columns: numbers by name; an episode has the mean over its samples with the number.
        """
        numbers, position, counts = np.unique(np.asarray(episodes), return_inverse=True, return_counts=True)
        rewards_S, lengths_S = np.zeros(len(numbers)), np.zeros(len(numbers), np.int64)
        truncated_S = np.zeros(len(numbers), np.bool_)
        np.add.at(rewards_S, position, np.asarray(rewards, np.float64))
        np.add.at(lengths_S, position, np.asarray(lengths, np.int64))
        np.logical_or.at(truncated_S, position, np.asarray(truncated, np.bool_))
        columns_S = {name: _means(np.asarray(own, np.float64), position) for name, own in (columns or {}).items()}
        rewards_U = np.asarray(rewards, np.float64)
        view = cls(rewards_S / counts, lengths_S, truncated_S, rewards_U, turn_rewards, columns_S)
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

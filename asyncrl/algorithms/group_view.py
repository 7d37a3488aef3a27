"""View of a group for filters and shaping functions, and a filter's verdict. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class GroupView:
    """The finished episodes of one prompt: arrays of shape [S], one entry for each episode, in order of their numbers.

    An episode of several samples has the mean of their rewards (rewards of turns included), the sum of their lengths,
    in generated tokens, and is truncated where one of them is. `sample_rewards_U` holds the rewards of the samples
    themselves, in any order; without it, each episode is one sample. `turn_rewards_U` holds those of each sample's
    turns (`rewards_of_turns`), in the same order.

    Raises:
        ValueError: the arrays differ in length or are empty.
    """

    rewards_S: NDArray[np.float64]
    lengths_S: NDArray[np.int64]
    truncated_S: NDArray[np.bool_]
    sample_rewards_U: NDArray[np.float64] | None = None
    turn_rewards_U: Sequence[tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        shapes = {self.rewards_S.shape, self.lengths_S.shape, self.truncated_S.shape}
        if len(shapes) != 1 or self.rewards_S.ndim != 1 or self.rewards_S.size == 0:
            raise ValueError(f"GroupView arrays have shapes {sorted(shapes)}; give one value per episode, at least one")

    @classmethod
    def of_samples(
        cls,
        rewards: ArrayLike,
        lengths: ArrayLike,
        truncated: ArrayLike,
        episodes: ArrayLike,
        turn_rewards: Sequence[tuple[float, ...]] | None = None,
    ) -> tuple[GroupView, NDArray[np.int64]]:
        """The view of a group of samples, and for each sample the position of its episode in the view.

        Args:
            rewards: of each sample, its turns' included; all others are one per sample too.
        """
        numbers, position, counts = np.unique(np.asarray(episodes), return_inverse=True, return_counts=True)
        rewards_S, lengths_S = np.zeros(len(numbers)), np.zeros(len(numbers), np.int64)
        truncated_S = np.zeros(len(numbers), np.bool_)
        np.add.at(rewards_S, position, np.asarray(rewards, np.float64))
        np.add.at(lengths_S, position, np.asarray(lengths, np.int64))
        np.logical_or.at(truncated_S, position, np.asarray(truncated, np.bool_))
        view = cls(rewards_S / counts, lengths_S, truncated_S, np.asarray(rewards, np.float64), turn_rewards)
        return view, position.astype(np.int64)


def rewards_of_turns(reward: float, token_rewards_T: ArrayLike | None, loss_mask_T: ArrayLike) -> tuple[float, ...]:
    """The rewards of a sample's turns, each an unbroken run of policy tokens. The last turn has the sample's `reward`.

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
class Verdict:
    """Decision on a group: train it or not; if not, the counted reason, and if its prompt returns to the dataset."""

    keep: bool
    reason: str = ""
    return_prompt: bool = False

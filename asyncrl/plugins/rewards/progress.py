"""SRPO's progress reward (arXiv:2511.15605): the closer a failure came to its task's successes, the higher its reward.

With h an episode's embedding (by a frozen video encoder), S the successes of its task and C the centres made of them:

    d = min over c in C of |h - c|                              distance of a failure
    z = (d - low) / (high - low), within 0 and 1                low, high: of the distances of the task's failures
    reward = most * sigmoid(steepness * (0.5 - z))              0.6 and 10: at most 0.6, a success is worth 1

`SIIRL` has the settings of siiRL's code (`utils/reward_score/embodied.py`). The centres are the means of the clusters
that DBSCAN(eps 0.5, min_samples 2) finds among the standardised successes, or the mean of all if it finds none; low and
high are the smallest and the largest distance. Two standardised successes of D dimensions are about sqrt(2 D) apart. So
beyond a few dimensions DBSCAN finds no cluster, and the only centre is the mean of all successes. `NEAREST`, the
default, follows the idea without a scale: each success is a centre. Its low and high are quantiles, so that one distant
failure does not decide the reward of the others.

siiRL uses the successes and failures of a batch. In an asynchronous run no batch exists yet when rewards are computed.
So `References` keeps the newest episodes of each task. It is a pure state machine: it holds the newest `keep` successes
and failures of a task, by version, within `max_staleness` versions of the newest episode. Their order of arrival does
not matter. A reward is a function of this content and the episode. An episode is never compared with one of a newer
version. Without a success of its task there is no reward.

Shapes: N episodes, E successes, C centres, D numbers of an embedding.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_LEAST_SPREAD = 1e-6
"""Distances that differ by less are the same, and z is 0.5, as in siiRL."""


class Centres(StrEnum):
    """Points that a failure's distance is measured to."""

    nearest = auto()
    """Every success."""
    clusters = auto()
    """Means of DBSCAN's clusters, or of all successes if there are no clusters."""


@dataclass(frozen=True, slots=True)
class ProgressSettings:
    """Parameters that turn distances into rewards; see the module's docstring.

    Attributes:
        eps, min_samples: DBSCAN's, on standardised successes; only for `Centres.clusters`.
        most: largest reward of a failure; below 1, the reward of a success.
        steepness: steepness of the sigmoid.
        low, high: quantiles of the failures' distances at which z is 0 and 1.
    """

    centres: Centres = Centres.nearest
    eps: float = 0.5
    min_samples: int = 2
    most: float = 0.6
    steepness: float = 10.0
    low: float = 0.05
    high: float = 0.95

    def __post_init__(self) -> None:
        """Raise ValueError if a number is out of its bounds."""
        checks = (
            (self.eps > 0, f"eps is {self.eps}: give a distance above 0"),
            (self.min_samples >= 1, f"min_samples is {self.min_samples}: give at least 1"),
            (0 < self.most < 1, f"most is {self.most}: give a reward between 0 and 1, what a success is worth"),
            (self.steepness > 0, f"steepness is {self.steepness}: give a number above 0"),
            (0 <= self.low < self.high <= 1, f"low is {self.low} and high {self.high}: set 0 <= low < high <= 1"),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)


NEAREST = ProgressSettings()
SIIRL = ProgressSettings(Centres.clusters, low=0.0, high=1.0)
PRESETS = {"nearest": NEAREST, "siirl": SIIRL}


def dbscan(points_ED: Floats, eps: float, min_samples: int) -> NDArray[np.int64]:
    """Return DBSCAN's cluster of each point by Euclidean distance, `[E]`, from 0 on; -1: no cluster (Ester et al., KDD
    1996).

    Points are visited in order, as scikit-learn's are, so that the numbers of the clusters are the same too.
    """
    near_EE = np.array([np.linalg.norm(points_ED - point, axis=1) <= eps for point in points_ED])
    core_E = near_EE.sum(1) >= min_samples
    labels_E, label = np.full(len(points_ED), -1), 0
    for start in np.flatnonzero(core_E):
        if labels_E[start] >= 0:
            continue
        labels_E[start], reached = label, [int(start)]
        while reached:
            here = reached.pop()
            if core_E[here]:
                fresh = np.flatnonzero(near_EE[here] & (labels_E < 0))
                labels_E[fresh] = label
                reached += fresh.tolist()
        label += 1
    return labels_E


def centres_of(successes_ED: Floats, settings: ProgressSettings) -> Floats:
    """Return the points to which distances are measured, `[C, D]`, for at least one success."""
    if settings.centres == Centres.nearest:
        return successes_ED
    scale_D = successes_ED.std(0)
    constant_D = scale_D < 10 * np.finfo(np.float64).eps  # as scikit-learn's StandardScaler
    scaled_ED = (successes_ED - successes_ED.mean(0)) / np.where(constant_D, 1.0, scale_D)
    labels_E = dbscan(scaled_ED, settings.eps, settings.min_samples)
    means = [successes_ED[labels_E == label].mean(0) for label in range(labels_E.max() + 1)]
    return np.array(means or [successes_ED.mean(0)])


def distances(embeddings_ND: Floats, centres_CD: Floats) -> Floats:
    """Return the distance of each embedding to the nearest centre, `[N]`."""
    return np.array([np.linalg.norm(centres_CD - embedding, axis=1).min() for embedding in embeddings_ND])


def shaped(distances_N: Floats, failures_F: Floats, settings: ProgressSettings) -> Floats:
    """Return the rewards `[N]` of failures at these distances, relative to the distances `failures_F` (at least
    one).
    """
    low, high = np.quantile(failures_F, (settings.low, settings.high))
    spread = high - low
    z_N = np.full(len(distances_N), 0.5) if spread < _LEAST_SPREAD else ((distances_N - low) / spread).clip(0.0, 1.0)
    return settings.most / (1.0 + np.exp(-settings.steepness * (0.5 - z_N)))


def srpo_rewards(
    embeddings_ND: ArrayLike, succeeded_N: ArrayLike, tasks_N: Sequence[Hashable], settings: ProgressSettings = SIIRL
) -> Floats:
    """Return the rewards `[N]` of a batch as siiRL computes them: 1 for a success, at most `settings.most` for a
    failure.

    Failures of a task without any success in the batch get 0.
    """
    embeddings, succeeded = np.asarray(embeddings_ND, np.float64), np.asarray(succeeded_N, np.bool_)
    rewards_N = succeeded.astype(np.float64)
    for task in dict.fromkeys(tasks_N):
        own = np.array([each == task for each in tasks_N])
        won, lost = own & succeeded, own & ~succeeded
        if won.any() and lost.any():
            d = distances(embeddings[lost], centres_of(embeddings[won], settings))
            rewards_N[lost] = shaped(d, d, settings)
    return rewards_N


@dataclass(frozen=True, slots=True, order=True)
class Reference:
    """A finished episode. Episodes are ordered from the first to be forgotten to the last.

    Attributes:
        version: newest policy version of its tokens.
        key: hash of its content, so that the order of two episodes of one version does not depend on their arrival.
        embedding: `[D]`.
        progress: true share of the task that was done; NaN if unknown.
    """

    version: int
    key: str
    embedding: Floats = field(compare=False, repr=False)
    progress: float = field(default=float("nan"), compare=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """Result of comparing a failure with the references.

    Attributes:
        reward: 0 without references.
        references, centres, failures: numbers of episodes and centres compared with.
        correlation: Spearman's rank correlation of these failures' closeness (minus their distance) with their true
            progress; None if the progress of fewer than three is known, or if nothing varies.
    """

    reward: float = 0.0
    references: int = 0
    centres: int = 0
    failures: int = 0
    correlation: float | None = None


class References:
    """The newest episodes of each task; see the module's docstring.

    Args:
        settings: parameters that turn distances into rewards.
        keep: number of successes, and of failures, kept per task.
        max_staleness: an episode is not compared with episodes that are more versions older.
    """

    def __init__(self, settings: ProgressSettings = NEAREST, *, keep: int = 256, max_staleness: int = 8) -> None:
        if keep < 1 or max_staleness < 0:
            raise ValueError(f"keep is {keep} and max_staleness {max_staleness}: give at least 1, and at least 0")
        self._settings, self._keep, self._max_staleness = settings, keep, max_staleness
        self._of_task: dict[tuple[Hashable, bool], list[Reference]] = {}
        self._newest = 0

    def add(self, task: Hashable, episode: Reference, *, succeeded: bool) -> None:
        """Add an episode, if it is new enough to be kept."""
        if episode.version < self._newest - self._max_staleness:
            return
        kept = self._of_task.setdefault((task, succeeded), [])
        bisect.insort(kept, episode)
        del kept[: -self._keep]
        if episode.version > self._newest:
            self._newest = episode.version
            self._forget(self._newest - self._max_staleness)

    def progress(self, task: Hashable, episodes: Sequence[Reference]) -> list[Progress]:
        """Return the progress of each of these failures of a task, which must have been added."""
        of_version = {
            version: self._progress(task, [each for each in episodes if each.version == version])
            for version in dict.fromkeys(each.version for each in episodes)
        }
        return [next(of_version[each.version]) for each in episodes]

    def _progress(self, task: Hashable, episodes: Sequence[Reference]) -> Iterator[Progress]:
        """Yield the progress of failures of one version, which are compared with the same episodes."""
        won, lost = (self._comparable(task, episodes[0].version, succeeded=succeeded) for succeeded in (True, False))
        if not won or not lost:
            yield from [Progress()] * len(episodes)
            return
        centres = centres_of(np.array([each.embedding for each in won]), self._settings)
        among = distances(np.array([each.embedding for each in lost]), centres)
        own = shaped(distances(np.array([each.embedding for each in episodes]), centres), among, self._settings)
        true = np.array([each.progress for each in lost])
        correlation = spearman(-among[~np.isnan(true)], true[~np.isnan(true)])
        for reward in own:
            yield Progress(float(reward), len(won), len(centres), len(lost), correlation)

    def _comparable(self, task: Hashable, version: int, *, succeeded: bool) -> list[Reference]:
        kept = self._of_task.get((task, succeeded), ())
        return [each for each in kept if version - self._max_staleness <= each.version <= version]

    def _forget(self, version: int) -> None:
        """Drop episodes that are older than `version`."""
        for key, kept in list(self._of_task.items()):
            del kept[: bisect.bisect_left(kept, version, key=lambda each: each.version)]
            if not kept:
                del self._of_task[key]


def spearman(left_N: Floats, right_N: Floats) -> float | None:
    """Return the rank correlation, with ties at their mean rank; None for fewer than three pairs or a constant side."""
    if len(left_N) < 3 or np.ptp(left_N) == 0 or np.ptp(right_N) == 0:
        return None
    return float(np.corrcoef(_ranks(left_N), _ranks(right_N))[0, 1])


def _ranks(values_N: Floats) -> Floats:
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

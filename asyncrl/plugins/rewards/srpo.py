"""SRPO's reward for embodied episodes (arXiv:2511.15605): the closer a failure came to its task's successes,
measured by a video encoder, the higher its reward.

It is added to the environment's reward, which is 1 for a success: nothing for successes, and up to 0.6 for failures.

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

One process embeds the episodes and keeps the references. A new process collects them again after a few groups, so they
are not part of checkpoints.

Shapes: N episodes, E successes, C centres, D numbers of an embedding.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.api import Episode, run_in
from asyncrl.api.picture import Picture, evenly
from asyncrl.config.plugin_code.import_paths import load_plugin

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


Clip = Sequence[Picture]
Encoder = Callable[[Sequence[Clip]], Floats]
"""Embeds clips of T frames each: `[N, D]`."""
SUCCESS, PROGRESS = "success", "progress"
"""Names in `Sample.metrics`: success (1 or 0), and progress of the episode (0 to 1)."""
SERVER = "server"
"""`encoder` of a reward whose episodes come with embeddings from EncoderServers."""
CACHED = 4096
"""Number of cached embeddings, by the content of the frames; V-JEPA 2's largest take 11 KB each."""
PIXELS = 32
"""Side to which `pixels` resizes frames."""


def pixels(clips: Sequence[Clip]) -> Floats:
    """Return the pixels of all frames at 32 x 32, 0 to 1, as an embedding: a baseline, and an encoder that needs no
    model.
    """
    return np.array([np.concatenate([_small(frame) for frame in clip]) for clip in clips])


def _small(frame: Picture) -> NDArray[np.float64]:
    return np.asarray(frame.image().resize((PIXELS, PIXELS)), np.float64).ravel() / 255.0


@dataclass(frozen=True, slots=True)
class _Played:
    """One episode of a group, with its samples' positions."""

    samples: list[int]
    succeeded: bool
    version: int
    progress: float
    frames: list[Picture]
    task: Any
    embedding: tuple[float, ...]


class ClipEncoder:
    """Embeds clips with a user's encoder, which is loaded at the first one; equal clips are embedded once.

    Args:
        path: import path of the encoder, a function or a class.
        args: arguments of the class.
    """

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self._path, self._args = path, dict(args)
        self._encoder: Encoder | None = None
        self._cached: OrderedDict[str, NDArray[np.float64]] = OrderedDict()

    def embedded(self, clips: Sequence[tuple[str, Clip]]) -> list[tuple[str, NDArray[np.float64]]]:
        """Return the key and the embedding `[D]` of each clip.

        Args:
            clips: each with the key of its content.

        Raises:
            ValueError: the encoder did not return finite numbers, `[N, D]` for N clips.
        """
        lacking = {key: clip for key, clip in clips if key not in self._cached}
        if lacking:
            for key, embedding in zip(lacking, self._encode(list(lacking.values())), strict=True):
                self._cached[key] = embedding
        for key, _ in clips:
            self._cached.move_to_end(key)
        found = [(key, self._cached[key]) for key, _ in clips]
        while len(self._cached) > CACHED:
            self._cached.popitem(last=False)
        return found

    def _encode(self, clips: Sequence[Clip]) -> Floats:
        if self._encoder is None:
            named: Any = load_plugin(self._path)
            made: Encoder = named(**self._args) if isinstance(named, type) else named
            self._encoder = made
        vectors = np.asarray(self._encoder(clips), np.float64)
        if vectors.ndim != 2 or len(vectors) != len(clips) or not np.isfinite(vectors).all():
            raise ValueError(
                f"encoder {self._path} made {vectors.shape} of {len(clips)} clips: it has to give finite numbers [N, D]"
            )
        return vectors


@run_in("process")
class SRPOReward:
    """Rewards a group's failures; see the module's docstring.

    A group of one episode, as in an evaluation, gets no reward and is not kept.

    Args:
        encoder: import path of a function or class whose calls embed clips, `[N, D]` of N lists of pictures; or
            `server`: the run's EncoderServers embed them (`rollout.encoder`, which then has arguments, `frames` and
            `end`).
        encoder_args: arguments of the class, such as `folder` of a V-JEPA 2 model.
        frames: number of frames, evenly chosen from an episode, that are embedded together; default 64, as in siiRL.
        end: embed only the last frame, repeated `frames` times: the state that the episode has reached.
        preset: `nearest` or `siirl`.
        settings: fields of `ProgressSettings` that differ from the preset.
        task: field of the row that names its task; failures are compared with successes of the same task. None compares
            within the group only.
        keep: number of successes, and of failures, kept per task.
        max_staleness: versions by which a success may be older than a failure that is compared with it.

    Raises:
        ValueError: an argument is out of its bounds.
    """

    def __init__(
        self,
        *,
        encoder: str = "asyncrl.plugins.rewards.video_encoder:VJEPA2Encoder",
        encoder_args: Mapping[str, Any] | None = None,
        frames: int | None = None,
        end: bool = False,
        preset: str = "nearest",
        settings: Mapping[str, Any] | None = None,
        task: str | None = "task",
        keep: int = 256,
        max_staleness: int = 8,
    ) -> None:
        if encoder == SERVER and (encoder_args or frames is not None or end):
            raise ValueError("encoder is 'server': encoder_args, frames and end are settings of rollout.encoder then")
        frames = 64 if frames is None else frames
        if frames < 1:
            raise ValueError(f"frames is {frames}: give at least 1")
        if preset not in PRESETS:
            raise ValueError(f"preset is {preset!r}: choose {' or '.join(PRESETS)}")
        self._encoder = None if encoder == SERVER else ClipEncoder(encoder, encoder_args or {})
        self._frames, self._end, self._task = frames, end, task
        own = replace(PRESETS[preset], **(settings or {}))
        self._new_references = partial(References, own, keep=keep, max_staleness=max_staleness)
        self._references = self._new_references()

    def __call__(self, group: Sequence[Episode]) -> list[dict[str, float]]:
        """Return the reward of each of the group's samples, the same for all samples of an episode, with its parts.

        Raises:
            ValueError: an episode has no frames, no success, or no task.
        """
        played = self._episodes(group)
        if len(played) == 1:
            return [{"score": 0.0} for _ in group]
        references = self._references if self._task is not None else self._new_references()
        embedded = self._embedded(played)
        made = [
            Reference(each.version, key, embedding, each.progress)
            for each, (key, embedding) in zip(played, embedded, strict=True)
        ]
        for each, reference in zip(played, made, strict=True):
            references.add(each.task, reference, succeeded=each.succeeded)
        rewards: list[dict[str, float]] = [{"score": 0.0} for _ in group]
        failures = [(each, reference) for each, reference in zip(played, made, strict=True) if not each.succeeded]
        for task in {each.task for each, _ in failures}:
            of_task = [failure for failure in failures if failure[0].task == task]
            progress = references.progress(task, [reference for _, reference in of_task])
            for (each, _), found in zip(of_task, progress, strict=True):
                given = {"score": found.reward, "references": found.references, "centres": found.centres}
                given |= {} if found.correlation is None else {"progress_correlation": found.correlation}
                for sample in each.samples:
                    rewards[sample] = given
        return rewards

    def _episodes(self, group: Sequence[Episode]) -> list[_Played]:
        by_number: dict[int, list[int]] = {}
        for position, sample in enumerate(group):
            by_number.setdefault(sample.episode, []).append(position)
        return [self._played([group[at] for at in positions], positions) for positions in by_number.values()]

    def _played(self, samples: Sequence[Episode], positions: list[int]) -> _Played:
        frames = [frame for sample in samples for frame in sample.frames]
        metrics = samples[-1].metrics
        if not frames or SUCCESS not in metrics:
            raise ValueError(
                "the agent's samples have no frames (Sample.frames), or no metric 'success' (Sample.metrics); use "
                "asyncrl.plugins.agents.vla:VLAAgent, or an agent that gives both"
            )
        row = samples[-1].data
        if self._task is not None and row.get(self._task) is None:
            raise ValueError(f"the row has no field {self._task!r}, which names its task; set task to a field, or null")
        return _Played(
            positions,
            metrics[SUCCESS] > 0,
            max(sample.version for sample in samples),
            metrics.get(PROGRESS, float("nan")),
            [frames[-1]] * self._frames if self._end else evenly(frames, self._frames),
            None if self._task is None else row[self._task],
            samples[-1].embedding,
        )

    def _embedded(self, played: Sequence[_Played]) -> list[tuple[str, NDArray[np.float64]]]:
        """Return the key and the embedding of each episode's clip."""
        clips = [each.frames for each in played]
        keys = [hashlib.sha256("".join(frame.sha256 for frame in clip).encode()).hexdigest() for clip in clips]
        if self._encoder is None:
            if not all(each.embedding for each in played):
                raise ValueError("encoder is 'server', and an episode has no embedding: set rollout.encoder.servers")
            return [(key, np.array(each.embedding)) for key, each in zip(keys, played, strict=True)]
        return self._encoder.embedded(list(zip(keys, clips, strict=True)))

"""SRPO's reward for embodied episodes: rewards a failure by its similarity to successes, measured by a video encoder.

It is added to the environment's reward, which is 1 for a success: nothing for successes, and up to 0.6 for failures
(`progress`). One process embeds the episodes and keeps the references. These are the newest episodes, which a new
process collects again after a few groups, so they are not part of checkpoints.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api import Episode, run_in
from asyncrl.api.picture import Picture, evenly
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.plugins.rewards.progress import PRESETS, Floats, Reference, References

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
    """Rewards a group's failures; see the module's docstring and `asyncrl.plugins.rewards.progress`.

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

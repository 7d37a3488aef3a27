"""Validate a trajectory on its arrival at a ModelWorker, beyond the checks of the codec.

The sender belongs to the run, but user code built the trajectory, and a process from before a restart may still send.
A token outside the vocabulary would crash the rank with an index error; a version that no server ever had would make
the trajectory the newest of all forever. Each faulty trajectory is rejected on arrival with a message that names the
fault, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory, unrecorded
from asyncrl.comm.push_pull import InvalidTrajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.token_ids import token_ids
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_id
from asyncrl.models.routers import RoutingShape, routing_shape_of
from asyncrl.trainer.settings import VisionMode

MAX_LOGPROB = 1e-3
"""Largest accepted log-probability: 0, plus room for rounding."""


class TrajectoryCheck:
    """Checks trajectories against the model and the existing versions. For one thread.

    Args:
        vocab_size: vocabulary size of the model; None if it is not known.
        announced_version: returns the newest announced version of the actor. Called only when a trajectory is newer
            than its last result.
        routing: shape of the routers' choices if they are replayed; each trajectory must then record them.
        pictures: True if the model takes pictures.
        allowed: the only tokens that the policy may sample; empty if all are allowed.
    """

    def __init__(
        self,
        vocab_size: int | None,
        announced_version: Callable[[], int],
        routing: RoutingShape | None = None,
        *,
        pictures: bool = False,
        allowed: Sequence[int] = (),
    ) -> None:
        self._vocab_size = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        self._announced_version = announced_version
        self._newest = 0
        self._routing, self._takes_pictures = routing, pictures
        self._allowed = np.array(allowed, np.int32)

    @classmethod
    def of_model(cls, config: ExperimentConfig, announced_version: Callable[[], int]) -> Self:
        """Return the check for the model and the sampling that `config` names.

        Raises:
            ValueError: expert choices are to be replayed, but the model does not support it.
        """
        folder = str(config.model.path)
        model = read_model_config(folder)
        return cls(
            model.get("vocab_size"),
            announced_version,
            routing_shape_of(folder) if config.moe.replay_routing else None,
            pictures=config.model.vision != VisionMode.none and placeholder_id(model) is not None,
            allowed=token_ids(config.rollout.sampling.allowed_token_ids),
        )

    def check(self, trajectory: Trajectory) -> None:
        """Return if `trajectory` can be trained.

        Raises:
            InvalidTrajectory: it cannot be trained; the message names the fault.
            NameResolveError: the announced version is not available now.
        """
        samples, name = trajectory.samples, f"{trajectory.rollout_id!r:.80}"
        prompt, rest = (samples.prompt, samples.rest) if isinstance(samples, SharedPrompt) else (None, samples)
        columns = SampleColumns.join(rest)
        highest = int(np.maximum.reduce(columns.tokens, initial=-1))
        highest = highest if prompt is None else int(np.maximum.reduce(prompt, initial=highest))
        if highest >= self._vocab_size:
            raise InvalidTrajectory(f"{name} holds token {highest}, the vocabulary has {self._vocab_size}")
        generated = columns.loss_mask.astype(bool)
        if np.minimum.reduce(columns.versions, where=generated, initial=0) < 0:
            raise InvalidTrajectory(f"{name} holds a generated token without a version")
        if (high := np.maximum.reduce(columns.behave_logprobs, where=generated, initial=0.0)) > MAX_LOGPROB:
            raise InvalidTrajectory(f"{name} holds the log-probability {high:g}, above 0")
        if self._allowed.size and not (drawn := np.isin(columns.tokens, self._allowed) | ~generated).all():
            raise InvalidTrajectory(
                f"{name} holds the generated token {columns.tokens[drawn.argmin()]}, which is not among "
                "rollout.sampling.allowed_token_ids: an agent asked with sampling of its own"
            )
        version = int(np.maximum.reduce(columns.versions, initial=-1))
        if version > self._newest:
            self._newest = max(self._newest, self._announced_version())
            if version > self._newest:
                raise InvalidTrajectory(f"{name} holds tokens of version {version}, the newest is {self._newest}")
        if not self._takes_pictures and trajectory.pictures:
            raise InvalidTrajectory(f"{name} holds pictures, and the model takes none")
        if self._routing is not None and (fault := routing_fault(trajectory, self._routing)) is not None:
            raise InvalidTrajectory(f"{name} {fault}")


def routing_fault(trajectory: Trajectory, shape: RoutingShape) -> str | None:
    """Return the fault of the expert choices in `trajectory`; None if they are complete.

    They are complete if every token that the model must read to compute the generated ones has experts that exist.
    """
    columns = trajectory.columns
    routing = columns.routing
    if routing is None:
        return (
            "does not tell which experts its tokens went through (moe.replay_routing): its agent has to build its "
            "samples by asyncrl.plugins.agents.sample_builder or the chat client, or to give them Sample.routing"
        )
    expected = (shape.layers, shape.per_token)
    if routing.dtype != shape.dtype or routing.shape[1:] != expected:
        return f"has a routing of {routing.dtype} {routing.shape[1:]}, the model makes {shape.dtype} {expected}"
    lowest_T, highest_T = routing.min((1, 2)), routing.max((1, 2))
    absent_T = lowest_T == unrecorded(shape.dtype)
    if (wrong_T := (highest_T >= shape.experts) & ~absent_T).any():
        return f"went through expert {int(highest_T[wrong_T][0])}, the model has {shape.experts} in a layer"
    # A sample's last generated token is the last scored token; the tokens before it go into the model.
    generated = np.flatnonzero(columns.loss_mask)
    seq_ids_T = np.repeat(np.arange(len(columns)), columns.lengths)
    last_S = np.full(len(columns), -1)
    np.maximum.at(last_S, seq_ids_T[generated], generated)
    needed_T = np.arange(len(seq_ids_T)) < last_S[seq_ids_T]
    if (missing := int((needed_T & absent_T).sum())) > 0:
        return f"does not tell the experts of {missing} tokens that lie before a generated one"
    return None

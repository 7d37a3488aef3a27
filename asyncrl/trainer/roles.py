"""The roles of a training rank, built from the config and the graph: which models are loaded, which of them learn.

`actor` and `critic` learn; `ref` is frozen or follows the actor. Any other role that a graph names is a reward model,
loaded from the `path` in the arguments of one of its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph.types import Graph
from asyncrl.trainer.engines.base import EngineLoader, PolicyEngine, TrainingEngine
from asyncrl.trainer.engines.flat import FlatLoader
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel import Place
from asyncrl.trainer.settings import ReferenceMode
from asyncrl.trainer.train_state import TrainState
from asyncrl.weights import checkpoints

ACTOR, CRITIC, REFERENCE = "actor", "critic", "ref"


@dataclass(frozen=True, eq=False)
class TrainingRank:
    """One rank's share of the training side.

    Attributes:
        engines: every role that the graph names, and the actor.
        averaged: roles without an optimizer whose weights change all the same (a reference that follows the actor).
    """

    engines: dict[str, TrainingEngine]
    state: TrainState
    place: Place
    averaged: frozenset[str] = frozenset()

    def policy(self, role: str) -> PolicyEngine:
        """The language model of `role`.

        Raises:
            TypeError: that role is none.
        """
        engine = self.engines[role]
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"role {role!r} is no language model; only language models are published")
        return engine

    @cached_property
    def checkpoints(self) -> checkpoints.CheckpointWriter:
        """Writes the checkpoints that `save_checkpoint` began."""
        return checkpoints.CheckpointWriter(self._changing(), self.place.everyone)

    def save_checkpoint(self, order: SaveCheckpoint) -> None:
        """Copy what the checkpoint that `order` describes needs and begin to write it. Called by all ranks.

        Raises:
            PeerFailed: another rank could not.
        """
        state = {"train_state": self.state.state_dict(), "master_state": order.master_state}
        self.checkpoints.begin(Path(order.path), version=order.version, state=state)

    def load_checkpoint(self, root: Path) -> Any:
        """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

        Returns:
            The master's state; None where there is no checkpoint, and nothing is changed then.

        Raises:
            ValueError: the checkpoint is of another model or graph.
        """
        state = checkpoints.load(self._changing(), root, self.place.everyone)
        if state is None:
            return None
        self.state.load_state_dict(state["train_state"])
        return state["master_state"]

    def _changing(self) -> dict[str, TrainingEngine]:
        return {role: engine for role, engine in self.engines.items() if engine.trained or role in self.averaged}


def build_rank(config: ExperimentConfig, graph: Graph, place: Place, device: torch.device) -> TrainingRank:
    """Load every role that `graph` names.

    Raises:
        OSError, ValueError: a model cannot be loaded; names the role.
    """
    loader = FlatLoader(config, place, device)
    roles = dict.fromkeys((ACTOR, *graph.roles()))
    engines = {role: _load(role, config, graph, loader) for role in roles}
    follows = REFERENCE in engines and config.algorithm.reference.mode == ReferenceMode.ema
    averaged = frozenset((REFERENCE,)) if follows else frozenset()
    return TrainingRank(engines, TrainState(config.algorithm), place, averaged)


def _load(role: str, config: ExperimentConfig, graph: Graph, loader: EngineLoader) -> TrainingEngine:
    model, algorithm = config.model, config.algorithm
    if role == ACTOR:
        return loader.policy(_model_path(config), model.dtype, config.optimizer)
    if role == CRITIC:
        return loader.critic(algorithm.critic.path or _model_path(config), algorithm.critic.optimizer)
    if role == REFERENCE:
        # A moving average changes by less than bf16 resolves.
        dtype = Dtype.float32 if algorithm.reference.mode == ReferenceMode.ema else model.dtype
        return loader.policy(algorithm.reference.path or _model_path(config), dtype, None)
    paths = [str(call.args["path"]) for call in graph.calls if call.role == role and "path" in call.args]
    if not paths:
        raise ValueError(
            f"role {role!r} is a reward model, but no call of it says where it is; "
            'give one of its calls args={"path": "<folder>"}'
        )
    return loader.reward_model(paths[0])


def _model_path(config: ExperimentConfig) -> str:
    if config.model.path is None:
        raise ValueError("model.path is null; the launcher sets it to the base model's folder")
    return str(Path(config.model.path).expanduser())

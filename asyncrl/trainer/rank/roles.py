"""The roles of a training rank, built from the config and the graph: the models to load, and which of them learn.

`actor` and `critic` learn; `ref` is frozen or follows the actor; teachers are frozen. Any other role that a graph names
is a reward model, loaded from the `path` in the arguments of one of its calls. Further trained policies have
separate roles (`asyncrl.config.trained_policies`), built by the same rules with the policy's settings.
"""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.config.trained_policies import CRITIC, REFERENCE, config_of_policy, is_changing, policy_and_role
from asyncrl.master.graph.call_graph import Graph
from asyncrl.trainer.engines.base import EngineLoader, PolicyEngine, TrainingEngine, engine_loader
from asyncrl.trainer.engines.lora_reference import LoraReference
from asyncrl.trainer.functions.model_functions import TrainState
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.parallel.worker_grid import Placement
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import ReferenceMode


def build_rank(config: ExperimentConfig, graph: Graph, world: World, device: torch.device) -> TrainingRank:
    """Load this rank's parts of the roles that `graph` names.

    Raises:
        OSError, ValueError: a model cannot be loaded; the message names the role.
    """
    roles = dict.fromkeys((ACTOR, *config.trained_policies, *graph.roles()))
    engines: dict[str, TrainingEngine] = {}
    make = engine_loader(engine_of(config))
    configs = {name: config_of_policy(config, name) for name in ("", *config.trained_policies)}
    loaders = {
        (name, grid): make(own, place, device) for name, own in configs.items() for grid, place in world.places.items()
    }
    for role in filter(world.hosts, roles):
        actor = engines.get(ACTOR)
        if role == REFERENCE and isinstance(actor, PolicyEngine) and _is_base_of_actor(config, world.placement):
            engines[role] = LoraReference(actor)
        else:
            policy, own = policy_and_role(config, role)
            loader = loaders[policy, world.placement.grid(role)]
            engines[role] = _load(own, configs[policy], loader) or loader.reward_model(_reward_model(graph, role))
        if config.trainer.offload:
            engines[role].offload()
    changing = tuple(role for role in roles if is_changing(config, role))
    states = {name: TrainState(own.algorithm) for name, own in configs.items()}
    for name in config.critic_sharers:
        states[name].value_norm = states[""].value_norm
    return TrainingRank(engines, states.pop(""), world, changing, states, config.critic_sharers)


def _is_base_of_actor(config: ExperimentConfig, placement: Placement) -> bool:
    """True if the reference is the model under the actor's adapters, in the same grid as the actor."""
    together = placement.grid(REFERENCE) == placement.actor
    return together and bool(config.model.lora.rank) and config.algorithm.reference.path in (None, config.model.path)


def _load(role: str, config: ExperimentConfig, loader: EngineLoader) -> TrainingEngine | None:
    """Load the model that the settings name for `role`; None for a reward model, which the graph names."""
    model, algorithm = config.model, config.algorithm
    if role == ACTOR:
        return loader.policy(_model_path(config), model.dtype, config.optimizer)
    if role == CRITIC:
        return loader.critic(algorithm.critic.path or _model_path(config), algorithm.critic.optimizer)
    if role == REFERENCE:
        # A moving average changes by less than bf16 resolves.
        dtype = Dtype.float32 if algorithm.reference.mode == ReferenceMode.ema else model.dtype
        return loader.policy(algorithm.reference.path or _model_path(config), dtype, None)
    if (teacher := algorithm.teacher_of(role)) is not None and teacher.path is not None:
        return loader.policy(teacher.path, model.dtype, None)
    return None


def _reward_model(graph: Graph, role: str) -> str:
    paths = [str(call.args["path"]) for call in graph.calls if call.role == role and "path" in call.args]
    if not paths:
        raise ValueError(
            f"role {role!r} is a reward model, but none of its calls names its folder; "
            'give one of its calls args={"path": "<folder>"}'
        )
    return paths[0]


def _model_path(config: ExperimentConfig) -> str:
    if config.model.path is None:
        raise ValueError("model.path is null; the launcher sets it to the base model's folder")
    return str(Path(config.model.path).expanduser())

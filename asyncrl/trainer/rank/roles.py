"""The roles of a training rank, built from the config and the graph: which models are loaded, which of them learn.

`actor` and `critic` learn; `ref` is frozen or follows the actor; teachers are frozen. Any other role that a graph names
is a reward model, loaded from the `path` in the arguments of one of its calls. Further trained policies have roles of
their own (`asyncrl.config.trained_policies`), made by the same rules with the policy's settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.config.trained_policies import SEPARATOR, config_of_policy, policy_and_role
from asyncrl.master.graph.types import Graph
from asyncrl.models.weights.checkpoints.restore import restore, restore_newest
from asyncrl.models.weights.checkpoints.writer import CheckpointWriter
from asyncrl.trainer.engines.base import EngineLoader, PolicyEngine, TrainingEngine, engine_loader
from asyncrl.trainer.engines.host_offload import local
from asyncrl.trainer.engines.lora_reference import LoraReference
from asyncrl.trainer.functions.calls import TrainState
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.parallel.worker_grid import Placement
from asyncrl.trainer.rank.host_folders import HostFolders
from asyncrl.trainer.settings import ReferenceMode

ACTOR, CRITIC, REFERENCE = "actor", "critic", "ref"


@dataclass(frozen=True, eq=False)
class TrainingRank:
    """One rank's share of the training side.

    Attributes:
        engines: engines of the roles that this rank has a part of: the actor and those that the graph names.
        state: of the run's own policy; `states` has those of further trained ones, by name.
        critic_sharers: further policies whose critic is that of the run's own.
        changing: roles whose weights change, on any rank; a checkpoint holds them.
    """

    engines: dict[str, TrainingEngine]
    state: TrainState
    world: World
    changing: tuple[str, ...] = ()
    states: Mapping[str, TrainState] = field(default_factory=dict)
    critic_sharers: Collection[str] = ()

    def state_of(self, policy: str) -> TrainState:
        """The state of a trained policy; empty: the run's own."""
        return self.states[policy] if policy else self.state

    def engines_of(self, policy: str) -> Mapping[str, TrainingEngine]:
        """The engines here of a trained policy by role, named as for the run's own; empty: that one."""
        return {role: self.engines[name] for role, name in self._named(policy, self.engines).items()}

    def roles_of(self, policy: str) -> Collection[str]:
        """The roles of a trained policy on any rank, named as for the run's own; empty: that one."""
        return self._named(policy, self.world.placement.roles).keys()

    def _named(self, policy: str, roles: Iterable[str]) -> dict[str, str]:
        """Return the policy's roles among `roles`: from the name of the run's own policy's role to the policy's."""
        if not policy:
            return {name: name for name in roles}
        shared = {CRITIC} if policy in self.critic_sharers else set()
        parts = {name: name.partition(SEPARATOR) for name in roles}
        return {
            (name if name in shared else part[2] or ACTOR): name
            for name, part in parts.items()
            if part[0] == policy or name in shared
        }

    def policy(self, role: str) -> PolicyEngine:
        """The language model of `role`.

        Raises:
            TypeError: that role is not a language model.
        """
        engine = self.engines[role]
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"role {role!r} is not a language model; only language models are published")
        return engine

    @cached_property
    def checkpoints(self) -> CheckpointWriter:
        """Writes the checkpoints that `save_checkpoint` began."""
        return CheckpointWriter(self._changing(), self.changing, self.world.everyone)

    @cached_property
    def folders(self) -> HostFolders:
        """Folders of the in-memory checkpoint, one on each host."""
        return HostFolders.of(self.world)

    @cached_property
    def memory_checkpoint(self) -> CheckpointWriter:
        """Writer of the in-memory checkpoint, independent of a checkpoint on disk that may be in progress."""
        hosts = self.folders if self.folders.spread else None
        return CheckpointWriter(self._changing(), self.changing, self.world.everyone, in_memory=True, hosts=hosts)

    def writer(self, in_memory: bool) -> CheckpointWriter:
        """Return the writer of in-memory checkpoints, or the one of checkpoints on disk."""
        return self.memory_checkpoint if in_memory else self.checkpoints

    def save_checkpoint(self, order: SaveCheckpoint) -> None:
        """Copy the tensors of the checkpoint that `order` describes, and begin to write it. Called by all ranks.

        Raises:
            PeerFailed: another rank failed to.
        """
        state = {"train_state": self._train_state(order), "master_state": order.master_state}
        self.writer(order.in_memory).begin(Path(order.path), version=order.version, state=state)

    def _train_state(self, order: SaveCheckpoint) -> dict[str, Any]:
        """Return the training state beside the models, of each policy as its publisher has it.

        Collective where the leading rank has not all of it, and where several hosts each write it: all write the same.
        """
        states = {name: state.state_dict() for name, state in {"": self.state, **self.states}.items()}
        keepers = {name: self.world.placement.grid(name or ACTOR).publisher for name in states}
        if (order.in_memory and self.folders.spread) or set(keepers.values()) != {self.world.placement.actor.publisher}:
            everyone = self.world.everyone.all_gather_bytes(json.dumps(states).encode())
            states = {name: json.loads(everyone[keeper])[name] for name, keeper in keepers.items()}
            for name in self.critic_sharers:
                states[name]["value_norm"] = states[""]["value_norm"]
        own = states.pop("")
        return own | ({"policies": states} if states else {})

    def state_bytes(self) -> int:
        """Return the bytes of this rank's part of the tensors that checkpoints hold."""
        total = 0
        for engine in self._changing().values():
            with engine.on_device():
                total += sum(local(tensor).nbytes for tensor in engine.state()[0].values())
        return total

    def load_checkpoint(self, root: Path) -> Any:
        """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

        Returns:
            The master's state; None where there is no checkpoint, and nothing is changed then.

        Raises:
            ValueError: the checkpoint is of another model or graph.
        """
        return self._take(restore_newest(self._changing(), root, self.world.everyone))

    def load_memory_checkpoint(self, root: Path, *, invalid: bool) -> Any:
        """Restore the in-memory checkpoint that ranks stored in `root` on their hosts, like `load_checkpoint`.

        Args:
            invalid: True if a part of it could not be stored on this host.

        Raises:
            MemoryCheckpointLost: a part of it is missing.
        """
        everyone = self.world.everyone
        path = self.folders.agree(root, everyone, invalid=invalid)
        return None if path is None else self._take(restore(self._changing(), path, everyone))

    def _take(self, state: dict[str, Any] | None) -> Any:
        if state is None:
            return None
        self.state.load_state_dict(state["train_state"])
        for name, own in self.states.items():
            own.load_state_dict(state["train_state"]["policies"][name])
        return state["master_state"]

    def _changing(self) -> dict[str, TrainingEngine]:
        return {role: self.engines[role] for role in self.changing if role in self.engines}


def build_rank(config: ExperimentConfig, graph: Graph, world: World, device: torch.device) -> TrainingRank:
    """Load this rank's parts of the roles that `graph` names.

    Raises:
        OSError, ValueError: a model cannot be loaded; names the role.
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
    changing = tuple(role for role in roles if _changes(config, role))
    states = {name: TrainState(own.algorithm) for name, own in configs.items()}
    for name in config.critic_sharers:
        states[name].value_norm = states[""].value_norm
    return TrainingRank(engines, states.pop(""), world, changing, states, config.critic_sharers)


def _changes(config: ExperimentConfig, role: str) -> bool:
    """True if the weights of `role` change in the run."""
    policy, own = policy_and_role(config, role)
    follows = config_of_policy(config, policy).algorithm.reference.mode == ReferenceMode.ema
    return own in (ACTOR, CRITIC) or (own == REFERENCE and follows)


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

"""One rank's engines and training state, by trained policy and role; their checkpoints, and the versions for servers.

Roles are built from the config and the graph. `actor` and `critic` learn; `ref` is frozen or follows the actor;
teachers are frozen. Any other role that a graph names is a reward model, loaded from the `path` in the arguments of one
of its calls. Further trained policies have separate roles (`asyncrl.config.variants`), built by the same rules
with the policy's settings.

Versions of a policy are published to the servers as folders, or from this rank's memory (`Versions`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from asyncrl.api.picture import PlacedPicture
from asyncrl.comm.names import ACTOR
from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.run_dir import ANNOUNCED_DIR, WEIGHTS_DIR
from asyncrl.config.setting import Dtype
from asyncrl.config.variants import CRITIC, REFERENCE, SEPARATOR, config_of_policy, is_changing, policy_and_role
from asyncrl.master.graph import Graph
from asyncrl.trainer.engines.base import EngineLoader, PolicyEngine, TrainingEngine, engine_loader
from asyncrl.trainer.engines.optimizer import local
from asyncrl.trainer.functions.model_functions import TrainState
from asyncrl.trainer.messages import CollectWeights, Publish, SaveCheckpoint
from asyncrl.trainer.parallel.placement import Placement, engine_of
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.settings import ReferenceMode
from asyncrl.weights import publishing
from asyncrl.weights.checkpoints import CheckpointWriter, HostFolders, restore, restore_newest
from asyncrl.weights.folder_tensors import Published, Rounded
from asyncrl.weights.logprob_probe import LogprobProbe, probe_picture, probe_tokens, with_picture
from asyncrl.weights.publishing import SharedFiles
from asyncrl.weights.transports.base import TrainerEnd, weight_transport


@dataclass(frozen=True, eq=False)
class TrainingRank:
    """One rank's share of the training side.

    Attributes:
        engines: engines of the roles that this rank has a part of: the actor and those that the graph names.
        states: training state by trained policy; that of the run's own is "".
        critic_sharers: further policies whose critic is that of the run's own.
        changing: roles whose weights change, on any rank; a checkpoint holds them.
    """

    engines: dict[str, TrainingEngine]
    states: Mapping[str, TrainState]
    world: World
    changing: tuple[str, ...] = ()
    critic_sharers: Collection[str] = ()

    def engines_of(self, policy: str) -> Mapping[str, TrainingEngine]:
        """Return this rank's engines of a trained policy (empty: the run's own), by role as in the run's own policy."""
        return {role: self.engines[name] for role, name in self._named(policy, self.engines).items()}

    def roles_of(self, policy: str) -> Collection[str]:
        """Return the roles of a trained policy (empty: the run's own) on any rank, named as in the run's own policy."""
        return self._named(policy, self.world.placement.roles).keys()

    def _named(self, policy: str, roles: Iterable[str]) -> dict[str, str]:
        """Return the policy's roles among `roles`, by the role's name in the run's own policy."""
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
        """Return the language model of `role`.

        Raises:
            TypeError: that role is not a language model.
        """
        engine = self.engines[role]
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"role {role!r} is not a language model; only language models are published")
        return engine

    @cached_property
    def disk_writer(self) -> CheckpointWriter:
        """Writer of checkpoints on disk, which `save_checkpoint` begins."""
        return CheckpointWriter(self._changing(), self.changing, self.world.everyone)

    @cached_property
    def folders(self) -> HostFolders:
        """Folders of the in-memory checkpoint, one on each host."""
        return HostFolders(self.world.rank_hosts, self.world.worker, self.world.placement.actor.publisher)

    @cached_property
    def memory_writer(self) -> CheckpointWriter:
        """Writer of the in-memory checkpoint, independent of a checkpoint on disk that may be in progress."""
        hosts = self.folders if self.folders.spread else None
        return CheckpointWriter(self._changing(), self.changing, self.world.everyone, in_memory=True, hosts=hosts)

    def writer(self, in_memory: bool) -> CheckpointWriter:
        """Return the writer of in-memory checkpoints, or the one of checkpoints on disk."""
        return self.memory_writer if in_memory else self.disk_writer

    def save_checkpoint(self, order: SaveCheckpoint) -> None:
        """Copy the tensors of the checkpoint that `order` describes, and begin to write it. Called by all ranks.

        Raises:
            PeerFailed: another rank could not begin.
        """
        state = {"train_state": self._train_state(order), "master_state": order.master_state}
        self.writer(order.in_memory).begin(Path(order.path), version=order.version, state=state)

    def _train_state(self, order: SaveCheckpoint) -> dict[str, Any]:
        """Return the training state beside the models, of each policy from its publisher.

        Collective if the leading rank lacks a part of the state, or if several hosts write it: all write the same.
        """
        states = {name: state.state_dict() for name, state in self.states.items()}
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
            The master's state; None if there is no checkpoint, and then nothing is changed.

        Raises:
            ValueError: the checkpoint is of another model or graph.
        """
        return self._take(restore_newest(self._changing(), root, self.world.everyone))

    def load_memory_checkpoint(self, root: Path, *, invalid: bool) -> Any:
        """Restore the in-memory checkpoint that ranks stored in `root` on their hosts, like `load_checkpoint`.

        Args:
            invalid: True if a part of the checkpoint could not be stored on this host.

        Raises:
            MemoryCheckpointLost: a part of the checkpoint is missing.
        """
        everyone = self.world.everyone
        path = self.folders.agree(root, everyone, invalid=invalid)
        return None if path is None else self._take(restore(self._changing(), path, everyone))

    def _take(self, state: dict[str, Any] | None) -> Any:
        if state is None:
            return None
        stored = state["train_state"]
        for name, own in self.states.items():
            own.load_state_dict(stored["policies"][name] if name else stored)
        return state["master_state"]

    def _changing(self) -> dict[str, TrainingEngine]:
        return {role: self.engines[role] for role in self.changing if role in self.engines}


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
        (name, grid): make(own, position, device)
        for name, own in configs.items()
        for grid, position in world.positions.items()
    }
    for role in filter(world.hosts, roles):
        actor = engines.get(ACTOR)
        if role == REFERENCE and isinstance(actor, PolicyEngine) and _is_base_of_actor(config, world.placement):
            from asyncrl.trainer.model.lora import LoraReference  # only with model.lora

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
    return TrainingRank(engines, states, world, changing, config.critic_sharers)


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


class Versions:
    """This rank's part of publishing versions.

    Args:
        security: the servers' token and certificate.
        device: device of the rank.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        world: World,
        rank: TrainingRank,
        security: HttpSecurity | None,
        device: torch.device,
    ) -> None:
        self._config, self._run_dir, self._world, self._rank = config, run_dir, world, rank
        self._assets = publishing.tokenizer_assets(Path(str(config.model.path)))
        self._shared: dict[str, SharedFiles] = {}
        self._sequences: dict[str, tuple[list[tuple[int, ...]], PlacedPicture | None]] = {}
        """Of the probes, by role."""
        self._transport = weight_transport(config.manager.weight_transport)
        self.to_servers = TrainerEnd()
        """Sender of versions from memory to servers; used on the request server's loop."""
        if world.publishes:
            self.to_servers = self._transport.trainer_end(config, security, device)

    def publish(self, request: Publish) -> Path:
        """Make a version available, on disk if `to_disk`, and in memory if servers get it from there; return its
        folder.

        Called by all ranks of the role.
        """
        policy = self._rank.policy(request.role)
        if request.role not in self._sequences:
            self._sequences[request.role] = self._probed(policy)
        sequences, picture = self._sequences[request.role]
        with policy.on_device():
            probe = None
            if sequences:
                pictures = [*((),) * (len(sequences) - 1), (picture,)] if picture is not None else ()
                probe = LogprobProbe.of(sequences, policy.score_sequences(sequences, pictures), picture)
            chosen = self._config.model.publish_dtype  # the type in which versions are published
            published: Published = policy if chosen == Dtype.auto else Rounded(policy, getattr(torch, chosen))
            if not self._transport.needs_folders:
                owners = dict.fromkeys(
                    (spec.name for spec in published.published_specs()), self._world.placement.actor.publisher
                )
                self.to_servers.hold(request.version, published.gather(owners))
            if request.role not in self._shared:
                self._shared[request.role] = self._shared_files(policy)
            position = self._world.position(request.role)
            return publishing.publish(
                published,
                self._run_dir / (WEIGHTS_DIR if request.to_disk else ANNOUNCED_DIR),
                role=request.role,
                version=request.version,
                ranks=position.everyone,
                shared=self._shared[request.role] if request.to_disk else None,
                probe=probe,
                first_worker=position.grid.first,
            )

    def collect(self, request: CollectWeights) -> None:
        """Remove all versions but those that `request` keeps."""
        if self._world.worker == self._world.placement.grid(request.role).publisher:  # others may be writing one
            for root in (WEIGHTS_DIR, ANNOUNCED_DIR):
                publishing.collect(self._run_dir / root, request.role, request.keep)
        if self._world.publishes:
            self.to_servers.keep(request.keep)

    def _shared_files(self, policy: PolicyEngine) -> SharedFiles:
        """Return the files beside the weights, the same for every version of `policy`."""
        model = self._config.model
        if model.lora.rank:
            from asyncrl.trainer.model.lora import adapter_config
            from asyncrl.trainer.model.lora_checks import publishes_adapters

            if publishes_adapters(self._config):
                base, specs = str(Path(str(model.path))), policy.published_specs()
                return SharedFiles(adapter_config(model.lora, base, specs, policy.model_config))
        described = deepcopy(policy.model_config)
        if model.publish_dtype != Dtype.auto:
            described.dtype = getattr(torch, model.publish_dtype)
        return SharedFiles(described, self._assets)

    def _probed(self, policy: PolicyEngine) -> tuple[list[tuple[int, ...]], PlacedPicture | None]:
        """Return the sequences that probes of `policy` score, and the picture in the last of them if it has one. Empty
        if probes are off, or if the context leaves no room for one.
        """
        model_config = policy.model_config
        context = context_length(self._config, model_config.to_dict())
        vocabulary = model_config.get_text_config().vocab_size
        tokens = probe_tokens(vocabulary, context)
        if not tokens or self._config.manager.logprob_check_tolerance == 0:
            return [], None
        picture = probe_picture()
        transport = self._config.manager.weight_transport
        served = self._config.generation.engine.takes_pictures(transport, model_config.model_type)
        placeholders = policy.placeholders(picture) if served else []
        shown = with_picture(vocabulary, context, placeholders, picture) if placeholders else None
        return (tokens, None) if shown is None else ([*tokens, shown[0]], shown[1])

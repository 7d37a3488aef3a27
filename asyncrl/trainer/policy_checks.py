"""Checks of the training of `policies` that are trained beside the run's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.trained_policies import config_of_policy, policy_and_role, role_of_policy
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.types import TRAINED_ROLES, GraphError
from asyncrl.models.picture_rules import placeholder_in
from asyncrl.trainer.settings import RolePlacementConfig, RoleRanks, VisionMode

_TOGETHER = "all roles are where the actor is; leave parallel and ranks out"
_NO_GREEDY = "a greedy answer has no reward of its own for each; use another estimator"


def check(config: ExperimentConfig, of_policy: Callable[[ExperimentConfig], Iterator[str]]) -> Iterator[str]:
    """Yield an error message for each setting that trained policies cannot have: `setting=value: what; what to do`.

    Args:
        of_policy: yields those of the settings by which one policy is trained.
    """
    trainer = config.trainer
    if trainer.train_offset >= trainer.train_every:
        yield (
            f"trainer.train_offset={trainer.train_offset}: no version leaves this rest by trainer.train_every="
            f"{trainer.train_every}; use 0 to {trainer.train_every - 1}"
        )
    if not config.trained_policies:
        if trainer.train_every > 1:
            yield (
                f"trainer.train_every={trainer.train_every}: other steps would train nothing; use 1, or train another "
                "one of `policies` too"
            )
        return
    yield from _not_supported(config)
    for name in config.trained_policies:
        if name in TRAINED_ROLES:
            yield f"policies: {name!r}: it is a role of the run's own policy; give the trained policy another name"
        yield from _vocabulary(config, name)
        try:
            own = config_of_policy(config, name)
        except ConfigError as error:
            yield str(error)
            continue
        of_run = set(of_policy(config))
        yield from (f"policies: {name!r}: {message}" for message in of_policy(own) if message not in of_run)
        yield from _roles(config, name, own)


def _not_supported(config: ExperimentConfig) -> Iterator[str]:
    """Yield each setting of the run that does not go with several trained policies."""
    model, told = config.model, "with several trained `policies`"
    if model.lora.rank:
        yield f"model.lora.rank={model.lora.rank}: {told} all weights are trained; use 0"
    if config.trainer.score_ahead:
        yield f"trainer.score_ahead=true: {told} their samples are scored in the step; use false"
    if config.moe.replay_routing:
        yield f"moe.replay_routing=true: {told} choices of experts are not replayed; use false"
    if model.path is not None and model.vision != VisionMode.none and placeholder_in(model.path) is not None:
        yield f"model.path={model.path!r} takes pictures: {told} models read text; use model.vision=none"
    algorithm = config.algorithm
    placed: dict[str, RolePlacementConfig] = {
        "algorithm.reference": algorithm.reference,
        "algorithm.critic": algorithm.critic,
        **{f"algorithm.reward_models.{role}": each for role, each in algorithm.reward_models.items()},
    }
    for group, role in placed.items():
        if role.parallel is not None or role.ranks == RoleRanks.own:
            yield f"{group}: {told} {_TOGETHER}"
    if algorithm.advantage.name == "remax":
        yield f"algorithm.advantage='remax': {told} {_NO_GREEDY}"
    for setting, value in (("samples.replay", config.samples.replay), ("samples.only", config.samples.only)):
        if value:
            yield f"{setting}={value!r}: {told} samples are not recorded to be trained later; leave it out"


def _roles(config: ExperimentConfig, name: str, own: ExperimentConfig) -> Iterator[str]:
    """Yield what is not supported of the roles of the trained policy `name`, which has the settings `own`."""
    setting, algorithm = f"policies: {name!r}", own.algorithm
    for group, placed in (("algorithm.reference", algorithm.reference), ("algorithm.critic", algorithm.critic)):
        if placed.parallel is not None or placed.ranks == RoleRanks.own:
            yield f"{setting}: {group} has a layout of its own: {_TOGETHER}"
    if algorithm.advantage.name == "remax":
        yield f"{setting}: algorithm.advantage='remax': {_NO_GREEDY}"
    try:
        roles = {call.role for call in load_graph(config).calls if call.policy == name}
    except (GraphError, ConfigError):
        return  # which others say
    known = {role_of_policy(name, role) for role in ("actor", "ref")}
    for role in sorted(roles - known):
        yield (
            f"{setting}: algorithm.graph={algorithm.graph!r}: only the run's own policy has the role "
            f"{policy_and_role(config, role)[1]!r}; use grpo, reinforce or dapo"
        )


def _vocabulary(config: ExperimentConfig, name: str) -> Iterator[str]:
    """Yield a message if the policy's model has another number of tokens than the run's own."""
    path = next(policy.path for policy in config.policies if policy.name == name)
    sizes = [_vocab_size(each) for each in (config.model.path, path) if each is not None]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        yield (
            f"policies: {name!r}: path={path!r}: its vocabulary has {sizes[1]} tokens, and that of model.path="
            f"{config.model.path!r} {sizes[0]}; use a model with as many"
        )


def _vocab_size(path: str) -> int | None:
    try:
        size = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError):
        return None
    return size if isinstance(size, int) else None

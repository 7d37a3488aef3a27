"""Checks of the training of `policies` that are trained beside the run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.trained_policies import config_of_policy
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.call_graph import TRAINED_ROLES, GraphError
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.settings import AlgorithmConfig, VisionMode


def check(config: ExperimentConfig, of_policy: Callable[[ExperimentConfig], Iterator[str]]) -> Iterator[str]:
    """Yield an error message for each setting that trained policies cannot have: `setting=value: what; what to do`.

    Args:
        of_policy: yields the error messages about the settings that train one policy.
    """
    trainer = config.trainer
    if trainer.train_offset >= trainer.train_every:
        yield (
            f"trainer.train_offset={trainer.train_offset}: it is never the remainder of a version divided by "
            f"trainer.train_every={trainer.train_every}; use 0 to {trainer.train_every - 1}"
        )
    if not config.trained_policies:
        if trainer.train_every > 1:
            yield (
                f"trainer.train_every={trainer.train_every}: other steps would train nothing; use 1, or train another "
                "one of `policies` too"
            )
        return
    yield from _not_supported(config)
    yield from _algorithm("", config.algorithm)
    taken, of_run = _roles_of_run(config), set(of_policy(config))
    for name in config.trained_policies:
        if name in taken:
            yield f"policies: {name!r}: it is a role of the run's own policy; give the trained policy another name"
        yield from _vocabulary(config, name)
        try:
            own = config_of_policy(config, name)
            own = replace(own, trainer=replace(own.trainer, engine=engine_of(config)))  # one engine for all
        except GraphError:
            continue  # the launcher reports the error
        except ConfigError as error:
            yield from {str(error)} - of_run
            continue
        yield from (f"policies: {name!r}: {message}" for message in of_policy(own) if message not in of_run)
        yield from _algorithm(f"policies: {name!r}: ", own.algorithm)
    for name in config.critic_sharers:
        yield from _shared_critic(config, name)


def _shared_critic(config: ExperimentConfig, name: str) -> Iterator[str]:
    """Yield an error message for each reason why the policy `name` cannot share the run's own critic."""
    setting = f"policies: {name!r}: shared_critic=true"
    given = next(policy.algorithm for policy in config.policies if policy.name == name)
    if "critic" in given:
        yield f"{setting}: its critic has the settings of algorithm.critic; leave critic out of the policy's algorithm"
    try:
        calls = [call for call in load_graph(config).calls if call.role == "critic"]
    except (GraphError, ConfigError):
        return  # other checks report the error
    for policy, whose in (("", "algorithm.graph"), (name, "the policy's algorithm.graph")):
        functions = {call.function for call in calls if call.policy == policy}
        if not functions:
            yield f"{setting}: {whose} has no critic; use algorithm.graph=ppo with algorithm.advantage=gae"
        elif unknown := sorted(functions - {"critic_inf", "critic_train"}):
            yield (
                f"{setting}: {whose} calls the critic with {unknown[0]!r}, and only of critic_inf and critic_train is "
                "known which one changes it; use these, or a critic of its own"
            )


def _roles_of_run(config: ExperimentConfig) -> set[str]:
    """The names of roles that the run's own policy may have."""
    try:
        return {*TRAINED_ROLES, *load_graph(replace(config, policies=[])).roles()}
    except (GraphError, ConfigError):
        return {*TRAINED_ROLES}  # other checks report the error


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
    for setting, value in (("samples.replay", config.samples.replay), ("samples.only", config.samples.only)):
        if value:
            yield f"{setting}={value!r}: {told} samples are not recorded to be trained later; leave it out"


def _algorithm(whose: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield an error message for each setting of one policy's training that several trained policies cannot have."""
    if algorithm.advantage.name == "remax":
        yield (
            f"{whose}algorithm.advantage='remax': with several trained `policies` a greedy answer has no reward of its "
            "own for each; use another estimator"
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
        size = read_model_config(path).get("vocab_size")
    except (OSError, ValueError):
        return None
    return size if isinstance(size, int) else None

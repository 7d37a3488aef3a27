"""Checks of `policies`: whether agents can use them, and whether they can be trained beside the run's own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus

from asyncrl.comm.http_client import HttpError, HttpRefused
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import config_of_policy
from asyncrl.data.tokenizers import vocabulary, vocabulary_difference
from asyncrl.inference.checks import addresses
from asyncrl.inference.client import connect
from asyncrl.inference.messages import ModelInfo
from asyncrl.manager.settings import PolicyConfig, VersionPoolConfig
from asyncrl.master.graph import TRAINED_ROLES, GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.models.model_config import placeholder_in, read_model_config
from asyncrl.trainer import feature_checks
from asyncrl.trainer.checks import of_policy
from asyncrl.trainer.model import lora_checks
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.settings import AlgorithmConfig, VisionMode
from asyncrl.weights.transports.base import weight_transport

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    yield from _used(config)
    yield from _frozen_servers(config)
    if config.trained_policies:
        yield from _trained_beside(config)


def _used(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each policy that agents could not use."""
    if config.generation.engine.urls and any(policy.url is None for policy in config.policies):
        yield (
            f"policies: their servers are started, and {config.generation.engine.named('urls')} names servers that run "
            "already; leave the urls out, or give each policy its url"
        )
    if not config.system.shared_filesystem:
        yield (
            "policies: their weights are not brought to hosts that share no folder; use system.shared_filesystem=true"
        )
    named = [policy.name for policy in config.policies]
    for policy in config.policies:
        setting = f"policies: {policy.name!r}"
        if not _NAME.fullmatch(policy.name):
            yield f"{setting}: a name has letters, digits, _ and -, and begins with a letter; for example past"
        elif named.count(policy.name) > 1:
            yield f"{setting}: {named.count(policy.name)} policies have this name; give each its own"
        if policy.trained:
            yield from _trained(config, policy)
        elif _set_for_training(policy):
            yield (
                f"{setting}: {', '.join(_set_for_training(policy))}: only trained policies have "
                "this; set trained: true, or leave it out"
            )
        if policy.url is not None:
            yield from _url(config, policy, policy.url.rstrip("/"))
        elif policy.path is not None:
            yield from _folder(config, policy, policy.path)
        elif not policy.trained:
            yield from _versions(config, policy)


def _set_for_training(policy: PolicyConfig) -> list[str]:
    """Return the names of the settings that are set and that only a trained policy may have."""
    names = ("train_every", "train_offset", "optimizer", "algorithm", "parallel", "ranks", "shared_critic")
    return [name for name in names if getattr(policy, name) != getattr(PolicyConfig(), name)]


def _trained(config: ExperimentConfig, policy: PolicyConfig) -> Iterator[str]:
    """Yield an error message for each setting that a trained policy cannot have."""
    setting, transport = f"policies: {policy.name!r}", config.manager.weight_transport
    if policy.versions != VersionPoolConfig():
        yield f"{setting}: a trained policy is asked at its newest version; leave out versions or trained"
    if policy.train_offset >= policy.train_every:
        yield (
            f"{setting}: train_offset={policy.train_offset}: no version has this remainder modulo train_every="
            f"{policy.train_every}; use 0 to {policy.train_every - 1}"
        )
    if not weight_transport(transport).needs_folders:
        yield (
            f"{setting}: its weights are read from folders, which manager.weight_transport={transport!r} does not "
            "write; use weight_transport=disk"
        )


def _versions(config: ExperimentConfig, policy: PolicyConfig) -> Iterator[str]:
    transport, every = weight_transport(config.manager.weight_transport), policy.versions.every
    if not transport.needs_folders:
        yield (
            f"policies: {policy.name!r}: older versions are read from their folders, which manager.weight_transport="
            f"{transport.name!r} does not write; use weight_transport=disk"
        )
    if every >= config.total_train_steps:
        yield (
            f"policies: {policy.name!r}: versions.every={every}: no version would join the pool before the run ends, "
            f"after total_train_steps={config.total_train_steps}; use less"
        )


def _url(config: ExperimentConfig, policy: PolicyConfig, url: str) -> Iterator[str]:
    """Yield an error message for each setting that contradicts `url`, a server outside the run."""
    setting = f"policies: {policy.name!r}: url={url!r}"
    if policy.path is not None:
        yield f"{setting}: a server that runs already has its model; leave out url or path"
    if policy.trained:
        yield f"{setting}: a server outside the run is never updated; leave out url or trained"
    elif policy.versions != VersionPoolConfig():
        yield f"{setting}: a model that is never updated has no versions; leave out url or versions"
    if policy.servers != 1:
        yield f"{setting}: servers={policy.servers}: the run starts no server beside the one at url; leave servers out"
    engine = config.generation.engine
    if url in {own.rstrip("/") for own in engine.urls}:
        named = engine.named("urls")
        yield f"{setting}: the run updates that server, as {named} names it; leave it out of one of them"


def _folder(config: ExperimentConfig, policy: PolicyConfig, path: str) -> Iterator[str]:
    setting = f"policies: {policy.name!r}: path={path!r}"
    if policy.versions != VersionPoolConfig() and not policy.trained:
        yield f"{setting}: a model that is never updated has no versions; leave out path or versions"
    as_it_is = not policy.trained and config.generation.engine.loads_quantised
    faults = list(hugging_face_folder(f"policies: {policy.name!r}: path", path, quantised=as_it_is))
    yield from faults
    if not faults and config.model.path is not None and (difference := vocabulary_difference(config.model.path, path)):
        yield f"{setting}: {difference}"


def _frozen_servers(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that servers of `policies` at a URL may not support."""
    model, allowed = config.model, config.rollout.sampling.allowed_token_ids
    for policy in config.policies:
        if policy.url is None:
            continue
        setting = f"policies: {policy.name!r}: url"
        yield from addresses(setting, [policy.url], config.system)
        if allowed:
            yield (
                f"{setting}={policy.url!r}: rollout.sampling.allowed_token_ids={allowed!r} is not in SGLang's API, and "
                "that server would answer with any token; leave it out, or use path"
            )
        if model.path is not None and model.vision != VisionMode.none and placeholder_in(model.path) is not None:
            yield (
                f"{setting}={policy.url!r}: model.path={model.path!r} takes pictures, which a server of somebody "
                "else may not read; use model.vision=none, or path"
            )


def _trained_beside(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that policies trained beside the run's own cannot have."""
    yield from _refused_with_policies(config)
    yield from _algorithm_with_policies("", config.algorithm)
    taken, of_run = _roles_of_run(config), set(_of_training(config))
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
        yield from (f"policies: {name!r}: {message}" for message in _of_training(own) if message not in of_run)
        yield from _algorithm_with_policies(f"policies: {name!r}: ", own.algorithm)
    for name in config.critic_sharers:
        yield from _shared_critic(config, name)


def _of_training(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of a policy's training."""
    yield from of_policy(config)
    yield from lora_checks.check(config)
    yield from feature_checks.of_algorithm(config)


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


def _refused_with_policies(config: ExperimentConfig) -> Iterator[str]:
    """Yield each setting of the run that does not go with several trained policies."""
    model, several = config.model, "with several trained `policies`"
    if model.lora.rank:
        yield f"model.lora.rank={model.lora.rank}: {several} all weights are trained; use 0"
    if config.trainer.score_ahead:
        yield f"trainer.score_ahead=true: {several} their samples are scored in the step; use false"
    if config.moe.replay_routing:
        yield f"moe.replay_routing=true: {several} choices of experts are not replayed; use false"
    if model.path is not None and model.vision != VisionMode.none and placeholder_in(model.path) is not None:
        yield f"model.path={model.path!r} takes pictures: {several} models read text; use model.vision=none"
    for setting, value in (("samples.replay", config.samples.replay), ("samples.only", config.samples.only)):
        if value:
            yield f"{setting}={value!r}: {several} samples are not recorded to be trained later; leave it out"


def _algorithm_with_policies(whose: str, algorithm: AlgorithmConfig) -> Iterator[str]:
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


_LIMIT_S = 10.0


def check_served(config: ExperimentConfig) -> list[str]:
    """Ask each `url` of `policies` what it serves.

    Returns:
        Sentences for the user, about tokenizers that cannot be compared: a server reports only the folder of its
        tokenizer, which this machine may not have.

    Raises:
        ConfigError: a server does not answer, or its tokenizer is another than that of `model.path`, or cannot be
            compared although the policy is a teacher.
    """
    faults, notes, model = list[str](), list[str](), config.model.path
    teachers = {teacher.policy for teacher in config.algorithm.teachers}
    for policy in config.policies:
        if policy.url is None:
            continue
        setting = f"policies: {policy.name!r}: url={policy.url!r}"
        try:
            info = asyncio.run(_model_info(policy.url))
        except HttpError as error:
            faults.append(f"{setting}: {_what_to_do(error)}")
            continue
        folder = info.tokenizer_path or info.model_path
        unknown = ""
        if model is None or vocabulary(model) is None:
            unknown = f"model.path={model!r} has no tokenizer.json here"
        elif folder is None or vocabulary(folder) is None:
            unknown = f"the server names {folder!r}, which has no tokenizer.json here"
        if unknown and policy.name in teachers:
            faults.append(
                f"{setting}: a teacher scores the policy's tokens, so it needs the same tokenizer, and {unknown}; copy "
                "that folder to this machine, or use path"
            )
        elif unknown:
            notes.append(
                f"{setting}: its tokenizer was not compared with that of the run's model, as {unknown}. With another "
                "tokenizer it would read other text than the agent sent, so make sure that they are the same"
            )
        elif model is not None and folder is not None and (difference := vocabulary_difference(model, folder)):
            faults.append(f"{setting}: {difference}")
    if faults:
        raise ConfigError("\n".join(faults))
    return notes


async def _model_info(url: str) -> ModelInfo:
    """Return the model that the server at `url` names.

    Raises:
        HttpError: it does not take requests, or does not name its model.
    """
    async with connect(url, None) as client:
        await client.ready(timeout_s=_LIMIT_S)
        return await client.model_info()


def _what_to_do(error: HttpError) -> str:
    if isinstance(error, HttpRefused) and error.status == HTTPStatus.UNAUTHORIZED:
        return "the server asks for a token, and it gets none of the run; start it without --api-key"
    return f"no generation server answers there ({error}); start it first, or use path and the run starts one"

"""Optional: checks of the policies besides the run's own, `policies`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.tokenizers import vocabulary_difference
from asyncrl.manager.settings import PolicyConfig, VersionPoolConfig
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.weights.transports.base import weight_transport

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def check(config: ExperimentConfig) -> Iterator[str]:
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
    """Yield an error message for each setting that a trained policy cannot have. `trainer.checks` has the checks of its
    training.
    """
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

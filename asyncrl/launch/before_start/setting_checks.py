"""The settings of an experiment as it was loaded: names on the hub become folders, its length a number of steps. Then
each value is checked against its bounds, and all against each other by the packages' own rules.

A message reads `setting=value: what is wrong; what to do`.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, load_experiment, settings
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.setting import ConfigError, value_problems
from asyncrl.config.variants import config_of_policy
from asyncrl.data.settings import JSONL, PARQUET
from asyncrl.inference import checks as inference
from asyncrl.manager import checks as manager
from asyncrl.master import checks as master
from asyncrl.master.graph import GraphError, load_graph
from asyncrl.rollout import checks as rollout
from asyncrl.rollout.user_code.prompts import load_train_set
from asyncrl.runtime import checks as runtime
from asyncrl.trainer import checks as trainer


def complete(config: Config) -> None:
    """Resolve hub names and the length of an experiment as it was loaded, then check its settings and its graph.

    Raises:
        ConfigError: with the errors of the first of these steps that has any.
    """
    resolve_hub_names(config)
    resolve_length(config)
    validate(config)
    check_graph(config)


def resolve_length(config: Config) -> None:
    """Set `total_train_steps` to the number of steps in `total_epochs` epochs.

    Raises:
        ConfigError: the training set cannot be loaded, or has too few rows for a step.
    """
    if not isinstance(config, ExperimentConfig) or config.total_epochs is None or config.train_batch_size < 1:
        return
    rows = len(load_train_set(config))
    steps = int(config.total_epochs * rows / config.train_batch_size)
    if steps < 1:
        raise ConfigError(
            f"total_epochs={config.total_epochs:g}: of {rows} rows that is less than one step of "
            f"train_batch_size={config.train_batch_size}; use more epochs, or a smaller batch"
        )
    config.total_train_steps = steps


def check_graph(config: Config) -> None:
    """Build the training step's graph, which checks it.

    Raises:
        ConfigError: it is invalid; the message names the calls.
    """
    if isinstance(config, ExperimentConfig):
        try:
            load_graph(config)
        except GraphError as error:
            raise ConfigError(str(error)) from error


_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHECKS: tuple[Callable[[ExperimentConfig], Iterator[str]], ...] = (
    master.check,
    rollout.check,
    trainer.check,
    inference.check,
    manager.check,
    runtime.check,
    optional_problems,
)


def validate(config: Config) -> None:
    """Check values against their bounds and choices, and against each other.

    Raises:
        ConfigError: with every message, one per line.
    """
    messages = list(_fields(config))
    if isinstance(config, ExperimentConfig) and not messages:
        messages += _fields_of_policies(config)
    if not messages:
        messages += _names(config)
        if isinstance(config, ExperimentConfig):
            for check in _CHECKS:
                messages += check(config)
        else:
            messages += supervised_checks().check(config)
    if messages:
        raise ConfigError("\n".join(messages))


def supervised_checks() -> ModuleType:
    """Return the checks of supervised experiments, which are imported for these alone."""
    return import_module("asyncrl.trainer.supervised.checks")


def warnings(config: ExperimentConfig) -> list[str]:
    """Return warnings about valid settings with surprising effects, each as `setting=value: effect`."""
    return [*rollout.warnings(config), *trainer.warnings(config), *inference.warnings(config)]


def _fields(config: Config) -> Iterator[str]:
    for path, _, info in settings(type(config)):
        yield from value_problems(path, attrgetter(path)(config), info)


def _fields_of_policies(config: ExperimentConfig) -> Iterator[str]:
    """Yield the same for the settings of further trained policies."""
    for name in config.trained_policies:
        try:
            yield from (f"policies: {name!r}: {message}" for message in _fields(config_of_policy(config, name)))
        except ConfigError as error:
            yield str(error)


def _names(config: Config) -> Iterator[str]:
    names = {"experiment_name": config.experiment_name}
    if isinstance(config, ExperimentConfig):
        names["trial_name"] = config.trial_name
    for name, value in names.items():
        if not _SAFE_NAME.fullmatch(value):
            yield (
                f"{name}={value!r}: becomes a folder's name; use letters, digits, '.', '_' and '-', beginning "
                "with a letter or digit"
            )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        yield (
            f"TMPDIR={os.environ.get('TMPDIR', '')!r}: this user can write neither there nor to /tmp or /var/tmp, and "
            "processes make temporary files; set TMPDIR to a folder"
        )
    if not config.fileroot.strip():
        yield f"fileroot={config.fileroot!r}: names no folder; give one, for example ~/runs"
        return
    folder = Path(config.fileroot).expanduser() / config.experiment_name
    if isinstance(config, ExperimentConfig):
        folder /= config.trial_name
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # try to write: permission bits say nothing for root
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        yield f"fileroot={config.fileroot!r}: {existing} is not a folder one can write to ({reason}); choose another"


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_TAKEN = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*", "onnx/*"]
"""Weights in other formats than safetensors, which are often in the same folder."""


def resolve_hub_names(config: Config) -> None:
    """Replace each hub name in `config` by its folder, downloading it first if necessary, and `~` by the home folder.

    Raises:
        ConfigError: with every name that is neither a folder, nor in the cache, nor available from the hub.
    """
    messages = []
    for setting, kind, group in _named_by_path(config):
        value = group.path
        if value is None:
            continue
        if value.startswith("~"):
            group.path = str(Path(value).expanduser())
        if not is_hub_name(value):
            continue
        try:
            group.path = str(_folder(setting, kind, value))
        except ConfigError as error:
            messages.append(str(error))
    if messages:
        raise ConfigError("\n".join(messages))


def is_hub_name(value: str) -> bool:
    """True if `value` has the form `owner/name` and is neither a file nor below a folder of this machine."""
    path = Path(value).expanduser()
    return bool(_NAME.fullmatch(value)) and not value.endswith((JSONL, PARQUET)) and not path.parent.exists()


def _named_by_path(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield each setting that may hold a hub name, the kind of what it names, and the group that has it as `path`."""
    yield "model.path", "model", config.model
    yield "dataset.path", "dataset", config.dataset
    yield "eval.path", "dataset", config.eval
    if isinstance(config, ExperimentConfig):
        yield "algorithm.critic.path", "model", config.algorithm.critic
        yield "algorithm.reference.path", "model", config.algorithm.reference
        for number, teacher in enumerate(config.algorithm.teachers):
            yield f"algorithm.teachers[{number}].path", "model", teacher
        for number, each in enumerate(config.eval.sets):
            yield f"eval.sets[{number}].path", "dataset", each
        for number, source in enumerate(config.dataset.sources):
            yield f"dataset.sources[{number}].path", "dataset", source


def _folder(setting: str, kind: str, name: str) -> Path:
    """Return the folder of `name` in the hub's cache, downloaded if necessary.

    Raises:
        ConfigError: it is not available.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    given, instead = f"{setting}={name!r}", f"give the folder of a downloaded {kind}"

    def snapshot(local_files_only: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            name, repo_type=kind, ignore_patterns=_NOT_TAKEN, local_files_only=local_files_only
        )
        return Path(found)

    try:
        try:
            return snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            return snapshot(local_files_only=False)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{given}: the hub refuses it ({reason}); check the name and HF_TOKEN, or {instead}"
        ) from None
    except (OSError, ValueError) as error:  # no network, a full disk, a name that the hub does not have
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else 'no reason'}"
        raise ConfigError(
            f"{given}: no such folder, not in the hub's cache here, and the hub cannot be reached ({reason}); "
            f"{instead}, or start where the hub can be reached"
        ) from None


def experiment_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of an experiment's name, its settings and the folder of the user's experiments."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("experiment", help="name of an experiment")
    parser.add_argument("overrides", nargs="*", help="setting=value")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own experiments")
    return parser


def load_rl(args: argparse.Namespace, overrides: Sequence[str]) -> ExperimentConfig:
    """Return the experiment of reinforcement learning that `args` name, its hub names and its length resolved.

    Raises:
        ConfigError: a setting is wrong, a name is not available from the hub, or the experiment is a supervised one.
    """
    config = load_experiment(args.experiment, overrides, args.config_dir)
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(
            f"{args.experiment!r} is an experiment of supervised training; give one of reinforcement learning"
        )
    resolve_hub_names(config)
    resolve_length(config)
    return config

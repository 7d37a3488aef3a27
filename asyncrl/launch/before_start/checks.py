"""Checks of a whole config, before any process starts: each value against its bounds, then the packages' own rules.

A message reads `setting=value: what is wrong; what to do`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, settings
from asyncrl.config.setting import ConfigError, value_problems
from asyncrl.config.trained_policies import config_of_policy
from asyncrl.inference import checks as inference
from asyncrl.inference.encoder import checks as encoder
from asyncrl.manager import checks as manager
from asyncrl.master import checks as master
from asyncrl.observe import checks as observe
from asyncrl.plugins.chat import checks as chat
from asyncrl.plugins.tools import checks as tools
from asyncrl.rollout import checks as rollout
from asyncrl.runtime import checks as runtime
from asyncrl.trainer import checks as trainer
from asyncrl.trainer.supervised import checks as supervised

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROOMS: tuple[Callable[[ExperimentConfig], Iterator[str]], ...] = (
    master.check,
    rollout.check,
    encoder.check,
    tools.check,
    chat.check,
    trainer.check,
    inference.check,
    manager.check,
    observe.check,
    runtime.check,
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
            for check in _ROOMS:
                messages += check(config)
        else:
            messages += supervised.check(config)
    if messages:
        raise ConfigError("\n".join(messages))


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

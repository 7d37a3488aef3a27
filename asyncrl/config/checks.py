"""Checks of a whole config, before any process starts: each value against its bounds, then the rooms' own rules.

A message reads `setting=value: what is wrong; what to do`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import asyncrl.inference.settings
import asyncrl.manager.settings
import asyncrl.master.settings
import asyncrl.observe.settings
import asyncrl.plugins.chat.settings
import asyncrl.plugins.tools.settings
import asyncrl.rollout.settings
import asyncrl.runtime.settings
import asyncrl.trainer.settings
import asyncrl.trainer.supervised.settings
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, settings
from asyncrl.config.setting import ConfigError, not_a_choice

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROOMS = (
    asyncrl.master.settings,
    asyncrl.rollout.settings,
    asyncrl.plugins.tools.settings,
    asyncrl.plugins.chat.settings,
    asyncrl.trainer.settings,
    asyncrl.inference.settings,
    asyncrl.manager.settings,
    asyncrl.observe.settings,
    asyncrl.runtime.settings,
)


def validate(config: Config) -> None:
    """Check values against their bounds and choices, and against each other.

    Raises:
        ConfigError: with every message, one per line.
    """
    messages = list(_fields(config))
    if not messages:
        messages += _names(config)
        if isinstance(config, ExperimentConfig):
            for room in _ROOMS:
                messages += room.check(config)
        else:
            messages += asyncrl.trainer.supervised.settings.check(config)
    if messages:
        raise ConfigError("\n".join(messages))


def warnings(config: ExperimentConfig) -> list[str]:
    """What a valid config does that its reader may not expect, each as `setting=value: what follows`."""
    return [*asyncrl.rollout.settings.warnings(config), *asyncrl.trainer.settings.warnings(config)]


def _fields(config: Config) -> Iterator[str]:
    for path, _, info in settings(type(config)):
        value, unit = attrgetter(path)(config), f" {info.unit}" if info.unit else ""
        if info.choices and value not in info.choices:
            yield not_a_choice(path, value, info.choices)
        if isinstance(value, (int, float)) and info.minimum is not None and value < info.minimum:
            yield f"{path}={value}: below the least allowed value; use {info.minimum:g}{unit} or more"
        if isinstance(value, (int, float)) and info.maximum is not None and value > info.maximum:
            yield f"{path}={value}: above the greatest allowed value; use {info.maximum:g}{unit} or less"


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
    root = Path(config.fileroot).expanduser()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"fileroot={config.fileroot!r}: {existing} is not a folder one can write to; choose another fileroot"

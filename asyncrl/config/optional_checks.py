"""Checks of optional features: each lies beside its feature, and is imported only where a setting asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from types import ModuleType

from asyncrl.config.experiment import ExperimentConfig

CHECKS = {
    "rollout.chat": "asyncrl.chat.checks",
    "tools": "asyncrl.plugins.tools.checks",
    "mcp": "asyncrl.plugins.tools.checks",
    "policies": "asyncrl.launch.before_start.policy_checks",
    "algorithm.teachers": "asyncrl.trainer.teacher_checks",
    "generation.guests": "asyncrl.colocated.checks",
}
"""By the setting that asks for it: a module whose `check` yields messages on settings; its `code_problems`, if it has
them, yield those on user code.
"""


def optional_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of the optional features that `config` has."""
    for module in _asked_for(config):
        yield from module.check(config)


def optional_code_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem of the user's code that these features call."""
    for module in _asked_for(config):
        if hasattr(module, "code_problems"):
            yield from module.code_problems(config)


def _asked_for(config: ExperimentConfig) -> list[ModuleType]:
    default = ExperimentConfig()
    asked = [module for name, module in CHECKS.items() if attrgetter(name)(config) != attrgetter(name)(default)]
    return [import_module(module) for module in dict.fromkeys(asked)]

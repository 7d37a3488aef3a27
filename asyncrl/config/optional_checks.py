"""Checks of optional features: each lies beside its feature, and is imported only where a setting asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter

from asyncrl.config.experiment import ExperimentConfig

CHECKS = {
    "rollout.chat": "asyncrl.chat.checks",
    "tools": "asyncrl.plugins.tools.checks",
    "mcp": "asyncrl.plugins.tools.checks",
    "policies": "asyncrl.launch.before_start.policy_checks",
    "algorithm.teachers": "asyncrl.trainer.teacher_checks",
    "generation.guests": "asyncrl.colocated.checks",
}
"""By the setting that asks for it: a module whose `check` yields messages on settings, `code_problems` on user code."""


def optional_problems(config: ExperimentConfig, kind: str = "check") -> Iterator[str]:
    """Yield an error message for each problem that `kind` finds, of the features that `config` has."""
    default = ExperimentConfig()
    asked = [module for name, module in CHECKS.items() if attrgetter(name)(config) != attrgetter(name)(default)]
    for module in dict.fromkeys(asked):
        yield from getattr(import_module(module), kind, lambda config: ())(config)

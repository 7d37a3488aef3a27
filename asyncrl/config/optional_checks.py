"""Checks of optional features: each lies beside its feature, and is imported only where a setting asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter

from asyncrl.config.experiment import ExperimentConfig

POLICY_CHECKS = "asyncrl.launch.before_start.policy_checks"
CHECKS = {
    "asyncrl.trainer.feature_checks": (
        "algorithm",
        "model.attn_implementation",
        "model.publish_dtype",
        "moe",
        "profile",
        "rollout.filters",
        "rollout.shaping",
        "optimizer.muon_lr",
        "optimizer.name",
        "trainer.activations_on",
        "trainer.compile",
        "trainer.train_every",
        "trainer.train_offset",
    ),
    "asyncrl.trainer.model.lora_checks": ("model.lora",),
    "asyncrl.observe.checks": ("logging.wandb_project", "samples"),
    "asyncrl.chat.checks": ("rollout.chat",),
    "asyncrl.plugins.tools.checks": ("mcp", "tools"),
    POLICY_CHECKS: ("policies",),
    "asyncrl.colocated.checks": ("generation.guests",),
}
"""Modules whose `check` yields messages on settings, `code_problems` on user code, with the settings that ask for them.
"""


def optional_problems(config: ExperimentConfig, kind: str = "check") -> Iterator[str]:
    """Yield an error message for each problem that `kind` finds, of the features that `config` has."""
    default = ExperimentConfig()
    for module, settings in CHECKS.items():
        if any(attrgetter(name)(config) != attrgetter(name)(default) for name in settings):
            yield from getattr(import_module(module), kind, lambda config: ())(config)

"""Checks of optional features: each lies beside its feature, and is imported only where a setting asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Final, Literal

from asyncrl.config.experiment import ExperimentConfig

POLICY_CHECKS: Final = "asyncrl.launch.before_start.policy_checks"
_TOOLS: Final = "asyncrl.plugins.tools.checks"
_TRAINER: Final = "asyncrl.trainer.feature_checks"
CHECKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "check": {
        _TRAINER: (
            "algorithm",
            "model.attn_implementation",
            "model.publish_dtype",
            "moe",
            "optimizer.muon_lr",
            "optimizer.name",
            "profile",
            "rollout.filters",
            "rollout.shaping",
            "trainer.activations_on",
            "trainer.compile",
            "trainer.train_every",
            "trainer.train_offset",
        ),
        "asyncrl.trainer.model.lora_checks": ("model.lora",),
        "asyncrl.observe.checks": ("logging.wandb_project", "samples"),
        "asyncrl.chat.checks": ("rollout.chat",),
        "asyncrl.rollout.conversation_checks": ("rollout.endpoint.conversations",),
        _TOOLS: ("mcp", "tools"),
        POLICY_CHECKS: ("policies",),
        "asyncrl.colocated.checks": ("generation.colocated",),
    },
    "code_problems": {_TOOLS: ("mcp", "tools")},
    "other_tokenizers": {_TRAINER: ("algorithm",)},
}
"""By function: the modules that have it, each with the settings that ask for it."""


def optional_problems(
    config: ExperimentConfig, function: Literal["check", "code_problems", "other_tokenizers"] = "check"
) -> Iterator[str]:
    """Yield an error message for each problem that `function` finds, of the features that `config` has.

    Args:
        function: `check` of settings, `code_problems` of user code, `other_tokenizers` once the base model exists.
    """
    default = ExperimentConfig()
    for module, settings in CHECKS[function].items():
        if any(attrgetter(name)(config) != attrgetter(name)(default) for name in settings):
            yield from getattr(import_module(module), function)(config)

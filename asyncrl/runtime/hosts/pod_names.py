"""Names of a run's Kubernetes objects, and checks of these names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig

LAUNCHER = "launcher"
"""Name of the launcher's own host within object names; `system.hosts` gives it no name."""
_LONGEST_NAME = 63
_SUFFIX = "-0-0-abcde"
"""Suffix that JobSet and Job append to a host's name for its pod."""


def run_name(config: ExperimentConfig) -> str:
    """Return the name of the run's objects: experiment and trial as a DNS label."""
    return f"{config.experiment_name}-{config.trial_name}".lower().replace("_", "-").replace(".", "-")


def name_faults(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each name that Kubernetes would refuse."""
    for host in config.system.hosts:
        name = f"{run_name(config)}-{host.name or LAUNCHER}"
        if host.name == LAUNCHER or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
            yield (
                f"system.hosts: {host.name!r} makes a pod {name!r}; with kubernetes the names of experiment, trial and "
                f"hosts consist of a-z, 0-9 and -, begin with a letter, and {LAUNCHER!r} is the launcher's own host"
            )
        if len(name + _SUFFIX) > _LONGEST_NAME:
            yield f"system.hosts: the name of pod {name!r} is longer than Kubernetes takes; shorten trial_name"

"""Processes in the pods of a JobSet (`asyncrl.runtime.hosts.manifests`), one pod a host.

A pod's program is its agent, which finds the launcher by the run's folder. The launcher runs in the pod of its own
host; `--dry-run` prints the Kubernetes objects to apply.
"""

from __future__ import annotations

from asyncrl.runtime.hosts.host_agents import AgentBackend
from asyncrl.runtime.settings import HostConfig


class Backend(AgentBackend):
    """Starts processes in the pods of a JobSet."""

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return nothing: Kubernetes starts the agent."""
        return []

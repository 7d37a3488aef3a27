"""Processes in the pods of a JobSet (`asyncrl.runtime.hosts.manifests`), one pod a host.

A pod's program is its agent, which finds the launcher by the run's folder. The launcher runs in the pod of its own
host; `--dry-run` prints the Kubernetes objects to apply.
"""

from __future__ import annotations

from asyncrl.config.run_dir import AGENTS_FILE
from asyncrl.runtime.hosts.host_agents import AgentBackend
from asyncrl.runtime.settings import HostConfig


class Backend(AgentBackend):
    """Starts processes in the pods of a JobSet."""

    async def listen(self) -> None:
        """See the base class. The pods read the URL."""
        await super().listen()
        aside = self.run_dir / f".{AGENTS_FILE}"
        aside.write_text(self.url)
        aside.replace(self.run_dir / AGENTS_FILE)

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return nothing: Kubernetes starts the agent."""
        return []

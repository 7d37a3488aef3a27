"""Processes in the pods of a JobSet (`asyncrl.runtime.hosts.manifests`), one pod a host, started by the pods' own
program (`asyncrl.runtime.hosts.pod_agent`).

The launcher runs in the pod of its own host; `--dry-run` prints the Kubernetes objects to apply.
"""

from __future__ import annotations

import sys

from asyncrl.runtime.hosts import pod_carrier
from asyncrl.runtime.hosts.remote_workers import RemoteBackend
from asyncrl.runtime.planning.worker_plan import WorkerPlan


class Backend(RemoteBackend):
    """Starts processes in the pods of a JobSet."""

    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """Return the carrier of a process in the host's current pod.

        `command` is unused: the pod's agent has the supervisor.
        """
        asked = [str(self.run_dir), plan.host.name, str(self.config.system.start_timeout_s), command[0]]
        return [sys.executable, "-I", "-S", pod_carrier.__file__, *asked]

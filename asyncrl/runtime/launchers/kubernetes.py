"""Processes in the pods of a JobSet (`asyncrl.runtime.hosts.manifests`), one pod a host, by `kubectl exec` from the
first.

The launcher runs in the pod of its own host; `--dry-run` prints the objects that make it so.
"""

from __future__ import annotations

import sys

from asyncrl.runtime.hosts import kubectl_carrier
from asyncrl.runtime.hosts.manifests import CONTAINER
from asyncrl.runtime.hosts.pod_names import job_name
from asyncrl.runtime.hosts.remote import RemoteBackend
from asyncrl.runtime.worker_plan import WorkerPlan


class Backend(RemoteBackend):
    """Starts processes in the pods of a JobSet."""

    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """`kubectl exec` without a terminal, which would echo its input, in whichever pod the host has now."""
        system, job = self.config.system, job_name(self.config, plan.host.name)
        waiting = [sys.executable, "-I", "-S", kubectl_carrier.__file__, job, CONTAINER, str(system.start_timeout_s)]
        return [*waiting, f"--namespace={system.kubernetes.namespace}", *self.arguments, "--", *command]

"""Processes on the nodes of a Slurm allocation, a step (`srun`) for each node. Run it inside an allocation: `salloc`,
`sbatch`.

The step has the node's cores and as many GPUs as the host's `gpus`, which Slurm chooses. They are dealt out to the
processes there.
"""

from __future__ import annotations

import os

from asyncrl.runtime.hosts.host_agents import AgentBackend
from asyncrl.runtime.settings import HostConfig


class Backend(AgentBackend):
    """Starts processes on the nodes of a Slurm allocation."""

    deals_gpus = True

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return the `srun` of one task on one node, so that the step ends exactly when the task does."""
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--unbuffered", "--input=0", "--quiet"]
        step += [f"--job-name=asyncrl-{host.name}", "--overlap"]  # the step of a lost agent may still be there
        step += [f"--gres=gpu:{len(host.gpus)}" if host.gpus else "--gres=none"]
        if "SLURM_JOB_ID" not in os.environ:  # the step is a job of its own; else it has what the job has on the node
            step += [f"--cpus-per-task={self.cores(host)}"]
        return [*step, *self.arguments, "--", *command]

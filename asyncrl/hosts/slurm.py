"""Processes on the nodes of a Slurm allocation, a step (`srun`) for each node. Run it inside an allocation: `salloc`,
`sbatch`.

The step has the node's cores and as many GPUs as the host's `gpus`, which Slurm chooses. They are dealt out to the
processes there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from asyncrl.comm.waits import TOOL_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.agent_backend import AgentBackend
from asyncrl.runtime.settings import HostConfig

_ALLOCATED = "SLURM_JOB_NODELIST"


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

    @staticmethod
    def check_hosts(config: ExperimentConfig) -> list[str]:
        """Check that Slurm answers and knows the hosts; in an allocation, that they are of it."""
        if shutil.which("srun") is None:
            raise ConfigError(
                "system.launcher='slurm': there is no srun on PATH; start the run on a node of the Slurm cluster"
            )
        ask, of = ["sinfo", "--Node", "--noheader", "--format=%N"], "of this cluster"
        if allocated := os.environ.get(_ALLOCATED):
            ask, of = ["scontrol", "show", "hostnames", allocated], f"in this allocation ({allocated})"
        try:
            nodes = set(_printed(ask).split())
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"system.launcher='slurm': `{' '.join(ask)}` fails ({error}); start the run where Slurm answers"
            ) from error
        faults = [
            f"system.hosts[{number}].name={host.name!r}: no node {of}, which are "
            f"{', '.join(sorted(nodes)) or 'none'}; give one of them"
            for number, host in enumerate(config.system.hosts)
            if host.name and host.name not in nodes
        ]
        if faults:
            raise ConfigError("\n".join(faults))
        return []


def _printed(command: Sequence[str]) -> str:
    """Return the output of `command`."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3 * TOOL_S, check=False)
    if ended.returncode:
        raise OSError((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
    return ended.stdout

"""Processes on the nodes of a Slurm allocation, a step (`srun`) each. Run it inside an allocation: `salloc`, `sbatch`.

A process with GPUs is a step with its own GPUs, which Slurm chooses and hides from other steps; `gpus` of a host is
their number. Processes without GPUs share their node's cores (`--overlap`).
"""

from __future__ import annotations

from asyncrl.runtime.hosts.remote_workers import RemoteBackend
from asyncrl.runtime.planning.worker_plan import WorkerPlan


class Backend(RemoteBackend):
    """Starts processes on the nodes of a Slurm allocation."""

    deals_gpus = True

    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """Return the `srun` of one task on one node, so that the step ends exactly when the task does."""
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={plan.host.name}", "--unbuffered", "--input=0"]
        step += [f"--job-name={plan.name}", f"--cpus-per-task={plan.resources.threads}", "--quiet"]
        gpus = len(plan.resources.gpus)
        step += ["--exact", f"--gres=gpu:{gpus}"] if gpus else ["--overlap", "--gres=none"]
        return [*step, *self.arguments, "--", *command]

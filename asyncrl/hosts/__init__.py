"""Optional: a run on several hosts. A run on one box imports nothing of this package.

It enters by the table of launchers (`LAUNCHERS` in `asyncrl.runtime.settings`), with a back end each for ssh, Slurm,
Ray and Kubernetes. These say only how the agent of a host comes to run. `agent_backend` does the rest on the launcher's
side and `agent` on the other host; `link` has their messages.
"""

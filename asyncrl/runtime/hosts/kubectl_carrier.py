"""Runs a command in the pod of a Job, once there is one that runs, with this standard input and these outputs.

    python -I -S kubectl_carrier.py JOB CONTAINER LIMIT_S [KUBECTL'S ARGUMENT ...] -- COMMAND [ARGUMENT ...]

`kubectl exec` itself does not wait for an image to be pulled, or for a lost pod's successor to start. Becomes kubectl,
so ends as that does: as the command, or with 1. Ends with 255 where no pod runs within LIMIT_S. Run by path: it imports
the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

_LOST = 255  # asyncrl.runtime.exit_codes.EXIT_LOST; nothing of asyncrl can be imported here
_LOOK_EVERY_S = 1.0
_ANSWER_LIMIT_S = 30.0


def main(job: str, container: str, limit_s: float, arguments: list[str], command: list[str]) -> int:
    """See the module's docstring; returns only where there is no pod."""
    deadline = time.monotonic() + limit_s
    while (pod := _running(job, arguments)) is None:
        if time.monotonic() > deadline:
            print(f"no pod of job {job} has run within {limit_s:g} s: kubectl describe job {job}", flush=True)
            return _LOST
        time.sleep(_LOOK_EVERY_S)
    os.execvp("kubectl", ["kubectl", "exec", "-i", *arguments, pod, f"--container={container}", "--", *command])


def _running(job: str, arguments: list[str]) -> str | None:
    """The newest pod of `job` that runs and stays; None if none does, or nobody could tell."""
    asked = ["kubectl", "get", "pods", f"--selector=batch.kubernetes.io/job-name={job}", "--output=json", *arguments]
    try:
        told = subprocess.run(
            asked, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_ANSWER_LIMIT_S, check=True
        )
    except subprocess.SubprocessError as error:
        print(error, flush=True)
        return None
    pods = [
        (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])
        for pod in json.loads(told.stdout)["items"]
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return max(pods)[1] if pods else None


if __name__ == "__main__":
    end = sys.argv.index("--")
    name, inside, limit, *own = sys.argv[1:end]
    os._exit(main(name, inside, float(limit), own, sys.argv[end + 1 :]))

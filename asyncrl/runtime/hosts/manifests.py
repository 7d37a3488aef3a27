"""The Kubernetes object of a run: one JobSet whose pods are the hosts.

Each host of `system.hosts` becomes a Job of one pod, because hosts need different resources. A JobSet holds the Jobs
together: it ends the others once the launcher's Job has ended, and fails if that one fails. The launcher's pod runs the
user's command. The other pods run a program by which the launcher starts processes there
(`asyncrl.runtime.hosts.agent`). No pod has an account of the cluster. If such a program ends, the kubelet restarts
it; if a pod is lost, the Job replaces it; then the launcher restarts its processes.

Each pod reads its own address from its environment, and publishes it in the run's folder or name resolution. So there
is no service. Secrets are named, not copied: the launcher has them in its environment, and passes that on over the
connections. Arguments of the command that have a secret are in a Secret of their own, and the command refers to them.
Pure, so that `--dry-run` can print all this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import run_dir_of
from asyncrl.config.secrets import hide
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_FAILED
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE, WorkerPlan
from asyncrl.runtime.settings import HostConfig
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S

LAUNCHER = "launcher"
"""Name of the launcher's own host within object names; `system.hosts` gives it no name."""
_LONGEST_NAME = 63
_SUFFIX = "-0-0-abcde"
"""Suffix that JobSet and Job append to a host's name for its pod."""
CONTAINER = "asyncrl"
_REPLACED = 1000
"""Limit on replacements of a host's pod."""
_LAUNCHER_REPLACED = 20
_HOST_GRACE_S = 60
"""For a host's processes to end and free its GPUs: the supervisors' own limits and some."""


def manifests(config: ExperimentConfig, plans: Sequence[WorkerPlan], command: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects that make the run.

    Args:
        config: the experiment.
        plans: its processes.
        command: arguments of `asyncrl.launch` by which the launcher's pod runs it.
    """
    name, settings = run_name(config), config.system.kubernetes
    metadata = {"name": name, "namespace": settings.namespace, "labels": _labels(config)}
    named = {f"ASYNCRL_ARGUMENT_{place}": text for place, text in enumerate(command)}
    secret = {variable: text for variable, text in named.items() if hide(text) != text}
    # Kubernetes puts a variable's value in place of $(NAME), and $ in place of $$.
    given = [f"$({variable})" if variable in secret else text.replace("$", "$$") for variable, text in named.items()]
    jobs = [_job(config, host, plans, given, [_arguments(name)] if secret else []) for host in config.system.hosts]
    job_set = {
        "replicatedJobs": jobs,
        "network": {"enableDNSHostnames": False},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
        "failurePolicy": {"maxRestarts": 0},
    }
    its = metadata | {"name": _arguments(name)}
    return [
        *([{"apiVersion": "v1", "kind": "Secret", "metadata": its, "stringData": secret}] if secret else []),
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": job_set},
    ]


def _arguments(name: str) -> str:
    """Return the name of the Secret with arguments of the run `name`."""
    return f"{name}-arguments"


def _labels(config: ExperimentConfig) -> dict[str, str]:
    return {"app.kubernetes.io/name": "asyncrl", "app.kubernetes.io/instance": run_name(config)}


def _job(
    config: ExperimentConfig,
    host: HostConfig,
    plans: Sequence[WorkerPlan],
    command: Sequence[str],
    secrets: Sequence[str],
) -> dict[str, Any]:
    """Return an entry of the JobSet's `replicatedJobs`."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _REPLACED if host.name else _LAUNCHER_REPLACED,
        "template": {"metadata": {"labels": _labels(config)}, "spec": _pod(config, host, plans, command, secrets)},
    }
    if not host.name:  # what failed would fail again; what the cluster took away did not fail
        final = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_FAILED, EXIT_CONFIG]}
        taken = [{"type": "DisruptionTarget", "status": "True"}]
        rules = [{"action": "FailJob", "onExitCodes": final}, {"action": "Ignore", "onPodConditions": taken}]
        spec["podFailurePolicy"] = {"rules": rules}
    return {"name": host.name or LAUNCHER, "replicas": 1, "template": {"spec": spec}}


def _pod(
    config: ExperimentConfig,
    host: HostConfig,
    plans: Sequence[WorkerPlan],
    command: Sequence[str],
    secrets: Sequence[str],
) -> dict[str, Any]:
    settings = config.system.kubernetes
    leads = not host.name
    threads = sum(plan.resources.threads for plan in plans if plan.host.name == host.name)
    amounts: dict[str, str | int] = {"memory": host.memory} if host.memory else {}
    amounts |= {settings.gpu_resource: len(host.gpus)} if host.gpus else {}
    python = host.python or "python"
    agent = ["-m", "asyncrl.runtime.hosts.agent", str(run_dir_of(config)), host.name]
    own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [python, *(["-m", "asyncrl.launch", *command] if leads else agent)],
        "env": [{"name": HOST_VARIABLE, "valueFrom": own_address}],
        "envFrom": [{"secretRef": {"name": secret}} for secret in (*settings.secrets, *secrets)] if leads else [],
        "resources": {"requests": {"cpu": host.cpus or max(1, threads)} | amounts, "limits": amounts},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": claim, "mountPath": path} for claim, path in settings.claims.items()),
        ],
    }
    container |= {"workingDir": settings.folder} if settings.folder else {}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    volumes += [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in settings.claims]
    pod: dict[str, Any] = {
        "restartPolicy": "Never" if leads else "OnFailure",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _HOST_GRACE_S + (int(SAVE_LIMIT_S) if leads else 0),
        "shareProcessNamespace": True,  # its process 1 reaps orphans; signals keep their effect
        "containers": [container],
        "volumes": volumes,
    }
    pod |= {"imagePullSecrets": [{"name": name} for name in settings.pull_secrets]} if settings.pull_secrets else {}
    pod |= {"nodeSelector": dict(settings.node_selector)} if settings.node_selector else {}
    pod |= {"tolerations": [dict(each) for each in settings.tolerations]} if settings.tolerations else {}
    return pod | ({"runtimeClassName": settings.runtime_class} if settings.runtime_class else {})


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

"""Processes in the pods of Kubernetes, one pod a host, and the JobSet that makes these pods.

Each host of `system.hosts` becomes a Job of one pod, because hosts need different resources. A JobSet holds the Jobs
together: it ends the others once the launcher's Job has ended, and fails if that one fails. The launcher's pod runs the
user's command. The program of the other pods is the agent of their host (`asyncrl.hosts.agent`), which finds
the launcher by the run's folder. No pod has an account of the cluster. If an agent ends, the kubelet restarts it; if a
pod is lost, the Job replaces it; then the launcher restarts its processes.

Each pod reads its own address from its environment, and publishes it in the run's folder or name resolution. So there
is no service. Secrets are named, not copied: the launcher has them in its environment, and passes that on over the
connections. Arguments of the command that have a secret are in a Secret of their own, and the command refers to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import AGENTS_FILE, run_dir_of
from asyncrl.config.secrets import hide
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.agent_backend import AgentBackend
from asyncrl.runtime.plan import HOST_VARIABLE, WorkerPlan
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_FAILED, HostConfig
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

    @staticmethod
    def faults(config: ExperimentConfig) -> Iterator[str]:
        """Yield what is missing for `system.launcher=kubernetes`."""
        settings = config.system.kubernetes
        if not settings.image:
            yield "system.kubernetes.image='': the pods need one; give an image with python and asyncrl"
        if not config.system.encrypt:
            yield "system.encrypt=false: the pods start what the run's secret asks for; leave it true with kubernetes"
        if config.system.launcher_args:
            yield f"system.launcher_args={config.system.launcher_args}: kubernetes takes none; leave it out"
        if not any(Path(config.fileroot).is_relative_to(path) for path in settings.claims.values()):
            yield (
                f"fileroot={config.fileroot!r}: the pods share what a persistent volume claim holds, and none of "
                f"system.kubernetes.claims={dict(settings.claims)} is mounted there; give {{CLAIM: FOLDER}}"
            )
        if not config.system.shared_filesystem and config.system.hosts:
            yield (
                "system.shared_filesystem=false: system.launcher=kubernetes: the pods share their volume claims; leave "
                "system.shared_filesystem out"
            )
        if config.system.hosts and all(host.name for host in config.system.hosts):
            yield "system.hosts: with kubernetes the launcher needs a pod of its own; add a host without a name"
        for host in config.system.hosts:
            if host.address:
                yield f"system.hosts: {host.address!r}: a pod's address is the cluster's to choose; leave address out"
        for host in config.system.hosts:
            name = f"{run_name(config)}-{host.name or LAUNCHER}"
            if host.name == LAUNCHER or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
                yield (
                    f"system.hosts: {host.name!r} makes a pod {name!r}; with kubernetes the names of experiment, trial "
                    f"and hosts consist of a-z, 0-9 and -, begin with a letter, and {LAUNCHER!r} is the launcher's own "
                    "host"
                )
            if len(name + _SUFFIX) > _LONGEST_NAME:
                yield f"system.hosts: the name of pod {name!r} is longer than Kubernetes takes; shorten trial_name"

    @staticmethod
    def finds_address(host: HostConfig) -> bool:
        """See the base class."""
        return True

    @staticmethod
    def check_host() -> None:
        """See the base class."""
        if HOST_VARIABLE not in os.environ:
            raise ConfigError(
                "system.launcher='kubernetes': the launcher runs in a pod; --dry-run prints what makes that, for "
                "`kubectl apply -f -`"
            )

    @staticmethod
    def objects(config: ExperimentConfig, plans: Sequence[WorkerPlan], command: Sequence[str]) -> list[dict[str, Any]]:
        """See the base class."""
        return manifests(config, plans, command)


def manifests(config: ExperimentConfig, plans: Sequence[WorkerPlan], command: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects that make the run.

    Args:
        config: the experiment.
        plans: its processes.
        command: arguments of `asyncrl.launch` by which the launcher's pod runs it.
    """
    name, settings = run_name(config), config.system.kubernetes
    metadata = {"name": name, "namespace": settings.namespace, "labels": _labels(config)}
    named = {f"ASYNCRL_ARGUMENT_{index}": text for index, text in enumerate(command)}
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
    agent = ["-m", "asyncrl.hosts.agent", str(run_dir_of(config)), host.name]
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

"""The Kubernetes objects of a run, against Kubernetes' own schemas; unknown fields are refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.kubernetes import Backend, manifests
from asyncrl.launch.previews import dry_run
from asyncrl.runtime.checks import check
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.settings import HostConfig

validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: pip install -e '.[dev]'").validate

VERSION = "1.34"
JOB_SET: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string"},
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "template": {"type": "object", "required": ["spec"]},
                        },
                    },
                },
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                    },
                },
                "successPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["operator"],
                    "properties": {
                        "operator": {"enum": ["All", "Any"]},
                        "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                    },
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"maxRestarts": {"type": "integer"}, "rules": {"type": "array"}},
                },
            },
        },
    },
}
"""What is used of JobSet's definition; its templates of Jobs are Kubernetes' own, and checked as such."""


def a_run() -> ExperimentConfig:
    config = ExperimentConfig(experiment_name="math_grpo", trial_name="t1", fileroot="/data/runs")
    config.checkpoint.in_memory = True
    config.generation.servers = 2
    system = config.system
    system.launcher = "kubernetes"
    system.kubernetes.image = "registry.example/asyncrl:1"
    system.kubernetes.namespace = "training"
    system.kubernetes.claims = {"shared": "/data"}
    system.kubernetes.secrets = ["api-keys"]
    system.hosts = [
        HostConfig(runs=["master_worker", "model_worker", "gserver_manager"], gpus=["0"], memory="64Gi"),
        HostConfig(name="servers", runs=["generation_server"], gpus=["0", "1"], cpus=16),
        HostConfig(name="rollouts", runs=["rollout_worker"]),
    ]
    return config


def objects_of(config: ExperimentConfig) -> list[dict[str, Any]]:
    return manifests(config, plan_workers(config), ["math_grpo", "system.launcher=kubernetes"])


def check_objects(objects: list[dict[str, Any]]) -> None:
    """Raise where the API server would refuse one of these, as far as schemas tell."""
    for each in objects:
        if each["kind"] != "JobSet":
            validate(each, VERSION, strict=True)
            continue
        jsonschema.validate(each, JOB_SET)
        for job in each["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
            validate(whole, VERSION, strict=True)


def jobs_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {job["name"]: job["template"]["spec"] for job in objects[-1]["spec"]["replicatedJobs"]}


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_the_objects_are_what_kubernetes_takes() -> None:
    assert list(check(a_run())) == []
    objects = objects_of(a_run())
    assert [each["kind"] for each in objects] == ["JobSet"]
    check_objects(objects)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda objects: objects[0]["spec"].update(restarts=1),
        lambda objects: objects[0]["spec"]["successPolicy"].update(operator="Some"),
        lambda objects: jobs_of(objects)["servers"].update(backoff=1),
        lambda objects: container_of(jobs_of(objects)["servers"]).update(volumes=[]),
        lambda objects: container_of(jobs_of(objects)["launcher"])["env"][0].update(value=1),
    ],
)
def test_the_schemas_refuse_what_kubernetes_would(spoil: Callable[[list[dict[str, Any]]], None]) -> None:
    objects = copy.deepcopy(objects_of(a_run()))
    spoil(objects)
    with pytest.raises(Exception, match=r"not valid under any of|unexpected|is not one of|is not of type"):
        check_objects(objects)


def test_each_host_is_a_pod_with_its_own_cores_gpus_and_memory() -> None:
    jobs = jobs_of(objects_of(a_run()))
    asked = {name: container_of(job)["resources"] for name, job in jobs.items()}
    launcher, servers, rollouts = asked["launcher"], asked["servers"], asked["rollouts"]
    assert launcher["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert servers == {"requests": {"cpu": 16, "nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 2}}
    assert rollouts == {"requests": {"cpu": 1}, "limits": {}}
    for name, job in jobs.items():
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == ("Never" if name == "launcher" else "OnFailure")  # schemas let any word pass
        assert pod["terminationGracePeriodSeconds"] >= 60  # 0 would force deletion while GPUs are held
        assert job["completionMode"] == "Indexed"
        assert {"name": "shared", "mountPath": "/data"} in container_of(job)["volumeMounts"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]


def test_no_pod_has_an_account_and_only_the_launchers_has_the_secrets_and_decides_the_end() -> None:
    objects = objects_of(a_run())
    jobs = jobs_of(objects)
    may = {name: job["template"]["spec"]["automountServiceAccountToken"] for name, job in jobs.items()}
    assert may == {"launcher": False, "servers": False, "rollouts": False}
    given = {name: container_of(job)["envFrom"] for name, job in jobs.items()}
    assert given == {"launcher": [{"secretRef": {"name": "api-keys"}}], "servers": [], "rollouts": []}
    assert container_of(jobs["launcher"])["command"][2:] == [
        "asyncrl.launch",
        "math_grpo",
        "system.launcher=kubernetes",
    ]
    assert objects[-1]["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["launcher"]}
    assert jobs["launcher"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    agent = ["python", "-m", "asyncrl.hosts.agent", "/data/runs/math_grpo/t1", "servers"]
    assert container_of(jobs["servers"])["command"] == agent


TYPED = ["math_grpo", "agent.args={api_key: s3cr3t, price: $(COST) $$}", "logging.wandb_key=w4ndb"]


def expanded(command: list[str], variables: dict[str, str]) -> list[str]:
    """The command as the kubelet runs it."""
    return [
        re.sub(r"\$\$|\$\((\w+)\)", lambda found: variables.get(found[1], found[0]) if found[1] else "$", text)
        for text in command
    ]


def test_secrets_that_were_typed_are_in_a_secret_and_the_launcher_still_gets_them() -> None:
    secret, jobs = manifests(a_run(), plan_workers(a_run()), TYPED)
    check_objects([secret, jobs])
    assert "s3cr3t" not in str(jobs)
    assert "w4ndb" not in str(jobs)
    launcher = container_of(jobs_of([jobs])["launcher"])
    assert {"secretRef": {"name": secret["metadata"]["name"]}} in launcher["envFrom"]
    assert expanded(launcher["command"], secret["stringData"])[3:] == TYPED
    assert "math_grpo" not in secret["stringData"].values()


def test_a_terminal_shows_no_secret_of_the_objects_and_a_pipe_has_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dry_run(a_run(), TYPED)
    assert "api_key: s3cr3t" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    dry_run(a_run(), TYPED)
    shown = capsys.readouterr().out
    assert "s3cr3t" not in shown
    assert "api_key: (hidden), price: $(COST)" in shown


def test_pods_are_placed_and_their_image_is_pulled_as_the_settings_say() -> None:
    config = a_run()
    settings = config.system.kubernetes
    settings.pull_secrets, settings.node_selector, settings.runtime_class = ["registry"], {"pool": "gpus"}, "nvidia"
    settings.tolerations, settings.gpu_resource = [{"key": "gpu", "operator": "Exists"}], "amd.com/gpu"
    assert list(check(config)) == []
    objects = objects_of(config)
    check_objects(objects)
    for job in jobs_of(objects).values():
        pod = job["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "gpus"}, "nvidia")
        assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert container_of(jobs_of(objects)["servers"])["resources"]["limits"] == {"amd.com/gpu": 2}


def test_a_run_without_a_secret_or_with_arguments_of_a_command_is_refused() -> None:
    config = a_run()
    config.system.launcher_args = ["--context=mine"]
    config.system.encrypt = False
    messages = "\n".join(check(config))
    assert "system.launcher_args=['--context=mine']: kubernetes takes none" in messages
    assert "system.encrypt=false: the pods start what the run's secret asks for" in messages


def test_names_of_pods_are_such_as_kubernetes_takes() -> None:
    for name, fault in (
        ("Box", "makes a pod"),
        ("launcher", "makes a pod"),
        ("b" * 50, "is longer than Kubernetes takes"),
    ):
        config = a_run()
        config.system.hosts[1].name = name
        assert [fault in message for message in check(config)] == [True], name


@pytest.mark.parametrize(
    ("setting", "value", "fault"),
    [
        ("image", "", "system.kubernetes.image=''"),
        ("claims", {"shared": "/mnt"}, "fileroot='/data/runs'"),
        ("claims", {}, "fileroot='/data/runs'"),
    ],
)
def test_what_the_pods_cannot_do_without_is_asked_for(setting: str, value: Any, fault: str) -> None:
    config = a_run()
    setattr(config.system.kubernetes, setting, value)
    (message,) = check(config)
    assert message.startswith(fault)


def test_an_address_and_a_run_without_a_launchers_pod_are_refused() -> None:
    config = a_run()
    config.system.hosts[1].address = "10.0.0.2"
    config.system.hosts[0].name = "trainer"
    messages = "\n".join(check(config))
    assert "'10.0.0.2': a pod's address is the cluster's to choose" in messages
    assert "the launcher needs a pod of its own" in messages


def test_the_launcher_runs_in_a_pod_which_has_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRL_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"^system\.launcher='kubernetes': the launcher runs in a pod; --dry-run"):
        Backend.check_host()
    monkeypatch.setenv("ASYNCRL_HOST", "10.0.0.1")
    Backend.check_host()


SETTINGS = (
    "async_ppo",
    "system.launcher=kubernetes",
    "trial_name=t1",
    "fileroot=/data/runs",
    "system.kubernetes.image=asyncrl:1",
    "system.kubernetes.claims={shared: /data}",
    "system.hosts=[{runs: [master_worker, model_worker, gserver_manager]},"
    "{name: far, runs: [generation_server, rollout_worker]}]",
)


def launch(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "asyncrl.launch", *SETTINGS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)


def test_a_dry_run_prints_what_kubectl_applies_and_a_run_out_of_a_pod_says_so(warm_python: str) -> None:
    printed = launch(warm_python, "--dry-run")
    assert printed.returncode == 0, printed.stderr
    objects = list(yaml.safe_load_all(printed.stdout))
    check_objects(objects)
    assert container_of(jobs_of(objects)["launcher"])["command"] == ["python", "-m", "asyncrl.launch", *SETTINGS]
    assert "#   generation_server/0  on far, " in printed.stdout
    refused = launch(warm_python)
    assert refused.returncode == 2
    assert "system.launcher='kubernetes': the launcher runs in a pod; --dry-run prints" in refused.stderr

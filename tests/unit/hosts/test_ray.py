"""Requests of the ray back end, without a cluster; with one: tests/e2e/test_hosts_ray.py."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.ray import Backend, HostRequest, address_of, ambiguous_gpus
from asyncrl.runtime import backends
from asyncrl.runtime.checks import check
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.settings import HostConfig

ABSENT = "system.launcher='ray': Ray is not installed; pip install 'asyncrl[ray]', in the cluster's version"


def a_run() -> ExperimentConfig:
    config = ExperimentConfig()
    config.generation.servers = 2
    config.rollout.workers = 3
    system = config.system
    system.launcher = "ray"
    system.hosts = [
        HostConfig(address="10.0.0.1", runs=["master_worker", "model_worker", "gserver_manager"], gpus=["0"]),
        HostConfig(name="servers", runs=["generation_server"], gpus=["0", "1"], cpus=8),
        HostConfig(name="rollouts", address="10.0.0.3", runs=["rollout_worker"]),
    ]
    return config


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(backends, "adopt_orphans", lambda: None)  # of the test's own process
    write_run_config(a_run(), tmp_path)
    return Backend(tmp_path)


def test_where_ray_is_missing_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    assert list(check(a_run())) == [ABSENT]


def test_hosts_need_no_address_but_the_launchers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    config = a_run()
    assert list(check(config)) == []
    config.system.hosts[0].address = ""
    (message,) = check(config)
    assert message.startswith("system.hosts[0].address=''")
    config.system.launcher = "ssh"
    assert len(list(check(config))) == 2


def test_the_address_of_the_cluster_is_all_that_ray_is_told() -> None:
    assert [address_of([]), address_of(["--address=auto"]), address_of(["--address=h:1"])] == ["auto", "auto", "h:1"]
    for arguments in (["--num-cpus=4"], ["--address=a", "--address=b"], ["auto"]):
        config = a_run()
        config.system.launcher_args = arguments
        faults = [message for message in check(config) if message.startswith("system.launcher_args")]
        assert len(faults) == 1, arguments


def test_a_cluster_that_does_not_answer_is_refused_before_the_run(unused_port: int) -> None:
    config = a_run()
    config.system.launcher_args = [f"--address=127.0.0.1:{unused_port}"]
    with pytest.raises(ConfigError, match=r"no Ray cluster answers there \(Connection refused\)"):
        Backend.check_hosts(config)
    for arguments in ([], ["--address=local"]):
        config.system.launcher_args = arguments
        assert Backend.check_hosts(config) == []


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_each_host_asks_for_its_cores_and_gpus(backend: Backend) -> None:
    assert backend.host_requests() == [
        HostRequest("", "", 0, 1),  # the launcher's own: the node that this is
        HostRequest("servers", "", 8, 2),
        HostRequest("rollouts", "10.0.0.3", 3, 0),
    ]


def test_a_part_of_the_gpus_of_the_launchers_own_host_is_refused() -> None:
    hosts = [HostRequest("", "", 0, 2), HostRequest("servers", "", 8, 4)]
    assert ambiguous_gpus(hosts, 2) is None
    fault = ambiguous_gpus(hosts, 8)
    assert fault is not None
    assert "2 of the 8 GPUs" in fault
    assert ambiguous_gpus(hosts[1:], 8) is None


def test_a_process_is_told_which_of_its_hosts_gpus_are_its_own(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_HOST", "10.0.0.1")
    plans = {plan.name: plan for plan in plan_workers(a_run())}
    for name, gpus in (("generation_server/1", [1]), ("rollout_worker/0", None)):
        start = backend.order_of(plans[name], 1)
        assert start.gpus == gpus
        visible = [entry for entry in start.environment if entry.startswith(b"CUDA_VISIBLE_DEVICES=")]
        assert visible == ([] if gpus else [b"CUDA_VISIBLE_DEVICES="])  # Ray says which, or none at all
        # that of the launcher's host is not theirs
        assert not [entry for entry in start.environment if entry.startswith(b"ASYNCRL_HOST=")]

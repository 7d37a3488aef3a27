"""Which processes a config asks for, and what each may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.kinds import SHARED_CPU_NICENESS
from asyncrl.runtime.last_step import trains_elsewhere
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.settings import HostConfig, SystemConfig, check
from asyncrl.runtime.worker_plan import WorkerPlan
from asyncrl.trainer.settings import RoleRanks


def plans_of(config: ExperimentConfig, gpus: int) -> dict[str, WorkerPlan]:
    return {plan.name: plan for plan in plan_workers(config, tuple(map(str, range(gpus))))}


def test_on_the_cpu_training_goes_before_everything_else() -> None:
    config = ExperimentConfig()
    config.trainer.parallel = "d2"
    niceness = {name: plan.resources.niceness for name, plan in plans_of(config, gpus=0).items()}
    assert niceness == {
        "model_worker/0": 0,
        "model_worker/1": 0,
        "generation_server/0": SHARED_CPU_NICENESS,
        "rollout_worker/0": SHARED_CPU_NICENESS,
        "gserver_manager/0": SHARED_CPU_NICENESS,
        "master_worker/0": SHARED_CPU_NICENESS,
    }


def test_training_on_a_gpu_needs_no_precedence() -> None:
    assert not any(plan.resources.niceness for plan in plans_of(ExperimentConfig(), gpus=2).values())


@pytest.mark.parametrize(
    ("gpus", "trainer", "servers"),
    [(4, ["0"], ["1,2", "3,1"]), (2, ["0"], ["1", "1"]), (1, ["0"], ["0", "0"]), (0, [""], ["", ""])],
)
def test_training_ranks_take_the_first_gpus_and_servers_the_others(
    gpus: int, trainer: list[str], servers: list[str]
) -> None:
    config = ExperimentConfig()
    config.generation.servers = 2
    config.generation.sglang.tensor_parallel = 2
    plans = plans_of(config, gpus)

    def visible(kind: str) -> list[str]:
        return [plan.environment()["CUDA_VISIBLE_DEVICES"] for plan in plans.values() if plan.kind == kind]

    assert visible("model_worker") == trainer
    assert visible("generation_server") == servers
    assert visible("rollout_worker") == [""]


def test_every_rank_of_every_role_is_a_worker_with_a_gpu_of_its_own() -> None:
    config = ExperimentConfig()
    config.trainer.parallel = "d2t2p2"
    config.algorithm.graph = "ppo"
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = "d2t2", RoleRanks.own
    plans = plans_of(config, gpus=16)
    workers = [plan for plan in plans.values() if plan.kind == "model_worker"]
    assert [plan.resources.gpus for plan in workers] == [(str(gpu),) for gpu in range(12)]
    assert plans["generation_server/0"].resources.gpus == ("12",)


def test_the_gpus_keep_the_names_that_they_were_chosen_by() -> None:
    plans = {plan.name: plan for plan in plan_workers(ExperimentConfig(), ("6", "GPU-1a2b"))}
    assert plans["model_worker/0"].resources.gpus == ("6",)
    assert plans["generation_server/0"].resources.gpus == ("GPU-1a2b",)


def several_hosts(**away: list[str]) -> ExperimentConfig:
    """Training and control on the launcher's own host; `away` names what runs on others."""
    config = ExperimentConfig()
    config.system.launcher, config.trainer.parallel, config.rollout.workers = "ssh", "d2", 3
    config.system.hosts = [HostConfig(address="10.0.0.1", runs=["master_worker", "model_worker", "gserver_manager"])]
    config.system.hosts += [
        HostConfig(name, f"10.0.0.{number}", kinds, ["0", "1"]) for number, (name, kinds) in enumerate(away.items(), 2)
    ]
    return config


def test_processes_go_to_the_hosts_that_run_their_kind_in_blocks() -> None:
    config = several_hosts(b=["generation_server", "rollout_worker"], c=["rollout_worker", "generation_server"])
    config.generation.servers = 3
    plans = plans_of(config, gpus=4)
    assert {name: (plan.host.name, plan.resources.gpus) for name, plan in plans.items()} == {
        "model_worker/0": ("", ("0",)),
        "model_worker/1": ("", ("1",)),
        "generation_server/0": ("b", ("0",)),
        "generation_server/1": ("b", ("1",)),
        "generation_server/2": ("c", ("0",)),
        "rollout_worker/0": ("b", ()),
        "rollout_worker/1": ("b", ()),
        "rollout_worker/2": ("c", ()),
        "gserver_manager/0": ("", ()),
        "master_worker/0": ("", ()),
    }
    assert plans["rollout_worker/2"].command(Path("/run"))[3:8] == [
        *("rollout_worker", "2", "--incarnation", "0", "--host")
    ]


def test_servers_take_what_the_ranks_of_their_own_host_leave() -> None:
    config = several_hosts(b=["model_worker", "generation_server"], c=["rollout_worker"])
    config.system.hosts[0].runs.remove("model_worker")
    config.system.hosts[1].gpus = ["0", "1", "2"]
    plans = plans_of(config, gpus=0)
    assert [plans[f"model_worker/{index}"].resources.gpus for index in range(2)] == [("0",), ("1",)]
    assert plans["generation_server/0"].resources.gpus == ("2",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda system: system.hosts.clear(), "system.hosts=[]: system.launcher=ssh needs to know the hosts"),
        (lambda system: setattr(system, "launcher", "local"), "system.launcher='local': starts"),
        (
            lambda system: setattr(system.hosts[1], "address", ""),
            "system.hosts[1].address='': the other",
        ),
        (lambda system: system.hosts[1].runs.append("rollout_wroker"), "did you mean 'rollout_worker'"),
        (lambda system: system.hosts[1].runs.remove("rollout_worker"), "none runs rollout_worker; add it"),
        (lambda system: system.hosts[1].runs.append("gserver_manager"), "2 hosts run gserver_manager"),
        (lambda system: setattr(system.hosts[1], "name", ""), "is there 2 times; join the entries"),
        (lambda system: setattr(system, "encrypt", False), "system.encrypt=false: between hosts anybody"),
    ],
)
def test_hosts_that_make_no_run_are_refused(change: Callable[[SystemConfig], None], told: str) -> None:
    config = several_hosts(b=["generation_server", "rollout_worker"])
    assert list(check(config)) == []
    change(config.system)
    assert any(told in problem for problem in check(config)), list(check(config))


def test_ranks_may_be_on_several_hosts_and_the_last_step_is_kept_there() -> None:
    config = several_hosts(b=["generation_server", "rollout_worker", "model_worker"])
    assert config.checkpoint.keep_last_step
    assert list(check(config)) == []
    assert trains_elsewhere(config)
    assert not trains_elsewhere(several_hosts(b=["generation_server", "rollout_worker"]))


@pytest.mark.parametrize("hosts", [False, True])
def test_plaintext_on_a_network_is_asked_for_twice(hosts: bool) -> None:
    config = several_hosts(b=["generation_server", "rollout_worker"]) if hosts else ExperimentConfig()
    if not hosts:
        config.system.host = "0.0.0.0"
    config.system.encrypt = False
    assert [told for told in check(config) if "ask twice with system.unencrypted_network=true" in told]
    config.system.unencrypted_network = True
    assert not [told for told in check(config) if "encrypt" in told]

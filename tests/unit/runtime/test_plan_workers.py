"""Processes that a config asks for, and the resources that each may use."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.runtime.checks import check
from asyncrl.runtime.plan import GPU_ALLOCATOR, MALLOC, WorkerPlan, brings_inputs, plan_workers, staging_hosts
from asyncrl.runtime.settings import HostConfig, SystemConfig
from asyncrl.runtime.trials.memory_checkpoint import trains_elsewhere
from asyncrl.trainer.settings import RoleRanks


def plans_of(config: ExperimentConfig, gpus: int) -> dict[str, WorkerPlan]:
    return {plan.name: plan for plan in plan_workers(config, tuple(map(str, range(gpus))))}


def test_colocated_servers_are_on_the_gpus_of_the_training_ranks() -> None:
    config = ExperimentConfig()
    config.trainer.parallel, config.generation.servers, config.generation.colocated = "d2", 3, "all"
    plans = plans_of(config, gpus=4)
    on = {name: plan.resources.gpus for name, plan in plans.items() if plan.kind in (MODEL_WORKER, GENERATION_SERVER)}
    assert on == {
        "model_worker/0": ("0",),
        "model_worker/1": ("1",),
        "generation_server/0": ("0",),
        "generation_server/1": ("1",),
        "generation_server/2": ("0",),
    }
    config.generation.colocated = "2"
    colocated = [plans_of(config, gpus=4)[f"generation_server/{index}"].resources.gpus for index in range(3)]
    assert colocated == [("2",), ("0",), ("1",)]
    config.trainer.device = Device.cpu
    assert plans_of(config, gpus=4)["generation_server/2"].resources.gpus == ("2",)


@pytest.mark.parametrize("others", [10, 0])
def test_on_the_cpu_training_goes_before_everything_else_unless_told_otherwise(others: int) -> None:
    config = ExperimentConfig()
    assert config.system.niceness == 10
    config.system.niceness = others
    config.trainer.parallel = "d2"
    niceness = {name: plan.resources.niceness for name, plan in plans_of(config, gpus=0).items()}
    assert niceness == {
        "model_worker/0": 0,
        "model_worker/1": 0,
        "generation_server/0": others,
        "rollout_worker/0": others,
        "gserver_manager/0": others,
        "master_worker/0": others,
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
    config.generation.backend, config.generation.servers = "sglang", 2
    config.generation.sglang.tensor_parallel = 2
    plans = plans_of(config, gpus)

    def visible(kind: str) -> list[str]:
        return [plan.environment()["CUDA_VISIBLE_DEVICES"] for plan in plans.values() if plan.kind == kind]

    assert visible("model_worker") == trainer
    assert visible("generation_server") == servers
    assert visible("rollout_worker") == [""]


@pytest.mark.parametrize(
    ("args", "each"),
    [
        ({"pp_size": 2}, 4),
        ({"--pipeline-parallel-size": 2, "dp-size": 2}, 8),
        ({"dp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_a_server_gets_a_gpu_for_each_of_sglangs_ranks(args: dict[str, object], each: int) -> None:
    config = ExperimentConfig()
    config.generation.backend = "sglang"
    config.generation.sglang.tensor_parallel, config.generation.sglang.args = 2, args
    config.generation.servers = 2
    plans = plans_of(config, gpus=1 + 2 * each)
    first, second = plans["generation_server/0"].resources.gpus, plans["generation_server/1"].resources.gpus
    assert [*first, *second] == [str(gpu) for gpu in range(1, 1 + 2 * each)]
    assert len(first) == len(second) == each


def test_hosts_get_servers_by_the_gpus_that_training_leaves_there() -> None:
    config = ExperimentConfig()
    config.generation.backend = "sglang"
    config.generation.sglang.tensor_parallel, config.generation.sglang.args = 1, {"pp_size": 2}
    config.trainer.parallel = "d2"
    servers = [GENERATION_SERVER]
    config.system.hosts = [
        HostConfig("a", "10.0.0.1", runs=[*servers, MODEL_WORKER], gpus=list("0123")),
        HostConfig("b", "10.0.0.2", runs=servers, gpus=list("01234567")),
        HostConfig("c", "10.0.0.3", runs=servers, gpus=["0"]),
    ]
    for count, placed in {5: "abbbb", 2: "ab", 10: "aabbbbbbbb"}.items():
        config.generation.servers = count
        plans = [plan for plan in plan_workers(config, ()) if plan.kind == GENERATION_SERVER]
        assert "".join(plan.host.name for plan in plans) == placed
    config.generation.device = Device.cpu  # nothing to go by: each host gets as many
    config.generation.servers = 3
    plans = [plan for plan in plan_workers(config, ()) if plan.kind == GENERATION_SERVER]
    assert "".join(plan.host.name for plan in plans) == "abc"


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


def test_processes_on_gpus_number_them_by_bus_and_let_segments_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    config = ExperimentConfig()

    def set_for(kind: str, gpus: int = 2) -> tuple[str, str | None]:
        environment = plans_of(config, gpus)[f"{kind}/0"].environment()
        return environment["CUDA_DEVICE_ORDER"], environment.get("PYTORCH_ALLOC_CONF")

    grow = "expandable_segments:True,pinned_max_round_threshold_mb:64"
    assert set_for("model_worker") == set_for("generation_server") == ("PCI_BUS_ID", grow)
    assert set_for("rollout_worker") == set_for("model_worker", gpus=0) == ("PCI_BUS_ID", None)
    config.generation.backend = "sglang"
    assert set_for("generation_server") == ("PCI_BUS_ID", None), "SGLang's kernels share memory between GPUs"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert set_for("model_worker") == ("FASTEST_FIRST", None), "the user's own choice stays"


@pytest.mark.parametrize("setting", [pair.partition(":")[0] for pair in GPU_ALLOCATOR.split(",")])
def test_torch_knows_each_setting_of_the_allocator(setting: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):  # it passes over what it does not know
        torch._C._accelerator_setAllocatorSettings(f"{setting}:no value")


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
    ("change", "reported"),
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
def test_hosts_that_make_no_run_are_refused(change: Callable[[SystemConfig], None], reported: str) -> None:
    config = several_hosts(b=["generation_server", "rollout_worker"])
    assert list(check(config)) == []
    change(config.system)
    assert any(reported in problem for problem in check(config)), list(check(config))


def own_disks() -> ExperimentConfig:
    """Generation servers on two other hosts, which share no folder."""
    config = several_hosts(c=["generation_server"], b=["generation_server"])
    system = config.system
    system.hosts[0].runs.append("rollout_worker")
    system.hosts[1].fileroot, system.shared_filesystem, config.generation.servers = "/scratch/runs", False, 3
    system.name_resolve, system.name_resolve_root = NameBackend.etcd3, "10.0.0.1:2379"
    return config


def test_encoder_servers_take_the_gpus_after_training_and_generation_on_the_hosts_that_are_named() -> None:
    config = several_hosts(b=["generation_server"])
    config.system.hosts = []
    config.rollout.encoder.servers = 2
    assert plans_of(config, gpus=4)["encoder_server/0"].resources.gpus == (), "it computes on the CPU"
    config.rollout.encoder.gpus, config.generation.servers = 1, 2
    assert [plans_of(config, gpus=6)[f"encoder_server/{n}"].resources.gpus for n in range(2)] == [("4",), ("5",)]
    assert [plans_of(config, gpus=3)[f"encoder_server/{n}"].resources.gpus for n in range(2)] == [("2",), ("2",)]
    config.rollout.encoder.servers = 0
    assert "encoder_server/0" not in plans_of(config, gpus=5)

    config = own_disks()
    config.rollout.encoder.servers = 1
    assert any("none runs encoder_server" in problem for problem in check(config))
    config.system.hosts[1].runs.append("encoder_server")
    assert any("runs: encoder_server reads its encoder" in problem for problem in check(config))
    config.system.shared_filesystem = True
    assert plans_of(config, gpus=2)["encoder_server/0"].host.name == config.system.hosts[1].name


def test_hosts_with_disks_of_their_own_have_a_staging_server_each_the_launchers_first() -> None:
    config = own_disks()
    plans = plans_of(config, gpus=2)
    staging = [plans[f"staging_server/{index}"] for index in range(3)]
    assert [plan.host.name for plan in staging] == ["", "b", "c"]
    assert "staging_server/3" not in plans
    run_dir = ["--run-dir", f"/scratch/runs/{config.experiment_name}/{config.trial_name}"]
    assert staging[2].command(Path("/run"))[-4:-2] == run_dir
    assert plans["generation_server/0"].command(Path("/run"))[-4:-2] == run_dir
    assert staging[1].command(Path("/run"))[-4:-2] == ["--run-dir", "/run"]
    assert not [name for name in plans_of(several_hosts(b=["generation_server"]), 0) if name.startswith("staging")]


def test_rollout_workers_may_be_on_hosts_with_disks_of_their_own_and_what_they_read_is_brought_there() -> None:
    config = own_disks()
    assert not brings_inputs(config)
    config.system.hosts.append(HostConfig(name="d", address="10.0.0.4", runs=["rollout_worker"], fileroot="/d"))
    assert list(check(config)) == []
    assert brings_inputs(config)
    assert [host.name for host in staging_hosts(config)] == ["", "b", "c", "d"]
    assert plans_of(config, gpus=2)["staging_server/3"].run_dir.startswith("/d/")
    config.system.shared_filesystem = True
    assert not brings_inputs(config)


def set_to(path: str, value: object) -> Callable[[ExperimentConfig], None]:
    def change(config: ExperimentConfig) -> None:
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, config), name, value)

    return change


def adopts_a_server(config: ExperimentConfig) -> None:
    config.generation.backend = "sglang"
    config.generation.sglang.urls = ["http://10.0.0.9:30000"]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (set_to("system.hosts", []), "system.hosts is empty"),
        (set_to("system.launcher", "kubernetes"), "the pods share their volume claims"),
        (set_to("system.name_resolve", NameBackend.file), "system.name_resolve='file': names are entries of a folder"),
        (lambda config: setattr(config.system.hosts[0], "name", "a"), "system.hosts has no entry without a name"),
        *(
            (lambda config, kind=kind: config.system.hosts[1].runs.append(kind), f"system.hosts[1].runs: {kind} {why}")
            for kind, why in [
                ("master_worker", "keeps checkpoints' states"),
                ("model_worker", "writes checkpoints and weights in the run's folder"),
                ("gserver_manager", "keeps its log"),
            ]
        ),
        (lambda config: setattr(config.system.hosts[0], "fileroot", "/here"), "is fileroot on the launcher's host"),
        (lambda config: setattr(config.system.hosts[2], "fileroot", "~/runs"), "fileroot='~/runs': is on another host"),
        (lambda config: setattr(config.system.hosts[2], "address", "10.0.0.2"), "has '10.0.0.2' 2 times"),
        (set_to("manager.weight_transport", "distributed"), "manager.weight_transport='distributed' reaches"),
        (adopts_a_server, "generation.sglang.urls: the run cannot copy"),
        (set_to("system.shared_filesystem", True), "fileroot='/scratch/runs' is for hosts with disks of their own"),
    ],
)
def test_what_needs_a_shared_folder_is_refused_by_name_where_there_is_none(
    change: Callable[[ExperimentConfig], None], reported: str
) -> None:
    config = own_disks()
    assert list(check(config)) == []
    change(config)
    assert any(reported in problem for problem in check(config)), list(check(config))


def test_ranks_may_be_on_several_hosts_and_the_last_step_is_kept_there() -> None:
    config = several_hosts(b=["generation_server", "rollout_worker", "model_worker"])
    assert config.checkpoint.in_memory
    assert list(check(config)) == []
    assert trains_elsewhere(config)
    assert not trains_elsewhere(several_hosts(b=["generation_server", "rollout_worker"]))


@pytest.mark.parametrize("hosts", [False, True])
def test_plaintext_on_a_network_is_asked_for_twice(hosts: bool) -> None:
    config = several_hosts(b=["generation_server", "rollout_worker"]) if hosts else ExperimentConfig()
    if not hosts:
        config.system.host = "0.0.0.0"
    config.system.encrypt = False
    assert [reported for reported in check(config) if "confirm with system.unencrypted_network=true" in reported]
    config.system.unencrypted_network = True
    assert not [reported for reported in check(config) if "encrypt" in reported]


def test_what_a_user_chose_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", *MALLOC):
        monkeypatch.delenv(name, raising=False)

    def chosen() -> dict[str, str]:
        environment = plans_of(ExperimentConfig(), gpus=0)["model_worker/0"].environment()
        return {key: value for key, value in environment.items() if key.startswith("MALLOC")}

    assert chosen() == MALLOC
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert chosen() == {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=7")
    assert chosen() == {}

"""Which processes a config asks for, and what each may use."""

from __future__ import annotations

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.kinds import SHARED_CPU_NICENESS
from asyncrl.runtime.plan import plan_workers
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

"""Which processes a config asks for, and what each may use."""

from __future__ import annotations

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.launchers.local import WorkerPlan
from asyncrl.runtime.plan import SHARED_CPU_NICENESS, plan_workers


def plans_of(config: ExperimentConfig, gpus: int) -> dict[str, WorkerPlan]:
    return {plan.name: plan for plan in plan_workers(config, gpus)}


def test_on_the_cpu_training_goes_before_everything_else() -> None:
    config = ExperimentConfig()
    config.trainer.parallel = "d2"
    niceness = {name: plan.niceness for name, plan in plans_of(config, gpus=0).items()}
    assert niceness == {
        "model_worker/0": 0,
        "model_worker/1": 0,
        "generation_server/0": SHARED_CPU_NICENESS,
        "rollout_worker/0": SHARED_CPU_NICENESS,
        "gserver_manager/0": SHARED_CPU_NICENESS,
        "master_worker/0": SHARED_CPU_NICENESS,
    }


def test_training_on_a_gpu_needs_no_precedence() -> None:
    assert not any(plan.niceness for plan in plans_of(ExperimentConfig(), gpus=2).values())


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

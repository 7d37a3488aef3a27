"""Losses on judged answers in any layout are those of one rank, and so is the reward model that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.setting import ChoiceConfig
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised.objectives import engine_settings, make_objective
from asyncrl.trainer.supervised.settings import SFTConfig, SFTTrainerConfig
from tests.unit.trainer.supervised.test_preferences import BATCH
from tests.unit.trainer.supervised.trl_values import policy

from .conftest import OnRanks

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def trained(config: SFTConfig, settings: Any, position: RankPosition) -> dict[str, Any]:
    """Two steps; what every rank then knows of losses and gradients, and the first rank of the weights."""
    objective = make_objective(config, settings, position, CPU)
    reported: dict[str, Any] = {"told": []}
    for _ in range(2):
        measures = objective.compute_gradients(BATCH)
        reported["told"].append([*measures, objective.engine.step(1e-3).grad_norm])
    reported["held_out"] = [*objective.measure(BATCH)]
    owners = {spec.name: 0 for spec in objective.engine.published_specs()}
    reported["weights"] = {name: tensor.numpy().copy() for name, tensor in objective.engine.gather(owners)}
    return reported


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bradley_terry", "d2t2"), ("bradley_terry", "p2"), ("bradley_terry", "c2"), ("dpo", "d2c2")],
)
def test_layouts_learn_what_one_rank_learns(on_ranks: OnRanks, tmp_path: Path, name: str, layout: str) -> None:
    """A reward model begins with a language model's trunk; three pairs are dealt unevenly to two ranks."""
    policy().save_pretrained(tmp_path / "start")

    def config(parallel: str) -> SFTConfig:
        return SFTConfig(
            optimizer=OptimizerName.adamw,
            adamw_lr=1e-2,
            warmup_steps=0,
            loss=ChoiceConfig(name),
            tokens_per_micro_batch=8,
            trainer=SFTTrainerConfig(parallel),
        )

    settings = engine_settings(config(layout), tmp_path / "start", 4)
    ranks = on_ranks(settings, lambda world: trained(config(layout), settings, world.position("actor")))
    alone = trained(config("d1"), engine_settings(config("d1"), tmp_path / "start", 4), RankPosition())
    assert alone["told"][0] != alone["told"][1], "it learns"
    for rank in ranks:
        np.testing.assert_allclose(rank["told"], alone["told"], rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(rank["held_out"], alone["held_out"], rtol=2e-4, atol=1e-6)
    assert ranks[0]["weights"].keys() == alone["weights"].keys()
    for key, tensor in alone["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][key], tensor, rtol=1e-3, atol=2e-5, err_msg=key)

"""A training engine is a line of `ENGINES`: settings, layouts and ranks follow from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph import load_graph
from asyncrl.trainer.engines import ENGINES, Engine
from asyncrl.trainer.engines.base import EngineLoader, engine_loader
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.parallel.checks import problems
from asyncrl.trainer.parallel.placement import engine_of, placement
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import build_rank
from asyncrl.trainer.settings import OptimizerConfig


class OwnLoader(FlatLoader):
    loaded: list[str] = []  # noqa: RUF012 (one test reads it)

    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> FlatPolicyEngine:
        self.loaded.append(path)
        return super().policy(path, dtype, optimizer)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ENGINES, "own", Engine("own_engine_of_a_test:OwnLoader", in_parts=False))
    monkeypatch.setitem(sys.modules, "own_engine_of_a_test", sys.modules[__name__])
    return "own"


@pytest.mark.parametrize("name", ENGINES)
def test_each_line_names_a_loader(name: str) -> None:
    assert issubclass(engine_loader(name), EngineLoader)


def test_the_registry_is_read_without_torch() -> None:
    imports = "import sys; import asyncrl.trainer.engines, asyncrl.trainer.parallel.placement"
    program = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_ranks_load_roles_with_a_further_engine(own: str, tiny_model: Path) -> None:
    config = ExperimentConfig()
    config.model.path, config.trainer.engine = str(tiny_model), own
    build_rank(config, load_graph(config), World(), torch.device("cpu"))
    assert OwnLoader.loaded == [str(tiny_model)]


def test_layouts_that_cut_models_are_refused_for_a_further_engine_of_whole_models(own: str) -> None:
    config = ExperimentConfig()
    config.trainer.engine, config.trainer.parallel = own, "d2t2"
    graph = load_graph(config)
    assert any(each.startswith("trainer.engine='own': ") for each in problems(config, graph, placement(config, graph)))


def test_auto_is_the_first_engine_that_can_train_the_layout() -> None:
    config = ExperimentConfig()
    chosen = []
    for layout in ("d1", "d2", "t2"):
        config.trainer.parallel = layout
        chosen.append(engine_of(config))
    assert chosen == ["flat", "sharded", "sharded"]

"""Building a rank's part of a model: what fails on one rank fails on all, and torch has nothing to say about it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import load_graph
from asyncrl.trainer.engines.sharded.build import BuildPlan
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import build_rank

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["p2", "d2"])
def test_what_one_rank_cannot_build_fails_on_all_with_the_reason(
    layout: str, config: ExperimentConfig, llama_dir: Path, on_ranks: Any, tmp_path: Path
) -> None:
    """Nobody is left waiting in a collective operation for one who is gone."""
    config.trainer.parallel = layout
    whole, broken = llama_dir, tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = load_file(whole / "model.safetensors")
    del tensors["model.norm.weight"]  # which the last stage alone reads
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})

    def build(world: World) -> str:
        config.model.path = str(broken if layout == "p2" or world.worker else whole)
        try:
            build_rank(config, load_graph(config), world, torch.device("cpu"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "built"

    first, last = on_ranks(config, build)
    assert last.startswith("IncompleteModelError"), (first, last)
    assert "lack model.norm.weight" in last
    if layout == "d2":  # with p2 both read the same folder
        assert first.startswith("PeerFailed"), first
        assert "1 of 2" in first
    assert "lack model.norm.weight" in first


def test_torch_warns_of_nothing(config: ExperimentConfig, llama_dir: Path, on_ranks: Any, step: Any) -> None:
    """Warnings about intended behaviour are hidden: loading alone, norms over two dimensions, outputs of a stage."""
    config.model.path, config.trainer.parallel = str(llama_dir), "d2t2"

    def listen(world: World) -> list[str]:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("torch").addHandler(handler)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step(config, build_rank(config, load_graph(config), world, torch.device("cpu")), 0)
        return heard + [str(each.message) for each in warned if "torch" in each.filename]

    for heard in on_ranks(config, listen):
        assert heard == []


def test_norms_of_the_kernels_formula_are_computed_by_it_in_every_layer(
    config: ExperimentConfig, llama_dir: Path, on_ranks: Any, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here a CPU does the same. The weights are parts, which FSDP2 gathers for a layer's pass."""
    config.model.path, config.trainer.parallel = str(llama_dir), "d2"
    config.trainer.gradient_checkpointing = True
    as_written = LlamaRMSNorm.forward
    calls = 0

    def counted(norm: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return as_written(norm, hidden_states)

    def train(world: World) -> tuple[int, dict[str, float]]:
        nonlocal calls
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        calls = 0
        reported = step(config, rank, 0)
        return calls, {name: value for name, value in reported.items() if name.endswith(("/loss", "/grad_norm"))}

    monkeypatch.setattr(LlamaRMSNorm, "forward", counted)
    (before, expected), _ = on_ranks(config, train)
    monkeypatch.setattr(BuildPlan, "fuses_norms", True)
    (after, found), _ = on_ranks(config, train)
    assert before > 0
    assert after == 0
    assert len(expected) > 1
    assert found == pytest.approx(expected, rel=1e-5)

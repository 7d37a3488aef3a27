"""Mixtures of experts: checkpoints across layouts, and what cannot be spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import load_graph
from asyncrl.models.transformers_internals import EXPERTS_MODULE
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError, cut_layers
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.model.lora import add_adapters
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.trainer.settings import LoraConfig
from asyncrl.weights.manifest import FileEntry

pytestmark = pytest.mark.slow

LIMIT_S = 300.0


@pytest.fixture
def step(run_step: Any, make_trajectories: Any) -> Any:
    """`(config, world, rank, version)`: one train step; returns its statistics, of all calls."""

    def run(config: ExperimentConfig, world: World, rank: TrainingRank, version: int) -> dict[str, float]:
        data = world.position("actor").data
        everything = make_trajectories(groups=4, seed=version)
        dealt = [number % config.trainer.ppo_minibatches for number in range(len(everything))]
        batch = build_step_batch(
            everything[data.rank :: data.world],
            dealt[data.rank :: data.world],
            version=version,
            num_minibatches=config.trainer.ppo_minibatches,
        )
        calls = run_step(config, rank, batch)
        return {f"{call}/{name}": value for call, stats in calls.items() for name, value in stats.items()}

    return run


def test_a_checkpoint_of_dealt_experts_goes_on_in_other_layouts(
    config: ExperimentConfig, tiny_moe: Path, on_ranks: Any, step: Any, tmp_path: Path
) -> None:
    """Weights and moments of experts that lay on four ranks are found by stages, and by one process."""
    config.model.path = str(tiny_moe)
    config.optimizer.lr = 1e-3
    path = tmp_path / "checkpoints" / "v1"

    def save(world: World) -> dict[str, float]:
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        step(config, world, rank, 0)
        rank.save_checkpoint(SaveCheckpoint(str(path), 1, {}))
        shares = world.everyone.all_gather_bytes(msgspec.json.encode(rank.disk_writer.share(path).result(LIMIT_S)))
        if world.everyone.leads:
            decoded = [msgspec.json.decode(share, type=dict[str, FileEntry]) for share in shares]
            files = {name: entry for share in decoded for name, entry in share.items()}
            rank.disk_writer.commit(path, files, keep=1, protected=())
        return step(config, world, rank, 1)

    def resume(world: World) -> dict[str, float]:
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        assert rank.load_checkpoint(path.parent) == {}
        return step(config, world, rank, 1)

    config.trainer.parallel = "d2t2"
    expected = on_ranks(config, save)[0]
    config.trainer.parallel = "t2p2"
    found = on_ranks(config, resume)
    config.trainer.parallel, config.trainer.engine = "d1", "flat"
    for stats in (*found, resume(World())):
        assert stats.keys() == expected.keys()
        for name, value in expected.items():
            assert stats[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_rank_whose_experts_nobody_chose_adds_nothing_and_has_gradients(
    config: ExperimentConfig, tiny_moe: Path, on_ranks: Any
) -> None:
    """Without a gradient, sharded data-parallel ranks would not reduce the same parameters, and wait for each other."""
    torch.manual_seed(0)
    experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=4))
    experts.config._experts_implementation = "eager"  # which looks at no expert that nobody chose
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    hidden_TH, weights_TK = torch.randn(3, 8), torch.rand(3, 2)
    chosen_TK = torch.tensor([[0, 1], [1, 0], [0, 1]])

    def run(module: nn.Module) -> list[Any]:
        inputs = hidden_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        out = module(inputs[0], chosen_TK, inputs[1])
        torch.autograd.backward(out.square().sum())
        grads = [whole(cast(Tensor, parameter.grad)) for parameter in module.parameters()]
        return [tensor.detach().numpy() for tensor in (out, *(cast(Tensor, x.grad) for x in inputs), *grads)]

    def dealt(world: World) -> list[Any]:
        mesh = world.position("actor").mesh
        assert mesh is not None
        cut_layers(module, {"layers.*": "", "experts": EXPERTS_MODULE}, shape, mesh["tensor"])
        return run(module.experts)

    module, shape = nn.ModuleDict({"experts": experts}), MixtralConfig(num_attention_heads=2, num_key_value_heads=2)
    config.trainer.parallel = "t2"
    spread, alone = on_ranks(config, dealt), run(experts)
    for found in spread:
        for mine, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_model_without_a_plan_of_dealing_its_experts_is_refused_by_name(
    config: ExperimentConfig, tiny_moe: Path, on_ranks: Any
) -> None:
    config.model.path = str(tiny_moe)
    config.trainer.parallel = "t2"

    def load(world: World) -> str:
        MixtralConfig.base_model_ep_plan = None
        with pytest.raises(LayoutError) as refused:
            build_rank(config, load_graph(config), world, torch.device("cpu"))
        return str(refused.value)

    for reported in on_ranks(config, load):
        assert "MixtralModel wants the tensor-parallel style 'moe_tp_experts' at layers.0.mlp.experts" in reported


def test_adapters_of_layers_that_peft_takes_for_experts_are_refused() -> None:
    shape = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=8,
        intermediate_size=16,
        vocab_size=17,
        mlp_only_layers=[1],
    )
    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(shape).base_model  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"down_proj, gate_proj, up_proj for the experts'.*k_proj, o_proj, q_proj"):
        add_adapters(trunk, LoraConfig(rank=2))
    add_adapters(trunk, LoraConfig(rank=2, targets=["q_proj", "v_proj"]))

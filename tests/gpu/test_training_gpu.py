"""On a GPU the engine's numbers are those of the CPU, and bf16 with flash attention stays near them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph.builtin import load_graph
from asyncrl.trainer.calls import CallContext, StatValues, find_function, run_call
from asyncrl.trainer.parallel import World
from asyncrl.trainer.roles import build_rank
from asyncrl.trainer.step_batch import build_step_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        vocab_size=997,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return folder


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for order in range(4):
        samples = []
        for episode in range(4):
            length = int(rng.integers(8, 60))
            mask = (np.arange(length) >= 4).astype(np.uint8)
            tokens = rng.integers(0, 997, length).astype(np.int32)
            logprobs = (-6.9 * mask).astype(np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            samples.append(Sample(tokens, mask, logprobs, versions, float(rng.random() < 0.5), episode=episode))
        made.append(Trajectory(f"r{order}", f"p{order}", order, tuple(samples)))
    return made


def train(model_dir: Path, device: str, dtype: str = "float32", attn: str = "sdpa") -> StatValues:
    config = ExperimentConfig(train_batch_size=4, group_size=4)
    config.model.path, config.model.dtype, config.model.attn_implementation = str(model_dir), dtype, attn
    config.trainer.ppo_minibatches, config.trainer.tokens_per_micro_batch = 2, 200
    graph = load_graph(config)
    rank = build_rank(config, graph, World(), torch.device(device))
    batch = build_step_batch(trajectories(), [0, 1, 0, 1], version=0, num_minibatches=2, device=torch.device(device))
    stats: StatValues = {}
    for call in graph.order():
        context = CallContext(
            name=call.name,
            role=call.role,
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=config,
            engines=rank.engines,
            ranks=rank.place.data,
            state=rank.state,
        )
        stats |= run_call(find_function(call.function), context, batch)
    return stats


def test_fp32_losses_are_those_of_the_cpu(model_dir: Path) -> None:
    expected, got = train(model_dir, "cpu"), train(model_dir, "cuda")
    assert got["ppo/loss_per_minibatch"] == pytest.approx(expected["ppo/loss_per_minibatch"], abs=1e-4)
    assert got["entropy"] == pytest.approx(expected["entropy"], abs=1e-3)


@pytest.mark.parametrize("attn", ["sdpa", "flash_attention_2"])
def test_bf16_stays_near_fp32(model_dir: Path, attn: str) -> None:
    if attn == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs the flash-attn package")
    expected, got = train(model_dir, "cpu"), train(model_dir, "cuda", "bfloat16", attn)
    assert got["entropy"] == pytest.approx(expected["entropy"], abs=0.05)
    assert got["optimizer/steps"] == 2

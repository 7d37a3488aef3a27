"""Pictures over ranks: log-probabilities, values and gradients are those that transformers computes of each sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph import load_graph
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.engine import ShardedEngine, ShardedPolicyEngine, ShardedValueEngine
from asyncrl.trainer.engines.sharded.loader import ShardedLoader
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import build_rank
from asyncrl.trainer.settings import VisionMode
from tests.vlm_batches import adapter_gradients, vlm_batch, vlm_expected, vlm_expected_hidden, vlm_trajectories

pytestmark = pytest.mark.slow

LAYOUTS = [  # every family and layout: `tests/unit/models/test_every_picture_model.py`
    ("qwen2_vl", "d2t2"),
    ("llava_onevision+lora", "d2p2"),
    ("qwen2_5_vl+freeze", "t2"),
]


def _loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
    return outputs.logprobs_N.sin().sum() / 8, {}


def _sum(micro_batch: MicroBatch, values_N: Tensor) -> tuple[Tensor, Stats]:
    return values_N.sum(), {}


def _gradients(engine: ShardedEngine) -> dict[str, Any]:
    return {name: whole(p.grad).numpy().copy() for name, p in engine.parameters().items() if p.grad is not None}


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_pictures_over_ranks_are_what_transformers_computes_of_each_sample(
    model: str, layout: str, config: ExperimentConfig, vlm_folder: Callable[[str], Path], on_ranks: Any
) -> None:
    kind, _, how = model.partition("+")
    folder = vlm_folder(kind)
    config.model.path, config.model.dtype, config.trainer.parallel = str(folder), Dtype.float32, layout
    config.trainer.gradient_checkpointing = how != "lora"
    config.model.vision = VisionMode.freeze if how == "freeze" else VisionMode.train
    config.model.lora.rank = 4 if how == "lora" else 0
    config.generation.context_length = 256
    config.algorithm.graph = "grpo" if how else "ppo"
    everything = vlm_trajectories(folder)

    def body(world: World) -> dict[str, Any]:
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        data, engine = world.position("actor").data, rank.engines["actor"]
        assert isinstance(engine, ShardedPolicyEngine)
        # The second data-parallel rank has text alone.
        batch = vlm_batch(everything if data.world == 1 else everything[3:] if data.rank else everything[:3])
        wanted_T, reported = batch["loss_mask"], {"data": data.rank, "critic": {}}
        reported["logprobs"] = engine.logprobs(batch, wanted_T).numpy()
        engine.compute_gradients(batch, wanted_T, range(batch.num_seqs), _loss)
        reported["grads"] = _gradients(engine)
        reported["weights"] = {name: whole(p.detach()).numpy().copy() for name, p in engine.parameters().items()}
        owners = {spec.name: world.placement.workers - 1 for spec in engine.published_specs()}
        reported["published"] = {name: each.numpy().copy() for name, each in engine.gather(owners)}
        engine.step(1e-2)
        reported["after"] = engine.logprobs(batch, wanted_T).numpy()
        if (critic := rank.engines.get("critic")) is not None:
            assert isinstance(critic, ShardedValueEngine)
            critic.compute_gradients(batch, wanted_T, range(batch.num_seqs), _sum)
            reported["critic"] = _gradients(critic)
        return reported

    spread = on_ranks(config, body)
    batch = vlm_batch(everything)
    expected_T, expected = vlm_expected(folder, batch)
    found = {reported["data"]: reported for reported in spread}
    logprobs = np.concatenate([found[data]["logprobs"] for data in sorted(found)])
    np.testing.assert_allclose(logprobs, expected_T.numpy(), rtol=0, atol=2e-4)
    assert all(abs(reported["after"] - reported["logprobs"]).max() > 1e-3 for reported in spread)
    stored = load_file(folder / "model.safetensors")
    assert spread[-1]["published"].keys() == stored.keys()
    for name, tensor in spread[-1]["published"].items():
        np.testing.assert_array_equal(tensor, stored[name], err_msg=name)
    wanted = {name for name in expected if how != "freeze" or "visual" not in name}
    if how == "lora":
        weights = {name: each for reported in spread for name, each in reported["weights"].items()}
        expected = adapter_gradients(weights, expected, config.model.lora)
        wanted = {name for name in expected if ".lora_B." in name}
        assert any("vision_tower" in name and float(expected[name].abs().max()) > 1e-3 for name in wanted)
    assert wanted <= {name for reported in spread for name in reported["grads"]}
    for reported in spread:
        for name, gradient in reported["grads"].items():
            other = expected[name].numpy() if name in expected else 0.0 * gradient
            np.testing.assert_allclose(gradient, other, rtol=0, atol=3e-4, err_msg=name)
    if not how:
        hidden = vlm_expected_hidden(folder, batch)
        heads = [reported["critic"]["head.weight"] for reported in spread if "head.weight" in reported["critic"]]
        assert heads
        for head in heads:
            np.testing.assert_allclose(head[0], hidden.numpy(), rtol=0, atol=1e-3)


def test_the_layout_is_chosen_by_a_model_that_sees_its_pictures(
    config: ExperimentConfig, vlm_folder: Callable[[str], Path], on_ranks: Any
) -> None:
    folder = str(vlm_folder("gemma3"))  # a new one has zeros between its vision tower and its text model
    config.model.path, config.model.dtype, config.trainer.parallel = folder, Dtype.float32, "d1"

    def body(world: World) -> AttentionKind:
        loader = ShardedLoader(config, world.position("actor"), torch.device("cpu"))
        return loader.policy(folder, Dtype.float32, None).attention

    assert on_ranks(config, body) == [AttentionKind.padded], "packed, its pictures would be seen in one direction"

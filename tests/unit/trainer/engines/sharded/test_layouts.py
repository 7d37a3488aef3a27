"""Training over ranks, in any layout, is training in one process: same losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.api.trajectory import Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, Dtype, token_ids
from asyncrl.master.graph import load_graph
from asyncrl.master.step import Dealing, minibatches_of_groups
from asyncrl.models.model_config import routing_shape_of
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.flat import FlatEngine
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.engine import ShardedEngine
from asyncrl.trainer.model.load_models import plain_name
from asyncrl.trainer.model.lora import is_adapter
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import build_rank
from asyncrl.trainer.settings import LoraPublish
from asyncrl.weights.adapters import published_name
from asyncrl.weights.folder_tensors import folder_tensors

pytestmark = pytest.mark.slow

VOCABULARY = 17  # no layout divides it
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 34, "vocab_size": VOCABULARY}
MODELS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False),
    "mixtral": MixtralConfig(
        **SIZES | {"intermediate_size": 36},
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=1,  # so a filler of one token leaves all slices but one without work
        mlp_only_layers=[1],
    ),
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="session")
def model_dir(saved_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        path = root / name
        return str(path if path.is_dir() else saved_model(path, MODELS[name]))

    return folder


@pytest.fixture
def train(run_step: Any, make_trajectories: Any) -> Callable[[ExperimentConfig, World, int], dict[str, Any]]:
    """So many train steps of two minibatches of ragged samples; what every rank then knows of losses, gradients and
    weights.
    """

    def run(config: ExperimentConfig, world: World, steps: int) -> dict[str, Any]:
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        position = world.position("actor")
        dealing, everything = (
            Dealing(config.trainer.ppo_minibatches, config.trainer.ppo_epochs),
            make_trajectories(groups=4, group_size=2),
        )
        if config.algorithm.graph == "ppo":  # a critic compares no episodes: the two samples of a group are of one
            everything = [replace(each, samples=[replace(s, episode=0) for s in each.samples]) for each in everything]
        if config.moe.replay_routing:
            everything = [_routed(trajectory, config) for trajectory in everything]
        if allowed := token_ids(config.rollout.sampling.allowed_token_ids):
            everything = [_of_allowed(trajectory, np.array(allowed, np.int32)) for trajectory in everything]
        dealt = minibatches_of_groups([True] * len(everything), dealing, version=0).tolist()
        mine: list[Trajectory] = everything[position.data.rank :: position.data.world]
        policy = rank.policy("actor")
        dealt_out = {spec.name: n % world.placement.workers for n, spec in enumerate(policy.published_specs())}
        reported: dict[str, Any] = {"stats": []}
        reported["untrained"] = {name: tensor.numpy().copy() for name, tensor in policy.gather(dealt_out)}
        for version in range(steps):
            minibatch = dealt[position.data.rank :: position.data.world]
            batch = build_step_batch(mine, minibatch, version=version, num_minibatches=dealing.optimizer_steps)
            calls = run_step(config, rank, batch)
            reported["stats"].append({f"{call}/{name}": v for call, s in calls.items() for name, v in s.items()})
        for role, engine in rank.engines.items():
            if not engine.trained:
                continue
            if isinstance(engine, ShardedEngine):
                parameters = engine.parameters()
            else:
                assert isinstance(engine, FlatEngine)
                parameters = dict(engine.module.named_parameters())
            trained = {plain_name(n): p for n, p in parameters.items() if p.requires_grad}
            reported[role] = {n: (whole(p.grad).numpy().copy(), _whole(p)) for n, p in trained.items()}
        reported["flops"] = {role: engine.flops for role, engine in rank.engines.items()}
        reported["scored"] = np.concatenate(policy.score_sequences([TOKENS, TOKENS[3:]]))
        owners = {spec.name: world.placement.workers - 1 for spec in policy.published_specs()}
        reported["published"] = [(name, tensor.float().numpy().copy()) for name, tensor in policy.gather(owners)]
        reported["specs"] = [(spec.name, spec.shape) for spec in policy.published_specs()]
        return reported

    return run


def _routed(trajectory: Trajectory, config: ExperimentConfig) -> Trajectory:
    """`trajectory` whose tokens went through any experts; those of a prompt through the same."""
    shape = routing_shape_of(str(config.model.path))
    samples = []
    for number, sample in enumerate(trajectory.samples):
        rng = np.random.default_rng(number)
        routing = rng.random((len(sample.tokens), shape.layers, shape.experts)).argsort(-1)[..., : shape.per_token]
        routing[: int(sample.loss_mask.argmax())] = np.arange(shape.per_token)
        samples.append(replace(sample, routing=routing.astype(np.uint8)))
    return replace(trajectory, samples=samples)


def _of_allowed(trajectory: Trajectory, allowed_A: Any) -> Trajectory:
    """`trajectory` with allowed tokens in the place of all generated ones."""
    return replace(
        trajectory,
        samples=[
            replace(s, tokens=np.where(s.loss_mask, allowed_A[s.tokens % len(allowed_A)], s.tokens))
            for s in trajectory.samples
        ],
    )


def _whole(parameter: Any) -> Any:
    return whole(parameter.detach()).numpy().copy()


CASES = [  # a layout of all three kinds has every pair of them; each kind is there by itself too, of one model
    ("qwen3", "d1"),  # norms of queries and keys over slices: qwen3_moe; a head of its own over stages: mixtral
    *(("qwen2", layout) for layout in ("r2d2", "d2t2p2")),
    *(("qwen3+lora4", layout) for layout in ("d1", "t2p2")),  # with d2: merged
    ("llama+lora4", "t4"),
    ("qwen2+lora4", "p2"),
    *(("qwen2+merged", layout) for layout in ("p2", "d2t2")),
    ("llama+allowed", "t4"),  # more slices than key-value heads, and one of the slices has no token that is allowed
    *(("mixtral", layout) for layout in ("d3", "t2p2")),  # d3: a rank without an expert
    ("qwen3_moe", "d2t2"),
    ("mixtral+lora4", "t2"),
    *(("mixtral+replay", layout) for layout in ("d2", "t2")),
    ("qwen3", "d2c2"),
    ("qwen2+lora4", "c2t2"),
    ("qwen3_moe+replay", "c2p2"),
]


@pytest.fixture(scope="module")
def trained_alone() -> dict[tuple[str, bool, int, int], dict[str, Any]]:
    """By model, whether layers are computed again, passes over the batch, and steps: what one process makes of it."""
    return {}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_any_layout_trains_as_one_process_does(
    model: str, layout: str, config: ExperimentConfig, model_dir: Any, on_ranks: Any, train: Any, trained_alone: Any
) -> None:
    name, _, how = model.partition("+")
    config.model.path = path = model_dir(name)
    config.model.lora.rank = 4 if how in ("lora4", "merged") else 0
    config.model.lora.publish = LoraPublish.merged if how == "merged" else LoraPublish.auto
    config.moe.replay_routing = how == "replay"
    config.rollout.sampling.allowed_token_ids = "0-3,5-8,16" if how == "allowed" else ""
    # A stage's layers are computed again after another micro-batch went through them.
    config.trainer.gradient_checkpointing = how == "replay" and "p" in layout
    if not how:  # a critic is laid out by the layout and the model alone
        config.algorithm.graph, config.algorithm.advantage.name = "ppo", "gae"
        config.algorithm.aggregation = ChoiceConfig("episode_mean_token_mean")
    config.algorithm.kl_coef = 0.1
    config.algorithm.entropy_coef = 0.01
    config.optimizer.lr = config.algorithm.critic.optimizer.lr = 1e-3
    config.trainer.ppo_epochs = 2 if layout == "r2d2" else 1
    # Moments are carried from minibatch to minibatch, too; adapters begin with one that is 0.
    steps = 2 if layout == "d2t2p2" or config.model.lora.rank else 1
    case = model, config.trainer.gradient_checkpointing, config.trainer.ppo_epochs, steps
    if case not in trained_alone:
        trained_alone[case] = train(config, World(), steps)
    alone = trained_alone[case]
    if config.moe.replay_routing:
        config.moe.replay_routing = False
        free = train(config, World(), steps)["stats"][0]["actor_train/entropy"]
        assert abs(free - alone["stats"][0]["actor_train/entropy"]) > 1e-4, "the routers chose what was to be replayed"
        config.moe.replay_routing = True
    config.trainer.parallel = layout
    spread = on_ranks(config, lambda world: train(config, world, steps))
    if not config.model.lora.rank:
        _is_the_folder(path, [reported["untrained"] for reported in spread])
    for reported in spread:
        _same_statistics(reported["stats"], alone["stats"])
        np.testing.assert_allclose(reported["scored"], alone["scored"], atol=1e-5)
        assert reported["specs"] == alone["specs"]
    for role, flops in alone["flops"].items():
        together = sum(reported["flops"][role] for reported in spread)
        # Copies cut other micro-batches, with other prefixes; slices repeat keys, values, adapters and routers.
        # Adapters are a third of such a small model, and half of each is in all slices.
        most = 1.7 if (model, layout) == ("llama+lora4", "t4") else 1.3
        assert 0.98 * flops <= together <= most * flops, role
    trained = {"actor", "critic"} & alone.keys()
    assert len(trained) == (1 if how else 2)
    for role in trained:
        found = {name: pair for reported in spread for name, pair in reported[role].items()}
        assert found.keys() == alone[role].keys()
        largest = max(abs(grad).max() for grad, _ in alone[role].values())
        for reported in spread:
            for name, (grad, weight) in reported[role].items():
                np.testing.assert_allclose(grad, alone[role][name][0], rtol=0, atol=1e-5 * largest, err_msg=name)
                # AdamW makes the last bits of a small gradient a part of its step, of 1e-3.
                np.testing.assert_allclose(weight, alone[role][name][1], rtol=0, atol=5e-5, err_msg=name)
    *others, owner = spread
    assert not any(reported["published"] for reported in others)
    assert [name for name, _ in owner["published"]] == [name for name, _ in alone["published"]]
    weights = {
        published_name(name) if is_adapter(name) else name: weight
        for reported in spread
        for name, (_, weight) in reported["actor"].items()
    }
    with torch.device("meta"):
        model_on_meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))
    parts = {part.name: part for part in folder_tensors(model_on_meta)}
    if how == "merged":
        assert {name for name, _ in owner["published"]} == parts.keys()
        _are_merged(owner["published"], weights, config)
        return
    for published, tensor in owner["published"]:
        part = parts.get(published)
        expected = weights[published] if part is None else part.of(torch.from_numpy(weights[part.parameter])).numpy()
        np.testing.assert_array_equal(tensor, expected, err_msg=published)


@pytest.mark.parametrize("layout", ["d2", "t2"])
def test_logits_are_computed_in_float32_in_every_layout_where_that_is_set(
    layout: str, config: ExperimentConfig, model_dir: Any, on_ranks: Any
) -> None:
    config.model.path, config.model.dtype, config.model.float32_head = model_dir("qwen2"), Dtype.bfloat16, True

    def score(world: World) -> tuple[set[tuple[torch.dtype, torch.dtype]], Any]:
        policy = build_rank(config, load_graph(config), world, torch.device("cpu")).policy("actor")
        head, types = next(each for name, each in policy.root.named_modules() if name == "lm_head"), set()
        head.register_forward_hook(lambda module, args, output: types.add((args[0].dtype, output.dtype)))
        return types, np.concatenate(policy.score_sequences([TOKENS, TOKENS[3:]]))

    types, alone = score(World())
    config.trainer.parallel = layout
    for found, scored in [(types, alone), *on_ranks(config, score)]:
        assert found == {(torch.bfloat16, torch.float32)}
        np.testing.assert_allclose(scored, alone, atol=2e-2)


def _is_the_folder(path: str, parts: list[dict[str, Any]]) -> None:
    """Bit by bit and by name: servers and trainers start from the same weights, in every layout."""
    assert all(parts), "every rank owns some"
    expected, got = load_file(Path(path) / "model.safetensors"), {n: t for part in parts for n, t in part.items()}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(got[name].view(np.int32), tensor.view(np.int32), err_msg=name)


def _are_merged(published: list[tuple[str, Any]], weights: dict[str, Any], config: ExperimentConfig) -> None:
    """Every layer is that of the base plus its trained adapter."""
    scale, base = config.model.lora.alpha / config.model.lora.rank, load_file(f"{config.model.path}/model.safetensors")
    for name, tensor in published:
        adapter = published_name(name.removesuffix(".weight"))
        expected = base[name]
        if f"{adapter}.lora_A.weight" in weights:
            expected = expected + scale * (weights[f"{adapter}.lora_B.weight"] @ weights[f"{adapter}.lora_A.weight"])
            assert abs(expected - base[name]).max() > 1e-3, "it was trained"
        np.testing.assert_allclose(tensor, expected, rtol=0, atol=1e-6, err_msg=name)


def _same_statistics(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for own, other in zip(mine, theirs, strict=True):
        assert own.keys() == other.keys()
        for name, value in other.items():
            if "clip_fraction" in name:  # of tokens: one on the bound may fall on either side of it
                assert own[name] == pytest.approx(value, abs=0.01), name
            else:
                assert own[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name

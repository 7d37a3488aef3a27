"""Invalid settings of the trainer are reported before anything starts: setting, value, how to fix it."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.algorithms.inputs import AdvantageInputs
from asyncrl.algorithms.registry import ProximalMode
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.plugin_code.catalog import known, resolve
from asyncrl.config.setting import ChoiceConfig, Device, Dtype
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.runtime.plan import plan_workers
from asyncrl.trainer import checks, feature_checks
from asyncrl.trainer.checks import warnings
from asyncrl.trainer.feature_checks import NEEDS_VALUES
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.settings import (
    AttentionImplementation,
    KeptOn,
    KLIn,
    LearningRateSchedule,
    OptimizerConfig,
    OptimizerName,
    ReferenceMode,
    RolePlacementConfig,
    RoleRanks,
)

SetGpus = Callable[[int], None]
SetInstalled = Callable[[bool], None]


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield the problems of a training rank's settings, those of optional features included."""
    yield from checks.check(config)
    yield from optional_problems(config)


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file of no tensors: the length of its header, and that."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SetGpus:
    """Sets the number of GPUs that this machine shows."""

    def show(count: int) -> None:
        for module in (checks, feature_checks):
            monkeypatch.setattr(module, "count_gpus", lambda: count)

    return show


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> SetInstalled:
    """Sets whether the package flash-attn is installed."""
    find = importlib.util.find_spec

    def set_installed(installed: bool) -> None:
        found = find("torch") if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "flash_attn" else find(name))

    return set_installed


def the_message(config: ExperimentConfig) -> str:
    (message,) = check(config)
    return message


def test_the_defaults_pass_with_and_without_gpus(config: ExperimentConfig, gpus: SetGpus) -> None:
    for count in (0, 1, 8):
        gpus(count)
        assert list(check(config)) == []


def test_cuda_without_a_gpu(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.trainer.device = Device.cuda
    message = the_message(config)
    assert message.startswith("trainer.device='cuda': ")
    assert "use cpu or auto" in message


@pytest.mark.parametrize("device", [Device.cuda, Device.auto])
def test_more_ranks_than_gpus(device: Device, config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(2)
    config.trainer.device, config.trainer.parallel = device, "d3"
    message = the_message(config)
    assert message.startswith("trainer.parallel='d3': ")
    assert "there are 2; use d2 or fewer, or trainer.device=cpu" in message
    config.trainer.parallel = "d2"
    assert list(check(config)) == []
    config.trainer.device, config.trainer.parallel = Device.cpu, "d3"
    assert list(check(config)) == []


def test_more_ranks_than_gpus_in_a_layout_with_slices_and_a_critic_of_its_own(
    config: ExperimentConfig, gpus: SetGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(6)
    config.train_batch_size = 64
    config.trainer.parallel = "d4t2"
    assert "8 training ranks want a GPU each and there are 6; use d3t2 or fewer" in the_message(config)
    config.algorithm.graph = "ppo"
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = "d2", RoleRanks.own
    assert "10 training ranks (2 of them for critic) want a GPU each and there are 6; use d2t2" in the_message(config)
    gpus(3)
    assert "use a layout of at most 1 ranks" in the_message(config)


def test_compiled_layers_are_refused_where_they_are_sharded(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.trainer.compile = True
    assert list(check(config)) == []
    config.trainer.parallel = "d2"
    assert the_message(config).startswith("trainer.compile=true: compiled parts of sharded layers are not supported")


def test_a_published_type_that_training_does_not_have_is_refused(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.model.dtype, config.model.publish_dtype = Dtype.float32, Dtype.bfloat16
    assert list(check(config)) == []
    config.model.lora.rank, config.model.path = 4, None
    assert any(each.startswith("model.publish_dtype='bfloat16': versions are adapters") for each in check(config))
    config.model.lora.rank = 0
    config.model.dtype, config.model.publish_dtype = Dtype.bfloat16, Dtype.float32
    assert the_message(config).startswith("model.publish_dtype='float32': training in bfloat16 would publish the same")


def test_a_warning_says_that_published_weights_are_rounded(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.algorithm.prox, config.max_head_offpolicyness = ProximalMode.behave, 0
    assert list(warnings(config)) == []
    config.model.publish_dtype = Dtype.bfloat16
    (message,) = warnings(config)
    assert "rounds otherwise than training" in message


def test_activations_on_the_host_need_layers_that_are_recomputed(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.trainer.activations_on = KeptOn.host
    message = the_message(config)
    assert message.startswith("trainer.activations_on='host': ")
    assert "trainer.gradient_checkpointing=false recomputes none; set that to true, or use device" in message
    config.trainer.gradient_checkpointing = True
    assert list(check(config)) == []


def test_what_works_in_one_layout_only_is_refused_by_name(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.trainer.parallel = "d2"
    config.algorithm.kl_coef = 0.1
    config.algorithm.reference.parallel = "d1"
    assert list(check(config)) == []
    config.algorithm.reference.mode = ReferenceMode.ema
    assert the_message(config).startswith(
        "algorithm.reference.mode='ema': the reference follows the actor part by part"
    )
    config.algorithm.reference.mode = ReferenceMode.frozen
    config.algorithm.kl = ChoiceConfig("full")
    assert the_message(config).startswith("algorithm.kl='full': whole distributions are compared where each rank has")
    config.trainer.parallel, config.algorithm.reference.parallel = "d1", None
    assert list(check(config)) == []
    config.model.lora.rank = 4
    config.algorithm.reference.mode = ReferenceMode.ema
    assert the_message(config).startswith("algorithm.reference.mode='ema': the base of adapters does not move")


def test_a_layout_that_is_none_is_told_with_the_other_mistakes(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.trainer.parallel, config.trainer.device = "d2x", Device.cpu
    config.algorithm.advantage = ChoiceConfig("gae")
    messages = list(check(config))
    assert messages[0].startswith("trainer.parallel='d2x': not a layout; write d<N>")
    assert messages[1].startswith("algorithm.advantage='gae'")


def test_a_reward_model_that_the_graph_does_not_name(config: ExperimentConfig, gpus: SetGpus) -> None:
    gpus(0)
    config.algorithm.reward_models = {"judge": RolePlacementConfig("d1")}
    assert the_message(config) == "algorithm.reward_models.judge: graph 'grpo' has no such role; its roles are actor"


def test_the_flat_engine_has_whole_models(
    config: ExperimentConfig, gpus: SetGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(0)
    config.trainer.parallel, config.trainer.engine = "d2t2", "flat"
    message = the_message(config)
    assert message.startswith("trainer.engine='flat': ")
    assert "trainer.parallel='d2t2' cuts it; use d4, or trainer.engine=sharded" in message
    assert engine_of(config) == "flat"
    config.trainer.engine = "auto"
    assert engine_of(config) == "sharded"
    config.trainer.parallel = "d1"
    assert engine_of(config) == "flat"


def test_what_does_not_work_with_parts_of_the_tokens_is_refused_by_name(
    config: ExperimentConfig, gpus: SetGpus, qwen_dir: Path, tmp_path: Path
) -> None:
    gpus(0)
    config.trainer.parallel = "d2c2"
    assert list(check(config)) == []
    config.trainer.engine = "flat"
    assert "trainer.parallel='d2c2' cuts it; use d4, or trainer.engine=sharded" in the_message(config)
    config.trainer.engine = "auto"
    config.model.attn_implementation = AttentionImplementation.eager
    assert the_message(config).startswith("trainer.parallel='d2c2': sdpa works where ranks have parts")
    config.model.attn_implementation = AttentionImplementation.sdpa
    described = json.loads((qwen_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"vision_config": {}, "image_token_id": 3}))
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    cut = f"the model in {str(tmp_path)!r} takes pictures, whose tokens are not cut into parts (c); use c1, or"
    config.algorithm.graph, config.algorithm.critic.path = "ppo", str(tmp_path)
    assert f"trainer.parallel='d2c2': role critic: {cut}" in the_message(config)
    config.model.path = str(tmp_path)
    assert f"trainer.parallel='d2c2': {cut}" in the_message(config)


def test_a_model_that_does_not_fit_its_layout_is_told_by_role_once(
    config: ExperimentConfig, gpus: SetGpus, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(0)
    config.algorithm.kl_coef = 0.1
    config.trainer.parallel = "t4"  # two query heads in the actor, four in the reference model
    (message,) = check(config)
    assert message == (
        "trainer.parallel='t4': qwen2 cannot be cut into 4 tensor slices: 4 does not divide its 2 query heads; "
        "use t1 or t2"
    )
    config.trainer.parallel = "t2"
    config.algorithm.reference.path, config.algorithm.reference.parallel = str(llama_dir), "t2"
    assert list(check(config)) == []
    config.trainer.parallel = "t2d2p1"
    config.algorithm.reference.parallel = "p3"
    (message,) = check(config)
    assert message.startswith(
        "algorithm.reference.parallel='p3': role ref: 2 layers are fewer than the 3 stages; use p2"
    )


@pytest.mark.parametrize(
    ("model_type", "layout", "reported"),
    [
        ("mamba", "d2p2", "trainer.parallel='d2p2': mamba is not shown to be right in stages, as "),
        ("phi", "p2", "are; use p1: d and t may be above 1"),
        ("stablelm", "t2", "are; use t1: d and p may be above 1"),
        ("gemma3", "t2", "trainer.parallel='t2': gemma3 is not shown to be right in tensor slices"),
    ],
)
def test_an_architecture_that_is_not_shown_to_be_right_when_it_is_cut(
    config: ExperimentConfig, gpus: SetGpus, qwen_dir: Path, tmp_path: Path, model_type: str, layout: str, reported: str
) -> None:
    gpus(0)
    described = json.loads((qwen_dir / "config.json").read_text())
    if model_type == "gemma3":  # of the whole, whose text part alone is shown
        described = {"text_config": described | {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(described | {"model_type": model_type}))
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    config.model.path, config.trainer.parallel = str(tmp_path), layout
    assert any(reported in message for message in check(config)), list(check(config))
    config.trainer.parallel = "d2"
    assert list(check(config)) == []


def test_routing_is_replayed_of_known_mixtures_of_experts_and_engines_that_tell(
    config: ExperimentConfig, gpus: SetGpus, tmp_path: Path, tiny_moe: Path
) -> None:
    gpus(0)
    config.moe.replay_routing = True
    assert the_message(config).endswith(
        "qwen2 is a dense model: it has no experts, so there is nothing to replay; set it to false"
    )
    config.model.path = str(tiny_moe)
    assert list(check(config)) == []
    config.trainer.parallel = "d2t2p2"
    assert list(check(config)) == []
    config.generation.backend = "sglang"
    assert the_message(config).startswith("moe.replay_routing=True: generation.backend='sglang' does not tell which")
    config.generation.backend = "embedded"
    config.samples.replay = "somewhere"
    assert "kept samples do not tell which experts there were" in " ".join(check(config)), "and there are none"
    config.samples.replay = None
    for model_type, experts in (("deepseek_v3", "n_routed_experts"), ("qwen3_next", "num_experts")):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(NO_TENSORS)
        (folder / "config.json").write_text(
            json.dumps({"model_type": model_type, experts: 8, "num_experts_per_tok": 2})
        )
        config.model.path, config.trainer.parallel = str(folder), "d1"
        assert f"the routers of {model_type} are not known to choose by one topk, as those of mixtral" in the_message(
            config
        )


def test_flash_attention_that_is_not_installed(
    config: ExperimentConfig, gpus: SetGpus, flash_attention: SetInstalled
) -> None:
    gpus(1)
    flash_attention(False)
    config.model.attn_implementation = AttentionImplementation.flash_attention_2
    message = the_message(config)
    assert message.startswith("model.attn_implementation='flash_attention_2': the package flash-attn is not installed")
    assert "use sdpa" in message


@pytest.mark.parametrize(("device", "count"), [(Device.cpu, 1), (Device.auto, 0)])
def test_attention_for_gpus_on_a_cpu(
    device: Device,
    count: int,
    config: ExperimentConfig,
    gpus: SetGpus,
    flash_attention: SetInstalled,
) -> None:
    gpus(count)
    flash_attention(True)
    config.model.attn_implementation = AttentionImplementation.flash_attention_2
    config.trainer.device = device
    assert f"trainer.device={str(device)!r} is a CPU here; use sdpa" in the_message(config)
    gpus(1)
    config.trainer.device = Device.auto
    assert list(check(config)) == []


def without_lr(config: ExperimentConfig, critic: bool) -> ExperimentConfig:
    config = copy.deepcopy(config)
    (config.algorithm.critic.optimizer if critic else config.optimizer).lr = 0.0
    return config


@pytest.mark.parametrize("critic", [False, True])
def test_muon_moves_whole_matrices_with_their_moments_on_the_device(config: ExperimentConfig, critic: bool) -> None:
    name = "algorithm.critic.optimizer" if critic else "optimizer"
    optimizer = config.algorithm.critic.optimizer if critic else config.optimizer
    optimizer.muon_lr = 1e-3
    assert f"{name}.muon_lr=0.001: {name}.name='adamw' has no Muon" in the_message(config)
    optimizer.name = OptimizerName.muon
    assert list(check(config)) == []
    assert f"{name}.lr=0: Muon's rate follows its schedule" in the_message(without_lr(config, critic))
    config.trainer.parallel = "d2"
    assert the_message(config).startswith(
        f"{name}.name='muon': it moves whole matrices, which no rank of trainer.engine"
    )
    config.trainer.engine = "flat"
    assert list(check(config)) == []
    optimizer.moments_on = KeptOn.host
    assert f"{name}.moments_on='host' is for AdamW's moments" in the_message(config)


@pytest.mark.parametrize("advantage", sorted(NEEDS_VALUES))
def test_an_advantage_of_values_without_a_critic(advantage: str, config: ExperimentConfig) -> None:
    config.algorithm.advantage = ChoiceConfig(advantage)
    message = the_message(config)
    assert message.startswith(f"algorithm.advantage={advantage!r}: it needs a critic's values, and graph 'grpo' has")
    assert "use algorithm.graph=ppo" in message
    config.algorithm.graph = "ppo"
    assert list(check(config)) == []


def test_the_advantages_that_need_values_are_those_that_refuse_to_do_without() -> None:
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([0.0, 1.0]),
        group_ids_S=torch.zeros(2, dtype=torch.int64),
        mask_T=torch.tensor([False, True, False, True]),
        seq_ids_T=torch.tensor([0, 0, 1, 1]),
        num_seqs=2,
        greedy_rewards_S=torch.zeros(2),
    )
    refused = {}
    for name in known("advantage"):
        try:
            resolve("advantage", name, {}, [])(inputs)
        except ValueError as error:
            refused[name] = str(error)
    assert refused.keys() == NEEDS_VALUES
    assert all("critic" in message for message in refused.values())


def fail_to_be_a_model(folder: Path, fault: str) -> Path:
    folder.mkdir()
    described = {"no JSON": "{", "no mapping": "[]", "no model_type": "{}"}.get(fault, '{"model_type": "qwen2"}')
    if fault != "no config.json":
        (folder / "config.json").write_text(described)
    if fault != "no weights":
        (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("no config.json", "no config.json"),
        ("no JSON", "config.json cannot be read"),
        ("no mapping", "names no model_type"),
        ("no model_type", "names no model_type"),
        ("no weights", "it holds no weights"),
    ],
)
@pytest.mark.parametrize("name", ["model.path", "algorithm.critic.path", "algorithm.reference.path"])
def test_a_folder_that_is_no_model(
    name: str, fault: str, expected: str, config: ExperimentConfig, tmp_path: Path
) -> None:
    folder = fail_to_be_a_model(tmp_path / "folder", fault)
    owner = {"model": config.model, "critic": config.algorithm.critic, "reference": config.algorithm.reference}
    owner[name.split(".")[-2]].path = str(folder)  # type: ignore[attr-defined]
    message = the_message(config)
    assert message.startswith(f"{name}={str(folder)!r}: ")
    assert expected in message
    assert "give the folder of a downloaded model" in message


def test_a_folder_that_is_missing_and_one_that_is_whole(tmp_path: Path) -> None:
    (message,) = hugging_face_folder("model.path", str(tmp_path / "nowhere"))
    assert "no such folder" in message
    whole = fail_to_be_a_model(tmp_path / "whole", "nothing")
    assert list(hugging_face_folder("model.path", str(whole))) == []
    assert json.loads((whole / "config.json").read_text())["model_type"] == "qwen2"


def test_a_model_whose_architecture_is_code_in_its_folder_is_refused(tmp_path: Path) -> None:
    folder = fail_to_be_a_model(tmp_path / "whole", "nothing")
    described = {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "my_own"}))
    (message,) = hugging_face_folder("model.path", str(folder))
    assert "its architecture 'my_own' is code in that folder, which is not executed" in message
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "qwen2"}))  # which transformers has too
    assert list(hugging_face_folder("model.path", str(folder))) == []


def test_the_kl_term_s_estimator_is_that_of_its_place_unless_it_is_named(config: ExperimentConfig) -> None:
    algorithm = config.algorithm
    assert (algorithm.kl.name, algorithm.kl_estimator.name) == ("auto", "k3")
    algorithm.kl_in = KLIn.reward
    assert algorithm.kl_estimator.name == "k1"
    algorithm.kl = ChoiceConfig("abs")
    assert algorithm.kl_estimator.name == "abs"
    algorithm.kl = ChoiceConfig("auto", {"cap": 3.0})
    assert "kl 'k1' has no parameter 'cap'" in the_message(config)
    algorithm.kl_in = KLIn.loss
    assert list(check(config)) == []


def test_a_teacher_is_refused_in_a_form_that_teaches_nothing_or_of_another_tokenizer(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    algorithm = config.algorithm
    algorithm.kl_coef, algorithm.kl_in = 1.0, KLIn.advantage
    assert list(check(config)) == []
    algorithm.kl = ChoiceConfig("k3")
    assert "algorithm.kl_in=advantage needs the log-ratio itself" in the_message(config)
    algorithm.kl, algorithm.kl_target = ChoiceConfig("auto"), 0.1
    assert "algorithm.kl_target=0.1" in the_message(config)
    algorithm.kl_target, algorithm.advantage = 0.0, ChoiceConfig("zero")
    assert list(check(config)) == []
    algorithm.kl_coef = 0.0
    assert "algorithm.advantage='zero'" in the_message(config)
    algorithm.kl_coef, algorithm.kl, algorithm.kl_in = 0.1, ChoiceConfig("k3_unbiased"), KLIn.reward
    algorithm.advantage = ChoiceConfig("grpo")
    assert "'k3_unbiased'" in the_message(config)
    algorithm.kl = ChoiceConfig("jsd")
    assert "compared in the loss only" in the_message(config)
    algorithm.kl, algorithm.kl_in = ChoiceConfig("auto"), KLIn.loss
    folders = []
    for name, vocabulary in (("policy", {"a": 0, "b": 1}), ("teacher", {"a": 1, "b": 0})):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text('{"model_type": "qwen2"}')
        (folders[-1] / "model.safetensors").touch()
        reported = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<end>", "id": 2}]}
        (folders[-1] / "tokenizer.json").write_text(json.dumps(reported))
    config.model.path, algorithm.reference.path = map(str, folders)
    messages = [message for message in check(config) if "tokenizer" in message]
    assert len(messages) == 1
    assert "2 tokens differ, for example 'a'" in messages[0]
    algorithm.reference.path = config.model.path
    assert not [message for message in check(config) if "tokenizer" in message]


def test_gdpo_needs_the_parts_of_the_reward(config: ExperimentConfig) -> None:
    config.algorithm.advantage = ChoiceConfig("gdpo", {"parts": ["correct"]})
    assert "rollout.columns=['reward/correct']" in the_message(config)
    config.rollout.columns = ["reward/correct"]
    assert list(check(config)) == []


def test_a_warm_up_is_given_in_steps_or_as_a_share_of_them(config: ExperimentConfig) -> None:
    config.optimizer.warmup_ratio, config.optimizer.warmup_steps = 0.05, 3
    assert the_message(config).startswith("optimizer.warmup_ratio=0.05: optimizer.warmup_steps=3 says it in steps")


def test_what_makes_a_correction_less_than_its_name_is_told(config: ExperimentConfig) -> None:
    assert list(warnings(config)) == []
    config.rollout.sampling.top_p, config.rollout.sampling.top_k = 0.9, 50
    (cut,) = warnings(config)
    assert "rollout.sampling.top_p=0.9, top_k=50 cuts tokens off" in cut
    config.rollout.sampling.top_p, config.rollout.sampling.top_k = 1.0, -1
    config.algorithm.prox = ProximalMode.behave
    assert list(warnings(config)) == []
    config.generation.dtype = Dtype.bfloat16
    (rounded,) = warnings(config)
    assert "'embedded' in bfloat16 rounds otherwise than training in float32" in rounded
    config.algorithm.correction.name = "none"
    assert list(warnings(config)) == []


def test_a_cpu_in_place_of_gpus_that_nothing_counts_and_float32_on_gpus_are_told(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "uncounted_gpus", lambda: "/dev/nvidia0")
    trains, serves = warnings(config)
    assert trains.startswith("trainer.device='auto': /dev/nvidia0 is there, but neither /proc/driver/nvidia/gpus nor")
    assert serves.startswith("generation.device='auto': ")
    config.trainer.device = config.generation.device = Device.cpu
    assert list(warnings(config)) == []
    monkeypatch.setattr(checks, "uncounted_gpus", lambda: "")
    monkeypatch.setattr(checks, "plan_workers", lambda config: plan_workers(config, ("0", "1")))
    config.trainer.device, config.model.dtype = Device.auto, Dtype.float32
    (slow,) = warnings(config)
    assert slow.startswith("model.dtype='float32': GPUs compute it at about a tenth of bfloat16's rate; use auto")


def test_the_behaviour_stands_for_the_proximal_policy_only_where_no_sample_is_older(config: ExperimentConfig) -> None:
    config.algorithm.prox, config.max_head_offpolicyness = ProximalMode.behave, 1
    message = the_message(config)
    assert message.startswith("algorithm.prox='behave': with max_head_offpolicyness=1 samples may be older")
    config.algorithm.policy_loss = ChoiceConfig(name="ppo_clip")
    assert "set max_head_offpolicyness=0" in the_message(config)  # the correction refers to it too
    config.algorithm.correction = ChoiceConfig(name="none")
    assert list(check(config)) == []
    config.algorithm.policy_loss = ChoiceConfig(name="decoupled_ppo")
    assert "set max_head_offpolicyness=0" in the_message(config)
    config.max_head_offpolicyness = 0
    assert list(check(config)) == []
    config.samples.replay = "kept"
    assert "the samples of 'kept' need not be of the policy" in " ".join(check(config)), "and there are none"


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.9045, 0.6545, 0.3455, 0.0955]),
    ],
)
def test_a_learning_rate_is_a_function_of_the_share_of_the_run_that_is_over(
    config: ExperimentConfig, schedule: str, rates: list[float]
) -> None:
    config.optimizer, config.total_train_steps = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule(schedule)), 5
    for minibatches in (1, 4):  # a resume may change them
        config.trainer.ppo_minibatches = minibatches
        assert [config.learning_rate(version) for version in (1, 2, 3, 4)] == pytest.approx(rates, abs=1e-4)
    end = 1.0 if schedule == "constant" else 0.0
    assert config.learning_rate(5) == config.learning_rate(9) == pytest.approx(end)
    config.total_train_steps = 50
    assert config.learning_rate(20) == pytest.approx(rates[1], abs=1e-4)


def test_a_warm_up_and_a_floor_are_shares_of_the_planned_optimizer_steps(config: ExperimentConfig) -> None:
    config.trainer.ppo_minibatches, config.total_train_steps = 2, 10
    by_steps = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule.cosine, warmup_steps=5, min_lr_share=0.1)
    by_share = replace(by_steps, warmup_steps=0, warmup_ratio=0.25)
    for config.optimizer in (by_steps, by_share):
        rates = [config.learning_rate(version, share) for version in range(3) for share in (0.0, 0.5)]
        assert rates[:6] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
        assert config.learning_rate(10) == pytest.approx(0.1)
    config.optimizer = replace(by_steps, warmup_steps=40)  # more than there are: the peak is never reached
    assert config.learning_rate(10) == pytest.approx(0.5)


def test_a_policy_whose_critic_is_trained_first_has_its_whole_schedule_after_that(config: ExperimentConfig) -> None:
    config.optimizer, config.total_train_steps = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule.linear), 5
    assert [config.learning_rate(version, first=3) for version in range(6)] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]

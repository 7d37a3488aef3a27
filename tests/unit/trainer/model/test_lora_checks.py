"""Faults of adapters are reported before anything starts; without adapters nobody needs peft."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, OPTConfig, PretrainedConfig

import asyncrl
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference import checks as inference
from asyncrl.manager import checks as manager
from asyncrl.trainer.model.lora_checks import check, layer_kinds, publishes_adapters
from asyncrl.trainer.settings import LoraPublish

KINDS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture
def adapted(config: ExperimentConfig) -> ExperimentConfig:
    """Adapters on a small experiment."""
    config.model.lora.rank, config.trainer.device, config.generation.device = 4, Device.cpu, Device.cpu
    return config


@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
def test_the_layers_of_a_folder_by_name(model: str, request: pytest.FixtureRequest) -> None:
    assert layer_kinds(request.getfixturevalue(model)) == KINDS


def test_what_can_be_trained_passes(adapted: ExperimentConfig) -> None:
    for targets in (["all-linear"], KINDS, ["q_proj"]):
        adapted.model.lora.targets = targets
        assert list(check(adapted)) == []
        assert list(inference.check(adapted)) == list(manager.check(adapted)) == []


def test_a_target_that_no_layer_has_is_told_with_those_that_there_are(adapted: ExperimentConfig) -> None:
    adapted.model.lora.targets = ["q_proj", "qproj"]
    (message,) = check(adapted)
    assert message == (
        f"model.lora.targets=['q_proj', 'qproj']: no layer of model.path={adapted.model.path!r} is called 'qproj'; "
        f"use some of {', '.join(KINDS)}, or all-linear"
    )
    adapted.model.lora.rank = 0
    assert list(check(adapted)) == []


def test_weights_that_tell_no_layers_leave_targets_to_training(adapted: ExperimentConfig, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"no JSON!")
    assert layer_kinds(tmp_path) == []
    adapted.model.path, adapted.model.lora.targets = str(tmp_path), ["anything"]
    assert list(check(adapted)) == []


def test_adapters_that_would_train_nothing_are_refused(adapted: ExperimentConfig) -> None:
    adapted.model.lora.alpha, adapted.model.lora.targets = 0.0, []
    alpha, targets = check(adapted)
    assert alpha.startswith("model.lora.alpha=0: adapters scaled by nothing train nothing")
    assert targets.startswith("model.lora.targets=[]: no layer gets an adapter; name some")


def test_where_peft_is_not_installed_its_extra_is_named(
    adapted: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    (message,) = check(adapted)
    assert message.startswith("model.lora.rank=4: peft is not installed in this environment; install the `lora` extra")
    adapted.model.lora.rank = 0
    assert list(check(adapted)) == []


def test_by_default_a_version_is_what_all_servers_can_take(adapted: ExperimentConfig) -> None:
    assert publishes_adapters(adapted)
    adapted.model.lora.publish = LoraPublish.merged
    assert not publishes_adapters(adapted)
    adapted.model.lora.publish = LoraPublish.auto
    adapted.system.shared_filesystem = False
    assert not publishes_adapters(adapted)
    adapted.system.shared_filesystem, adapted.generation.backend = True, "sglang"
    adapted.generation.sglang.python = "/bin/true"
    assert not publishes_adapters(adapted)
    for transport in ("disk", "tensor", "distributed"):
        adapted.manager.weight_transport = transport
        assert not publishes_adapters(adapted)
        assert list(check(adapted)) == list(inference.check(adapted)) == list(manager.check(adapted)) == []
    adapted.model.lora.rank = 0
    assert not publishes_adapters(adapted)


def test_adapters_alone_are_refused_where_servers_take_whole_weights(adapted: ExperimentConfig) -> None:
    adapted.model.lora.publish = LoraPublish.adapter
    assert publishes_adapters(adapted)
    assert list(check(adapted)) == []
    adapted.generation.backend, adapted.manager.weight_transport = "sglang", "tensor"
    adapted.system.shared_filesystem = False
    assert list(check(adapted)) == [
        "model.lora.publish='adapter': generation.backend='sglang' loads whole weights; use merged, or auto",
        "model.lora.publish='adapter': manager.weight_transport='tensor' sends whole weights; use merged, or auto",
        "model.lora.publish='adapter': system.shared_filesystem=false: adapters name the folder of their base model, "
        "which is another on each host; use merged, or auto",
    ]


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=17, n_embd=32, n_layer=2, n_head=4, n_positions=128),
        OPTConfig(
            vocab_size=17,
            hidden_size=32,
            ffn_dim=44,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        ),
    ],
    ids=["gpt2", "opt"],
)
def test_layers_are_found_whatever_they_are_called(
    config: PretrainedConfig, saved_model: Callable[..., Path], tmp_path: Path
) -> None:
    kinds = {"gpt2": ["c_attn", "c_fc", "c_proj"], "opt": ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]}
    assert layer_kinds(saved_model(tmp_path / "model", config)) == kinds[config.model_type]


def test_a_trainer_without_adapters_needs_no_peft(
    config: ExperimentConfig, make_rank: Any, make_batch: Any, run_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module imports it, only functions do, and none of those that are called."""
    files = {file: file.read_text() for file in Path(asyncrl.__file__).parent.rglob("*.py")}
    naming = [file for file, text in files.items() if "import peft" in text or "from peft" in text]
    assert naming
    assert not any("peft" in imported_by_itself(ast.parse(files[file])) for file in naming)
    monkeypatch.setitem(sys.modules, "peft", None)
    run_step(config, make_rank(config), make_batch())
    config.model.lora.rank = 4
    with pytest.raises(ImportError, match="peft"):
        make_rank(config)


def imported_by_itself(tree: ast.Module) -> set[str]:
    """The packages that importing a module imports."""
    found, below = set[str](), list[ast.AST](tree.body)
    while below:
        node = below.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            below += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            below += ast.iter_child_nodes(node)
    return found

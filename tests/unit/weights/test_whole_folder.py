"""A model folder is loaded if its files hold the model of its config.json, and is refused by name if not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.host import load_model
from asyncrl.models.folder_checks import ModelPart
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.model.value_models import load_critic
from asyncrl.trainer.settings import AttentionImplementation
from asyncrl.weights.whole_folder import IncompleteModelError, check_whole

LAYER = "model.layers.1.self_attn.o_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]
Saved = Callable[..., Path]


def copied(folder: Path, to: Path, change: Change = lambda tensors: tensors, **config: Any) -> Path:
    """Return a copy of the model `folder` with other tensors, and another config."""
    shutil.copytree(folder, to)
    save_file(change(load_file(folder / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(described))
    return to


def without(name: str) -> Change:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


def prefixed(prefix: str) -> Change:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def with_head(factor: float) -> Change:
    return lambda tensors: {**tensors, HEAD: tensors[EMBEDDING] * factor}


def with_tensor(name: str) -> Change:
    return lambda tensors: {**tensors, name: torch.zeros(16)}


def layers(count: int) -> dict[str, Any]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


def rows(count: int) -> Change:
    return lambda tensors: {**tensors, EMBEDDING: torch.zeros(count, 16)}


FAULTS: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a matrix": (without(LAYER), {}, f"lack {LAYER}, which would get random values"),
    "a norm": (without("model.norm.weight"), {}, "lack model.norm.weight"),
    "a layer": (lambda tensors: tensors, layers(3), "and 9 more, which would get random values"),
    "all keys": (prefixed("module."), {}, "rename the tensors (without 'module.')"),
    "the head of an untied model": (without("-"), {"tie_word_embeddings": False}, f"lack {HEAD}"),
    "one of two heads": (with_head(0.5), {}, f"ties {HEAD} to {EMBEDDING}, and its files have both with different"),
    "a bias in the config": (
        with_tensor("model.layers.0.self_attn.o_proj.bias"),
        {},
        "have model.layers.0.self_attn.o",
    ),
    "layers in the config": (lambda tensors: tensors, layers(1), "have model.layers.1.input_layernorm"),
    "rows": (rows(19), {}, f"{EMBEDDING} is [19, 16], not [17, 16] as in its config.json"),
    "lengths in the config": (
        lambda tensors: tensors,
        {"num_hidden_layers": 3},
        "transformers makes no model of it: StrictDataclassClassValidationError",
    ),
    "columns": (lambda tensors: tensors, {"intermediate_size": 48}, "is [16, 32], not [16, 48]"),
}


@pytest.mark.parametrize("lacking", FAULTS)
def test_a_folder_whose_files_and_config_differ_is_refused_by_name(
    lacking: str, qwen_dir: Path, tmp_path: Path
) -> None:
    change, config, says = FAULTS[lacking]
    folder = copied(qwen_dir, tmp_path / "model", change, **config)
    loads = (
        lambda: check_whole(folder),
        lambda: load_causal_lm(folder, Dtype.float32, AttentionImplementation.sdpa, torch.device("cpu")),
        lambda: load_model(folder, device="cpu", dtype=Dtype.float32, threads=1),
    )
    for load in loads:
        with pytest.raises(IncompleteModelError) as refused:
            load()
        assert says in str(refused.value)


def test_equal_copies_of_a_tied_head_and_old_names_are_no_fault(qwen_dir: Path, tmp_path: Path) -> None:
    check_whole(copied(qwen_dir, tmp_path / "both", with_head(1.0)))
    only_head = lambda tensors: without(EMBEDDING)(with_head(1.0)(tensors))  # noqa: E731
    check_whole(copied(qwen_dir, tmp_path / "head", only_head))
    stale = with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq")  # of older versions of transformers
    check_whole(copied(qwen_dir, tmp_path / "inv_freq", stale))
    trunk = lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()}  # noqa: E731
    check_whole(copied(qwen_dir, tmp_path / "trunk", trunk))


def test_experts_that_files_hold_one_by_one_are_joined_and_a_missing_one_is_told(
    saved_model: Saved, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=17,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    folder = saved_model(tmp_path / "experts", config)
    check_whole(folder)
    name = next(name for name in load_file(folder / "model.safetensors") if "experts.3" in name)
    with pytest.raises(IncompleteModelError, match=r"model\.layers\.\d\.mlp\.experts"):
        check_whole(copied(folder, tmp_path / "three", without(name)))


def test_a_critic_takes_a_trunk_with_or_without_a_head_of_one_score(qwen_dir: Path, tmp_path: Path) -> None:
    check_whole(qwen_dir, ModelPart.trunk)
    for labels in (1, 2):
        config = AutoConfig.from_pretrained(qwen_dir, num_labels=labels)
        classifier = AutoModelForSequenceClassification.from_config(config)
        classifier.save_pretrained(tmp_path / f"labels-{labels}")
    for part in (ModelPart.trunk, ModelPart.reward):
        check_whole(tmp_path / "labels-1", part)
        with pytest.raises(IncompleteModelError, match="its head score gives 2 labels"):
            check_whole(tmp_path / "labels-2", part)
    with pytest.raises(IncompleteModelError, match="one linear layer called score, and it has none"):
        check_whole(qwen_dir, ModelPart.reward)
    with pytest.raises(IncompleteModelError, match=r"have v_head\.summary\.weight, which the model"):
        check_whole(copied(qwen_dir, tmp_path / "v_head", with_tensor("v_head.summary.weight")), ModelPart.trunk)
    with pytest.raises(IncompleteModelError, match=r"lack layers\.1\.self_attn\.o_proj\.weight"):
        load_critic(
            copied(qwen_dir, tmp_path / "torn", without(LAYER)),
            Dtype.float32,
            AttentionImplementation.sdpa,
            torch.device("cpu"),
        )


def test_a_large_head_is_read_in_its_own_type(qwen_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen_dir, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "low")
    check_whole(copied(tmp_path / "low", tmp_path / "both", with_head(1.0)))
    with pytest.raises(IncompleteModelError, match="different values"):
        check_whole(copied(tmp_path / "low", tmp_path / "differ", with_head(1.01)))


def test_files_in_parts_are_read_as_the_index_says(qwen_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    AutoModelForCausalLM.from_pretrained(qwen_dir).save_pretrained(folder, max_shard_size="8KB")
    assert (folder / "model.safetensors.index.json").is_file()
    save_file({"layers.0.wq": torch.zeros(4)}, folder / "consolidated.safetensors")
    check_whole(folder)
    next(folder.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(IncompleteModelError, match=r"model-00002-of-.*, which is not there"):
        check_whole(folder)


@pytest.mark.smollm2
def test_a_real_pretrained_model_is_whole(chat_model: Path) -> None:
    check_whole(chat_model)
    check_whole(chat_model, ModelPart.trunk)

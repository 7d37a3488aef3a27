"""A model folder's tensors are found in the parameters of the model, under the names that transformers saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter

from asyncrl.weights import folder_tensors as module
from asyncrl.weights.folder_tensors import FolderFormatError, WholeModel, folder_tensors
from asyncrl.weights.loading import apply_weights, load_targets, read_checkpoint, stage_weights
from asyncrl.weights.manifest import WeightUpdateError

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 17,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}


def tiny(model_type: str, seed: int = 0) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_views_are_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    saved, views = read_checkpoint(tmp_path), WholeModel(model).tensors()
    assert views.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(views[name], tensor), name


@pytest.mark.parametrize("model_type", MODELS)
def test_a_folder_s_tensors_go_into_the_parameters(model_type: str, tmp_path: Path) -> None:
    model, other = tiny(model_type), tiny(model_type, seed=1)
    other.save_pretrained(tmp_path)
    apply_weights(stage_weights(load_targets(model), tmp_path))
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_folder_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    model = tiny("mixtral")
    smaller = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=3)
    AutoModelForCausalLM.from_config(smaller).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(WeightUpdateError, match=r"gate\.weight has shape|lacks .*experts\.3\."):
        stage_weights(load_targets(model), tmp_path)


def test_the_order_is_that_of_the_parameters() -> None:
    tensors = folder_tensors(tiny("mixtral"))
    layer = "model.layers.0.block_sparse_moe."
    experts = [tensor.name for tensor in tensors if tensor.parameter == "model.layers.0.mlp.experts.gate_up_proj"]
    assert experts == [f"{layer}experts.{expert}.{kind}.weight" for expert in range(4) for kind in ("w1", "w3")]
    parameters = list(dict.fromkeys(tensor.parameter for tensor in tensors))
    assert parameters == [name for name, _ in tiny("mixtral").named_parameters()]


def test_what_is_saved_turned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = WeightConverter("self_attn.o_proj.weight", "self_attn.o_proj.weight", [Transpose(0, 1)])
    original = module.as_saved

    def saved(model: Any, tensors: Any) -> Any:
        model._weight_conversions = [turned]
        return original(model, tensors)

    monkeypatch.setattr(module, "as_saved", saved)
    with pytest.raises(FolderFormatError, match="o_proj"):
        folder_tensors(tiny("qwen2"))

"""The parts of transformers that asyncrl uses beyond its documented interface are as they were; a failure here names
the change.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, configuration_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.models import transformers_internals as internals
from asyncrl.models.transformers_internals import CacheLayerMixin

BASE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LINEAR = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")} | {
    f"linear_{part}_head_dim": 8 for part in ("key", "value")
}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}


def build(model_type: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**BASE, **settings}))
    return model.eval()


def test_a_cache_layer_defines_what_it_did() -> None:
    methods = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == methods
    update = inspect.signature(CacheLayerMixin.update)
    assert list(update.parameters)[:3] == ["self", "key_states", "value_states"]


def test_every_type_of_layer_that_is_packed_is_there_and_of_a_new_one_somebody_hears() -> None:
    """Packed attention is tried on those that are sorted in, and no others: see `trainer.model.layout_parity`."""
    packed = internals.PLAIN_LAYERS | internals.RECURRENT_LAYERS | internals.TOKENWISE_LAYERS
    elsewhere = {
        "chunked_attention",
        "window_attention",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "reference_sliding_attention",
    }
    there = set(configuration_utils.ALLOWED_ATTN_LAYER_TYPES)
    assert packed - {"mlp"} <= there, "mlp is NemotronH's alone, and in no list"
    if new := there - packed - elsewhere:
        warnings.warn(f"types of layers that this version of transformers adds, sort them in: {new}", stacklevel=1)


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {}, {"scaling", "dropout"}),
        ("mistral", {"sliding_window": 4}, {"scaling", "sliding_window"}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 4}, {"scaling", "sliding_window", "softcap"}),
        ("gpt_oss", MOE, {"scaling", "sliding_window", "s_aux"}),
    ],
)
def test_models_hand_their_attention_what_ours_reads_and_what_we_hand_to_the_model(
    model_type: str, settings: dict[str, Any], expected: set[str]
) -> None:
    seen: list[set[str]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen.append({name for name, value in kwargs.items() if value is not None})
        assert mask is None, "an attention that transformers does not know gets no mask drawn"
        return torch.zeros_like(query).transpose(1, 2), None

    internals.register_attention("asyncrl_spy", spy)
    model = build(model_type, **settings)
    reported = internals.packing_arguments(
        torch.tensor([0, 3], dtype=torch.int32), 3, torch.zeros(3, dtype=torch.int32)
    )
    with internals.attention(model, "asyncrl_spy"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, attention_blocks=[], **reported)
    assert all(expected | {"attention_blocks", *reported} <= each for each in seen[:1])
    assert len(seen) == 2


def test_an_attention_is_replaced_and_put_back() -> None:
    model = build("llama")
    before = model.config._attn_implementation
    with internals.attention(model, "eager"):
        assert model.config._attn_implementation == "eager"
        assert model.base_model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == before


def test_an_attention_is_not_set_in_the_config_of_a_part_that_the_model_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Transformers warns of each such part at each change: a page of warnings with Moshi."""
    model = build("moshi", ffn_dim=48, audio_vocab_size=40)
    internals.register_attention("mine", lambda *_, **__: (torch.zeros(1), None))
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with internals.attention(model, "mine"):
            assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
                "mine"
            }
        internals.set_attention(model, "eager")
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert model.config._attn_implementation == "eager"
    assert caplog.messages == []


@pytest.mark.parametrize(("model_type", "replaceable"), [("llama", True), ("gpt_oss", True), ("falcon", False)])
def test_a_model_tells_whether_its_attention_can_be_replaced(model_type: str, replaceable: bool) -> None:
    settings = {name: value for name, value in BASE.items() if name != "head_dim"}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))
    assert internals.attention_is_replaceable(model) is replaceable


@pytest.mark.parametrize(
    ("model_type", "settings", "recurrent"),
    [
        ("llama", {}, False),
        ("mamba", {"state_size": 4}, True),
        ("recurrent_gemma", {"lru_width": 16, "attention_window_size": 4}, True),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, True),
        ("qwen3_5_text", {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}, True),
    ],
)
def test_a_model_tells_whether_it_is_recurrent(model_type: str, settings: dict[str, Any], recurrent: bool) -> None:
    assert internals.keeps_recurrent_state(build(model_type, **settings)) is recurrent


def test_torchs_convolution_refuses_to_keep_packed_sequences_apart_instead_of_mixing_them() -> None:
    model = build("lfm2", layer_types=["conv", "full_attention"])
    reported = internals.packing_arguments(
        torch.tensor([0, 3], dtype=torch.int32), 3, torch.zeros(3, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="keep packed sequences apart"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, **reported)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("gemma2", {"final_logit_softcapping": 0.01}),
        ("recurrent_gemma", {"lru_width": 16, "logits_soft_cap": 0.01}),
        ("falcon_h1", {"lm_head_multiplier": 0.3, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32}),
        ("llama", {}),
    ],
)
def test_logits_are_the_heads_changed_as_the_config_says(model_type: str, settings: dict[str, Any]) -> None:
    model = build(model_type, **settings)
    head = model.get_output_embeddings()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = internals.logits_of_head(model.config, head)(hidden)
        torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[0])
        assert torch.equal(logits, head(hidden)) == (not settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "limit"),
    [("llama", {"max_position_embeddings": 64}, 64), ("gpt2", {"n_positions": 64}, 64), ("bloom", {}, None)],
)
def test_the_longest_sequence_is_found_under_whatever_name(
    model_type: str, settings: dict[str, int], limit: int | None
) -> None:
    assert internals.context_limit(CONFIG_MAPPING[model_type](**settings)) == limit


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_a_module_that_takes_tokens_choices_and_weights(model_type: str) -> None:
    settings = {"num_local_experts": 3} if model_type == "mixtral" else {"num_experts": 3, "moe_intermediate_size": 16}
    model = build(model_type, num_experts_per_tok=2, **settings)
    styles = {name.rpartition(".experts")[2]: style for name, style in model.ep_plan.items()}
    parameters = dict.fromkeys((".gate_up_proj", ".down_proj"), internals.EXPERTS_PARAMETER)
    assert styles == {"": internals.EXPERTS_MODULE, **parameters}
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == 3
    assert {parameter.shape[0] for parameter in experts.parameters()} == {3}
    hidden_TH = torch.randn(1, model.config.hidden_size)
    with torch.no_grad():
        both = experts(hidden_TH, torch.tensor([[0, 2]]), torch.tensor([[0.3, 0.7]]))
        each = [experts(hidden_TH, torch.tensor([[expert]]), torch.ones(1, 1)) for expert in (0, 2)]
    torch.testing.assert_close(both, 0.3 * each[0] + 0.7 * each[1])


def test_a_model_is_saved_as_its_folder_has_it() -> None:
    model = build("mixtral", num_local_experts=2)
    saved = internals.as_saved(model, model.state_dict())
    layer = "model.layers.0.block_sparse_moe."
    fused = model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(torch.cat([saved[f"{layer}experts.1.{kind}.weight"] for kind in ("w1", "w3")]), fused[1])
    assert f"{layer}gate.weight" in saved

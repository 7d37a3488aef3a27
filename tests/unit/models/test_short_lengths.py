"""A copy with short lengths has the weights of the original, lengths in place of no sizes, and leaves it alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.models import parity
from asyncrl.models.parity import SHORT, ShortModel, short_model

BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
INDEX = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
INDEX |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
INDEX |= {"n_group": 1, "topk_group": 1, "index_topk": 50, "index_head_dim": 16, "index_n_heads": 2}


def build(model_type: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**BASE, **settings}))
    return model.eval()


def short(model: PreTrainedModel, reach: int) -> ShortModel | None:
    return short_model(model, dict(model.named_parameters(remove_duplicate=False)), reach, fitting=19)


@pytest.mark.parametrize(
    ("model_type", "settings", "reach", "lengths"),
    [
        ("llama", {}, 400, None),
        ("mistral", {"sliding_window": 50}, 400, {"sliding_window": 50}),
        ("mistral", {"sliding_window": 50}, 49, None),
        ("mistral", {"sliding_window": 7}, 400, None),
        ("llama4_text", {"attention_chunk_size": 50, "intermediate_size_mlp": 48}, 400, {"attention_chunk_size": 50}),
        ("deepseek_v32", INDEX, 400, {"index_topk": 50}),
        ("gpt2", {}, 64, {"max_position_embeddings": 64}),
        ("gpt2", {}, 63, None),
        ("gpt_neo", {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, 63, None),
        (
            "gpt_neo",
            {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 50},
            64,
            {"window_size": 50, "max_position_embeddings": 64},
        ),
    ],
)
def test_lengths_that_rows_come_up_to_are_lowered_and_nothing_else(
    model_type: str, settings: dict[str, Any], reach: int, lengths: dict[str, int] | None
) -> None:
    made = short(build(model_type, **settings), reach)
    assert (made and made.lengths) == lengths
    if made is not None:
        text = made.model.config.get_text_config()
        assert {getattr(text, name) for name in made.lengths if name != "max_position_embeddings"} <= {SHORT}


def test_it_computes_what_a_model_that_was_made_with_short_lengths_does() -> None:
    model = build("mistral", sliding_window=50, initializer_range=0.25)
    made = short(model, 400)
    expected = build("mistral", sliding_window=SHORT)
    expected.load_state_dict(model.state_dict())
    assert made is not None
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(made.model(input_ids=ids).logits, expected(input_ids=ids).logits)
        assert (made.model(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() > 0.1


def test_the_original_is_as_it_was() -> None:
    model = build("mistral", sliding_window=50)
    model.set_attn_implementation("sdpa")
    random, settings = torch.random.get_rng_state(), model.config.to_dict()
    made = short(model, 400)
    assert made is not None
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    for mine, its in zip(model.parameters(), made.model.parameters(), strict=True):
        assert mine.requires_grad
        assert not its.requires_grad
        assert mine.data_ptr() == its.data_ptr()
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_modules_that_other_threads_make_meanwhile_have_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, made = list[nn.Linear](), parity.new_model

    def makes(*args: Any) -> PreTrainedModel:
        with ThreadPoolExecutor(1) as other:
            elsewhere.append(other.submit(nn.Linear, 2, 2).result())
        return made(*args)

    monkeypatch.setattr(parity, "new_model", makes)
    assert short(build("mistral", sliding_window=50), 400) is not None
    assert {linear.weight.device.type for linear in elsewhere} == {"cpu"}

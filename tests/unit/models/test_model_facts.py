"""The sizes of a model, whatever names its configuration has for them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.models.model_config import ModelFacts

PLAIN = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (
            {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100},
            ModelFacts("gpt2", 3, 64, 100, 4, 4, 16, 256),
        ),
        (
            {"model_type": "llama", **PLAIN, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96},
            ModelFacts("llama", 3, 64, 100, 4, 2, 32, 96),
        ),
        (
            {
                "model_type": "qwen2_moe",
                **PLAIN,
                "intermediate_size": 96,
                "moe_intermediate_size": 24,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "shared_expert_intermediate_size": 48,
            },
            ModelFacts("qwen2_moe", 3, 64, 100, 4, 4, 16, 24, 8, 2, 48),
        ),
        (
            {
                "model_type": "deepseek_v3",
                **PLAIN,
                "moe_intermediate_size": 24,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "n_shared_experts": 2,
            },
            ModelFacts("deepseek_v3", 3, 64, 100, 4, 4, 16, 24, 16, 4, 48),
        ),
        (
            {"model_type": "granite_moe", **PLAIN, "num_local_experts": 0, "n_shared_experts": 2},
            ModelFacts("granite_moe", 3, 64, 100, 4, 4, 16, 256),
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_sizes_are_read_under_every_name(described: dict[str, Any], expected: ModelFacts) -> None:
    assert ModelFacts.of(described) == expected

"""Norms that torch's kernel computes are replaced, those of another formula are not, and results stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.models.fused_norms import fuse_norms

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 53,
    "pad_token_id": 0,
}


def model(kind: str, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | more), dtype=dtype)
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)  # else a wrong formula could pass
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "norms"), [("qwen2", 5), ("llama", 5), ("qwen3", 9), ("mistral", 5), ("gemma2", 0), ("gpt_neox", 0)]
)
def test_norms_of_the_kernels_formula_are_replaced(kind: str, norms: int, dtype: torch.dtype) -> None:
    written, fused = model(kind, dtype, head_dim=8), model(kind, dtype, head_dim=8)
    assert fuse_norms(fused, gradients=True) == norms
    ids = torch.arange(20)[None]
    expected, found = (each(input_ids=ids).logits.float() for each in (written, fused))
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("wrong", [lambda out: out * 1.05, lambda out: out.detach() + 0 * out])
def test_a_kernel_with_a_fault_is_not_used(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its values, or in its gradients."""
    right = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *args: wrong(right(*args)))
    assert fuse_norms(model("qwen2", torch.float32), gradients=True) == 0


@pytest.mark.parametrize(
    ("kind", "norms", "more"),
    [
        ("mamba2", 3, {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}),
        (
            "qwen3_next",
            0,
            {
                "layer_types": ["linear_attention", "full_attention"],
                "head_dim": 8,
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "linear_num_value_heads": 2,
                "linear_num_key_heads": 2,
            },
        ),
    ],
)
def test_a_norm_with_a_gate_stays_the_models_own(kind: str, norms: int, more: dict[str, Any]) -> None:
    written, fused = model(kind, torch.float32, **more), model(kind, torch.float32, **more)
    assert fuse_norms(fused, gradients=True) == norms
    ids = torch.arange(20)[None]
    expected, found = (each(input_ids=ids, use_cache=False).logits for each in (written, fused))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)

"""Compiled norms and feed-forward compute what is written, for any number of tokens, and are proven at load."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.models.parity import UnsupportedModelError
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.model import layers
from asyncrl.trainer.model.layers import compile_layers
from asyncrl.trainer.model.layout_parity import select_attention
from asyncrl.trainer.settings import AttentionImplementation

VOCABULARY = 53


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        Qwen2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=VOCABULARY,
        )
    )
    return made


def gradients(model: PreTrainedModel, tokens: int) -> list[Tensor]:
    ids = torch.arange(tokens)[None] % VOCABULARY
    model.zero_grad()
    model(input_ids=ids).logits.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_compiled_parts_have_the_gradients_of_the_written_ones_and_are_compiled_once_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    plain, ours = model(), model()
    assert compile_layers(ours.model) == 2 * (2 + 1)
    for tokens in (7, 12):
        for expected, found in zip(gradients(plain, tokens), gradients(ours, tokens), strict=True):
            torch.testing.assert_close(found, expected)
    with torch._dynamo.config.patch(error_on_recompile=True):  # type: ignore[no-untyped-call]
        for tokens in (9, 33, 41):
            gradients(ours, tokens)


def engine_of(**settings: Any) -> FlatPolicyEngine:
    return FlatPolicyEngine(
        model(),
        temperature=1.0,
        attention=AttentionKind.packed,
        tokens_per_micro_batch=64,
        optimizer=None,
        **settings,
    )


def test_a_model_is_proven_with_its_compiled_parts_against_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BACKEND", "eager")
    layout = select_attention(engine_of(compiled=True), AttentionImplementation.sdpa, longest=64)
    assert layout.kind == AttentionKind.tree

    def wrong(graph: GraphModule, _inputs: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *inputs: tuple(1.5 * out for out in graph(*inputs))

    monkeypatch.setattr(layers, "BACKEND", wrong)
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM cannot be trained"):
        select_attention(engine_of(compiled=True), AttentionImplementation.sdpa, longest=64)


def test_a_model_without_such_parts_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"trainer\.compile=true: no layer of Linear has a norm"):
        compile_layers(nn.Linear(2, 2))


def test_a_part_is_compiled_for_every_kind_of_layer_and_never_computed_as_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of more kinds than torch compiles by default: types, with and without gradients, sizes of one and of more."""
    from torch._dynamo.testing import CompileCounter  # brings the whole compiler, to each worker of pytest

    torch._dynamo.reset()
    counted = CompileCounter()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(layers, "BACKEND", counted)
    norm = layers.compiled(lambda hidden: hidden / hidden.square().mean(-1, keepdim=True).sqrt())
    cases = list(product((torch.float32, torch.float64, torch.bfloat16), (1, 3), (False, True)))
    for dtype, tokens, gradients in cases:
        norm(torch.ones(tokens, 4, dtype=dtype, requires_grad=gradients))
    assert counted.frame_count == len(cases)
    torch._dynamo.reset()

"""Packed weights: the numbers of a plain forward, also after a weight update, and only where they pay."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.step import LEAST_WEIGHT, PackedLinears
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models.transformers_internals import compute_head_in_float32
from tests.engine_steps import run

pytestmark = pytest.mark.skipif(not torch._C._has_mkldnn, reason="this torch has no oneDNN")
VOCAB = 50


def wide_model(seed: int) -> Qwen2ForCausalLM:
    """All linear layers but the head are large enough to be packed; query, key and value have a bias."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def worst_error(engine: GenerationEngine, reference: nn.Module) -> float:
    """Largest difference between log-probabilities of ragged samples and a plain forward."""
    rng = random.Random(0)
    inputs = []
    for index in range(12):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))
        spec = SamplingSpec(max_new_tokens=rng.randint(5, 40), seed=index)
        inputs.append(GenerationInput(f"r{index:02d}", prompt, spec, prompt_logprobs_from=0))
    worst = 0.0
    for request, output in zip(inputs, run(engine, *inputs), strict=True):
        ids = torch.tensor([[*request.input_ids, *output.output_ids]])
        with torch.no_grad():
            logprobs = reference(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert output.prompt_logprobs is not None
        given = torch.tensor([*output.prompt_logprobs[1:], *output.logprobs])
        worst = max(worst, (given - logprobs).abs().max().item())
    return worst


def test_logprobs_over_packed_weights_equal_a_plain_forward_before_and_after_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, new = wide_model(0), wide_model(1)
    reference = copy.deepcopy(model)
    assert len(PackedLinears.of(model).weights) == 2 * 7
    engine = GenerationEngine(model, max_running_requests=5)
    assert worst_error(engine, reference) < 1e-6
    new.save_pretrained(tmp_path)
    engine.update_weights(str(tmp_path), "v1")
    assert worst_error(engine, new) < 1e-6
    assert not [
        each for each in caplog.records if each.name.startswith("asyncrl.inference")
    ]  # the program was recorded


def test_a_head_in_float32_has_a_packed_copy_that_follows_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The output embedding is the input's too, which stays in bfloat16."""
    model, new = wide_model(0).to(torch.bfloat16).eval(), wide_model(1).to(torch.bfloat16).eval()
    compute_head_in_float32(model)
    compute_head_in_float32(new)
    ids = torch.tensor([[1, 2, 3]])
    assert model(ids).logits.dtype == torch.float32
    engine = GenerationEngine(model, max_running_requests=5)
    linears = engine._batch.runner._linears
    assert [weight is model.lm_head.weight for weight in linears.weights] == [True]
    assert worst_error(engine, copy.deepcopy(model)) < 3e-2
    new.save_pretrained(tmp_path)
    engine.update_weights(str(tmp_path), "v1")
    assert worst_error(engine, new) < 3e-2
    hidden = new.model(ids).last_hidden_state[0]
    with linears:
        torch.testing.assert_close(model.lm_head(hidden), hidden.float() @ new.lm_head.weight.float().T)
    model.lm_head.weight.data.zero_()
    with linears:
        assert model.lm_head(hidden).abs().max() > 0, "the copy is used, not made anew"
    assert linears.drop() == 4 * model.lm_head.weight.numel()
    assert not [each for each in caplog.records if each.name.startswith("asyncrl.inference")]


def test_packed_weights_are_used_only_while_in_force() -> None:
    layer = nn.Linear(256, 256).requires_grad_(False)
    linears = PackedLinears.of(layer)
    before, states = layer(torch.ones(3, 256)), torch.ones(3, 256)
    layer.weight.zero_()
    with linears:
        torch.testing.assert_close(layer(states), before)
    torch.testing.assert_close(layer(states), layer.bias.expand(3, -1))


def test_renewed_copies_are_of_the_weights_as_they_are_now() -> None:
    layer = nn.Linear(256, 256).requires_grad_(False)
    linears = PackedLinears.of(layer)
    layer.weight.fill_(0.5)
    linears.renew()
    with linears:
        torch.testing.assert_close(layer(torch.ones(3, 256)), (128 + layer.bias).expand(3, -1))


def test_small_weights_and_other_dtypes_are_left_alone() -> None:
    side = int(LEAST_WEIGHT**0.5)
    small = nn.Linear(side, side - 1)
    assert PackedLinears.of(small).packed == ()
    assert PackedLinears.of(nn.Linear(side, side, dtype=torch.bfloat16)).packed == ()
    assert len(PackedLinears.of(nn.Linear(side, side)).packed) == 1

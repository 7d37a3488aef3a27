"""Weights with the values of int8: those of torch's own quantiser, at the start and after each update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, SamplingSpec
from asyncrl.inference.embedded.model.int8_weights import Int8Weights, rounded
from asyncrl.inference.embedded.model.served_weights import ServedWeights
from tests.engine_steps import run

VOCAB = 40


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, vocab_size=VOCAB, max_position_embeddings=64, eos_token_id=None, initializer_range=0.3
    )
    return LlamaForCausalLM(config)


def by_torch(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    return torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8).dequantize()


def test_values_are_those_of_torchs_quantiser_by_channel() -> None:
    weight = torch.randn(7, 50, generator=torch.Generator().manual_seed(3))
    weight[2] = 0.0
    torch.testing.assert_close(rounded(weight[[0, 1, 3, 4, 5, 6]]), by_torch(weight[[0, 1, 3, 4, 5, 6]]))
    assert not rounded(weight)[2].any()
    assert all(len(row.unique()) <= 255 for row in rounded(weight))
    torch.testing.assert_close(rounded(rounded(weight)), rounded(weight))


def test_linear_layers_alone_are_rounded_at_the_start_and_after_an_update(tmp_path: Path) -> None:
    served, published = model(), model(seed=1).to(torch.bfloat16)
    published.save_pretrained(str(tmp_path))
    weights = ServedWeights(served, str(tmp_path), int8=True)
    for expected in (model(), published.float()):
        linear = {f"{name}.weight" for name, each in expected.named_modules() if isinstance(each, nn.Linear)}
        for name, tensor in served.state_dict().items():
            was = expected.state_dict()[name]
            if name in linear - {"lm_head.weight"}:
                assert torch.equal(tensor, rounded(was)), name
                assert not torch.equal(tensor, was)
            else:
                assert torch.equal(tensor, was), name
        weights.apply(weights.read(str(tmp_path)))


def test_the_engine_answers_with_the_log_probabilities_of_the_rounded_model() -> None:
    plain, reference = model(), model()
    Int8Weights(reference)
    engine = GenerationEngine(model(), max_running_requests=4, int8=True)
    (output,) = run(engine, GenerationInput("r", (3, 1, 4), SamplingSpec(max_new_tokens=9, seed=1)))
    ids = torch.tensor([[3, 1, 4, *output.output_ids]])
    with torch.no_grad():
        of = [
            each(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[2:, 0] for each in (reference, plain)
        ]
    assert output.logprobs == pytest.approx(of[0].tolist(), abs=1e-4)
    assert (of[0] - of[1]).abs().max() > 1e-3, "it is not the model that was published"

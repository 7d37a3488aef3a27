"""The recorded decode step: used where it is right, refused where it is not, and never behind on weights."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from tests.engine_steps import run

VOCAB = 30


def tiny(architecture: str, seed: int) -> Any:
    config = CONFIG_MAPPING[architecture](
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms are not all ones, so that stale ones would show
    return model


def generate(
    engine: GenerationEngine, seed: int, count: int = 12
) -> list[tuple[tuple[int, ...], list[int], list[float]]]:
    rng = random.Random(seed)
    inputs = [
        GenerationInput(
            f"{seed}-{index}",
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
            SamplingSpec(max_new_tokens=rng.randint(5, 40), seed=rng.getrandbits(40)),
        )
        for index in range(count)
    ]
    outputs = run(engine, *inputs)
    return [(i.input_ids, o.output_ids, o.logprobs) for i, o in zip(inputs, outputs, strict=True)]


@torch.no_grad()
def worst_error(model: nn.Module, samples: list[tuple[tuple[int, ...], list[int], list[float]]]) -> float:
    worst = 0.0
    for prompt, output, logprobs in samples:
        logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
        worst = max(worst, (logits[rows, torch.tensor(output)] - torch.tensor(logprobs)).abs().max().item())
    return worst


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "gemma3_text"])
def test_recorded_decoding_follows_a_weight_update(architecture: str, tmp_path: Path, caplog: Any) -> None:
    engine = GenerationEngine(tiny(architecture, 0), max_running_requests=4)
    new = tiny(architecture, 1)
    new.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        generate(engine, 0, count=30)
        update = engine.update_weights(str(tmp_path), "v1")
        samples = generate(engine, 1, count=30)
    assert update.result(timeout=0) == 0
    assert not [record for record in caplog.records if record.name.startswith("asyncrl.inference")]
    assert worst_error(new, samples) < 1e-6


def test_a_model_whose_control_flow_depends_on_data_is_decoded_eagerly_and_exactly(caplog: Any) -> None:
    class Doubtful(nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            logits = super().forward(states)
            return logits * 0.5 if bool(logits.max() > 0) else logits

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config)
    model.lm_head = Doubtful(config.hidden_size, VOCAB, bias=False)
    reference = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        samples = generate(GenerationEngine(model, max_running_requests=4), 3)
    assert [record for record in caplog.records if "control flow depends on data" in record.getMessage()]
    assert worst_error(reference, samples) < 1e-6


def test_the_engine_leaves_the_model_as_it_was() -> None:
    model = tiny("qwen3", 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    generate(GenerationEngine(model, max_running_requests=4), 5)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(after[name].data_ptr() == pointers[name] for name in before)


def test_a_padding_token_of_the_config_does_not_keep_steps_from_being_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Most real models have one above 0, which torch compares with the vocabulary's size at each embedding."""
    model = tiny("llama", 0)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = 2
    engine = GenerationEngine(model, max_running_requests=4)
    assert worst_error(copy.deepcopy(model), generate(engine, 1)) < 1e-5
    assert engine._batch.runner._program._programs, "steps are recorded"
    assert "without a recorded program" not in caplog.text
    assert embedding.padding_idx == 2

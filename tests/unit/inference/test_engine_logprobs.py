"""The engine's log-probabilities against a plain forward of the whole sequence, for every architecture it serves."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.inference.embedded import step
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, RequestError, SamplingSpec
from asyncrl.models.chunked_logprobs import token_logprobs
from tests.engine_steps import run

VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
FP32_TOLERANCE = 1e-6
"""The bound asked for; sums in another order differ in the last bits of fp32."""


def build(architecture: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = CONFIG_MAPPING[architecture](**{**COMMON, **ARCHITECTURES[architecture]})
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], output: list[int], temperature: float
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    logits = model(input_ids=ids).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
    return logprobs[rows, torch.tensor(output)]


def ragged_inputs(seed: int, count: int, temperature: float = 1.0) -> list[GenerationInput]:
    rng = random.Random(seed)
    inputs = []
    for index in range(count):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))
        spec = SamplingSpec(max_new_tokens=rng.randint(1, 40), temperature=temperature, seed=rng.getrandbits(60))
        inputs.append(GenerationInput(f"r{index:03d}", prompt, spec))
    return inputs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward_while_requests_join_and_leave(architecture: str, temperature: float) -> None:
    model = build(architecture)
    reference = copy.deepcopy(model)
    engine = GenerationEngine(model, max_running_requests=5)
    inputs = ragged_inputs(11, 17, temperature)
    for request, output in zip(inputs, run(engine, *inputs), strict=True):
        assert len(output.output_ids) == request.sampling.max_new_tokens
        expected = plain_logprobs(reference, request.input_ids, output.output_ids, temperature)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0.0, atol=FP32_TOLERANCE)


def test_bfloat16_logprobs_stay_near_a_plain_forward() -> None:
    model = build("qwen2", torch.bfloat16)
    reference = copy.deepcopy(model)
    engine = GenerationEngine(model, max_running_requests=4)
    inputs = ragged_inputs(5, 6)
    for request, output in zip(inputs, run(engine, *inputs), strict=True):
        expected = plain_logprobs(reference, request.input_ids, output.output_ids, 1.0)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0.0, atol=3e-2)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text"])
def test_prompt_logprobs_equal_a_plain_forward(architecture: str) -> None:
    model = build(architecture)
    reference = copy.deepcopy(model)
    prompt = tuple(random.Random(2).randrange(VOCAB) for _ in range(20))
    request = GenerationInput("p", prompt, SamplingSpec(max_new_tokens=0, temperature=0.5), prompt_logprobs_from=0)
    (output,) = run(GenerationEngine(model), request)
    assert output.output_ids == []
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expected = plain_logprobs(reference, prompt[:1], list(prompt[1:]), 1.0)
    torch.testing.assert_close(torch.tensor(output.prompt_logprobs[1:]), expected, rtol=0.0, atol=FP32_TOLERANCE)


def test_a_long_prompt_is_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2")
    prompt = tuple(random.Random(2).randrange(VOCAB) for _ in range(40))
    engine = GenerationEngine(model)
    reference = plain_logprobs(model, prompt[:10], list(prompt[10:]), 1.0)
    parts: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: parts.append(output.numel() * 4))
    limited = functools.partial(token_logprobs, max_logits_bytes=4 * VOCAB * 7)
    monkeypatch.setattr(step, "token_logprobs", limited)
    request = GenerationInput("p", prompt, SamplingSpec(max_new_tokens=0), prompt_logprobs_from=10)
    (output,) = run(engine, request)
    torch.testing.assert_close(torch.tensor(output.prompt_logprobs), reference, rtol=0.0, atol=FP32_TOLERANCE)
    assert max(parts) == 4 * VOCAB * 7, "the logits of seven tokens at a time"


def test_a_lack_of_memory_while_a_prompt_is_scored_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GenerationEngine(build("qwen2"))
    original = engine._batch.runner.prompt_logprobs

    def short_of_memory(prompt: tuple[int, ...], start: int) -> list[float | None]:
        if len(prompt) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 11.98 GiB")
        return original(prompt, start)

    monkeypatch.setattr(engine._batch.runner, "prompt_logprobs", short_of_memory)
    long, short = (
        Job((GenerationInput(f"p{length}", (1,) * length, SamplingSpec(max_new_tokens=new), prompt_logprobs_from=0),))
        for length, new in ((21, 4), (20, 4))
    )
    plain = Job((GenerationInput("other", (5, 6), SamplingSpec(max_new_tokens=6)),))
    for job in (long, short, plain):
        engine.submit(job)
    while engine.step():
        pass
    with pytest.raises(RequestError, match=r"out of memory: .* scoring a prompt of 21 tokens.*tried to allocate 11.98"):
        long.future.result(timeout=0)
    assert [len(job.future.result(timeout=0)[0].output_ids) for job in (short, plain)] == [4, 6]
    assert engine.submit(Job(long.inputs)).running() is False, "its name is free again"


def test_a_group_is_prefilled_once_and_each_sample_is_exact() -> None:
    model = build("qwen3")
    reference = copy.deepcopy(model)
    prompt = tuple(range(3, 20))
    inputs = [GenerationInput(f"g{i}", prompt, SamplingSpec(max_new_tokens=5 + i, seed=i)) for i in range(6)]
    engine = GenerationEngine(model, max_running_requests=4)
    outputs = run(engine, *inputs)
    assert [output.cached_tokens for output in outputs] == [0] + [len(prompt) - 1] * 5
    for request, output in zip(inputs, outputs, strict=True):
        expected = plain_logprobs(reference, request.input_ids, output.output_ids, 1.0)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0.0, atol=FP32_TOLERANCE)

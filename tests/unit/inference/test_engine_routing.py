"""The experts that the engine tells are those that each token went through, whatever happened on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.inference.client import RoutingWanted
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, RequestError, SamplingSpec
from asyncrl.inference.http_calls import parse_generate, sample_reply
from asyncrl.inference.messages import MalformedReply, PauseMode, parse_completion
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.routing import Routers
from tests.engine_steps import drain

LAYERS, EXPERTS, PER_TOKEN, DENSE = 3, 5, 2, 1
"""Layer 1 is dense."""


def build(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        mlp_only_layers=[DENSE],
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if ".gate." in name:
            torch.nn.init.normal_(parameter, std=0.7)
    model.train(False)
    return model


def plain(model: PreTrainedModel, tokens: list[int]) -> NDArray[Any]:
    """The experts [T, LAYERS, PER_TOKEN] of `tokens`, each in ascending order, by transformers' own forward."""
    model = copy.deepcopy(model)
    routers = Routers(model, "qwen3_moe")
    with torch.no_grad(), routers.recording() as recorded:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    dense = torch.zeros(len(tokens), PER_TOKEN, dtype=torch.long)
    return torch.stack([recorded.get(layer, dense) for layer in range(LAYERS)], 1).sort(-1).values.numpy()


def sample(
    rid: str, tokens: int = 12, prompt: tuple[int, ...] = (3, 4, 5), start: int = 0, **spec: Any
) -> GenerationInput:
    return GenerationInput(rid, prompt, SamplingSpec(max_new_tokens=tokens, **spec), routing_from=start)


def reported(output: GenerationOutput) -> NDArray[Any]:
    assert output.routing is not None
    return np.sort(output.routing, -1)


def test_samples_that_join_share_rows_and_leave_tell_their_own_experts() -> None:
    model = build()
    engine = GenerationEngine(copy.deepcopy(model), max_running_requests=6, record_routing=True)
    groups = [(3, 4, 5), (9,), tuple(range(1, 9))]
    inputs = [sample(f"r{i}", 5 + 3 * i, groups[i % 3], seed=i, temperature=0.5) for i in range(14)]
    future = engine.submit(Job(tuple(inputs)))
    drain(engine)
    assert engine._batch.counts.decoded_rows < engine._batch.counts.generated, "no row was shared"
    for request, output in zip(inputs, future.result(timeout=0), strict=True):
        expected = plain(model, [*request.input_ids, *output.output_ids])[:-1]
        np.testing.assert_array_equal(reported(output), expected)


def test_only_what_is_asked_for_is_told() -> None:
    model = build()
    engine = GenerationEngine(copy.deepcopy(model), record_routing=True)
    prompt = (3, 4, 5, 6)
    inputs = [sample("all", 6, prompt, 0, seed=1), sample("late", 6, prompt, 4, seed=1), sample("none", 6, prompt, -1)]
    future = engine.submit(Job(tuple(inputs)))
    drain(engine)
    whole, late, none = future.result(timeout=0)
    np.testing.assert_array_equal(reported(late), reported(whole)[4:])
    assert none.routing is None


def test_an_update_leaves_the_experts_of_what_was_generated_before(tmp_path: Path) -> None:
    """A prefix computed again by new weights keeps the experts by which its answer was drawn."""
    old, new = build(0), build(1)
    new.save_pretrained(str(tmp_path))
    engine = GenerationEngine(copy.deepcopy(old), record_routing=True)
    future = engine.submit(Job((sample("a", 14, seed=1),)))
    for _ in range(6):
        engine.step()
    engine.pause(PauseMode.retract)
    engine.step()
    update = engine.update_weights(str(tmp_path), "1")
    engine.step()
    assert update.result(timeout=0) == 0
    engine.resume()
    drain(engine)
    (output,) = future.result(timeout=0)
    assert [(span.start, span.end) for span in output.spans] == [(0, 6), (6, 14)]
    tokens = [3, 4, 5, *output.output_ids]
    first = 3 + 6 - 1  # the sixth token was first computed by the new weights
    np.testing.assert_array_equal(reported(output)[:first], plain(old, tokens)[:first])
    np.testing.assert_array_equal(reported(output)[first:], plain(new, tokens)[first:-1])
    assert (plain(old, tokens)[:first] != plain(new, tokens)[:first]).any()


def test_an_aborted_sample_tells_what_it_has() -> None:
    model = build()
    engine = GenerationEngine(copy.deepcopy(model), record_routing=True)
    future = engine.submit(Job((sample("a", 14, seed=1), sample("b", 14, seed=2))))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    drain(engine)
    aborted, whole = future.result(timeout=0)
    assert len(aborted.output_ids) == 5
    for output in (aborted, whole):
        np.testing.assert_array_equal(reported(output), plain(model, [3, 4, 5, *output.output_ids])[:-1])


def test_an_engine_that_records_nothing_refuses_to_tell() -> None:
    with pytest.raises(RequestError, match="return_routed_experts: this engine records no routing"):
        GenerationEngine(build()).submit(Job((sample("a"),)))
    with pytest.raises(RequestError, match="routed_experts_start_len is 4; use a position from 0 to the prompt's 3"):
        GenerationEngine(build(), record_routing=True).submit(Job((sample("a", start=4),)))


def test_a_dense_model_cannot_record() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dense = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    with pytest.raises(UnsupportedModelError, match="has no routers whose choices can be replayed"):
        GenerationEngine(dense, max_model_len=32, record_routing=True)


def test_a_model_whose_routers_are_not_asked_is_refused_at_load() -> None:
    model = build()
    block = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock")
    block.forward = lambda hidden: hidden  # as a kernel in the place of the whole block
    with pytest.raises(UnsupportedModelError, match=r"the routers of layers \[0\] of Qwen3Moe.* were not asked"):
        GenerationEngine(model, record_routing=True)


def reply(body: bytes) -> dict[str, Any]:
    call = parse_generate(body, None, ())
    engine = GenerationEngine(build(), record_routing=True)
    future = engine.submit(Job(call.inputs))
    drain(engine)
    return sample_reply(call, 0, future.result(timeout=0)[0], None, 0.0)


def test_the_client_reads_what_the_server_says() -> None:
    from asyncrl.models.model_config import RoutingShape

    asked = (
        b'{"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 6, "sampling_seed": 1}, "return_logprob": true'
    )
    answer = reply(asked + b', "return_routed_experts": true, "routed_experts_start_len": 2}')
    shape = RoutingShape(LAYERS, PER_TOKEN, EXPERTS)
    completion = parse_completion(answer, (), RoutingWanted(shape, 2), 3)
    assert completion.routing is not None
    assert completion.routing.dtype == np.uint8
    expected = plain(build(), [3, 4, 5, *completion.token_ids])[2:-1]
    np.testing.assert_array_equal(np.sort(completion.routing, -1), expected)
    for wrong, why in (
        (RoutingWanted(shape, 1), "expected 7 positions"),
        (RoutingWanted(RoutingShape(LAYERS, PER_TOKEN, 2), 2), "outside of the 2 experts"),
    ):
        with pytest.raises(MalformedReply, match=why):
            parse_completion(answer, (), wrong, 3)
    answer["meta_info"]["routed_experts"] = "no base64!"
    with pytest.raises(MalformedReply, match="not base64 of 32-bit integers"):
        parse_completion(answer, (), RoutingWanted(shape, 2), 3)
    with pytest.raises(MalformedReply, match="lacks 'routed_experts'"):
        parse_completion(reply(asked + b"}"), (), RoutingWanted(shape), 3)

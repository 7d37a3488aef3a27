"""The engine's control without sockets: streams, limits, failure, seeds, memory."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.api.generation import FinishReason
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import (
    EngineStoppedError,
    GenerationInput,
    GenerationOutput,
    RequestError,
    SamplingSpec,
)
from asyncrl.inference.messages import PauseMode
from asyncrl.weights.loading import load_targets, stage_weights
from asyncrl.weights.manifest import WeightUpdateError
from tests.engine_steps import drain, run

LIMIT_S = 300.0


def make_model(seed: int = 0, layers: int = 2) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def sample(rid: str, tokens: int = 20, prompt: tuple[int, ...] = (1, 2, 3), **spec: float) -> GenerationInput:
    return GenerationInput(rid, prompt, SamplingSpec(max_new_tokens=tokens, **spec))  # type: ignore[arg-type]


def test_a_seed_gives_the_same_tokens_alone_and_in_any_company() -> None:
    alone = run(GenerationEngine(make_model()), sample("a", 40, seed=5))[0]
    company = [
        sample(f"c{i}", 10 + 7 * i, prompt=tuple(range(1, 2 + i)), seed=i, temperature=0.5 * i) for i in range(9)
    ]
    crowd = run(GenerationEngine(make_model(), max_running_requests=4), *company, sample("a", 40, seed=5))
    assert crowd[-1].output_ids == alone.output_ids
    assert crowd[-1].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_requests_without_a_seed_differ() -> None:
    outputs = run(GenerationEngine(make_model()), *(sample(f"u{i}", 30) for i in range(4)))
    assert len({tuple(output.output_ids) for output in outputs}) == 4


def test_retraction_continues_the_same_stream_and_keeps_what_was_said() -> None:
    whole = run(GenerationEngine(make_model()), sample("a", 40, seed=5))[0]
    engine = GenerationEngine(make_model())
    future = engine.submit(Job((sample("a", 40, seed=5),)))
    for _ in range(13):
        engine.step()
    for mode in (PauseMode.retract, PauseMode.in_place):
        engine.pause(mode)
        drain(engine)
        assert engine.paused
        assert not future.done()
        engine.resume()
        for _ in range(7):
            engine.step()
    drain(engine)
    output = future.result(timeout=0)[0]
    assert output.output_ids == whole.output_ids
    assert output.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert output.num_retractions == 1


def test_min_new_tokens_forbids_stopping_before_and_not_after() -> None:
    every = tuple(range(1, 20))
    spec = SamplingSpec(max_new_tokens=30, min_new_tokens=12, stop_token_ids=every, seed=1)
    (output,) = run(GenerationEngine(make_model()), GenerationInput("m", (3, 4), spec))
    assert output.output_ids[:12] == [0] * 12
    assert output.logprobs[:12] == [0.0] * 12
    assert output.finish is not None
    assert output.finish.reason == FinishReason.stop
    assert output.output_ids[-1] != 0


def test_memory_stays_within_max_total_tokens() -> None:
    engine = GenerationEngine(make_model(), max_running_requests=8, max_total_tokens=120)
    future = engine.submit(Job(tuple(sample(f"x{i}", 10 + i, seed=i) for i in range(20))))
    most = 0
    while engine.step():
        most = max(most, engine.stats().running)
        assert engine.stats().used_tokens <= 120
    assert [len(output.output_ids) for output in future.result(timeout=0)] == [10 + i for i in range(20)]
    assert 1 < most <= 120 // 13


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (sample("e", prompt=()), "input_ids is empty"),
        (sample("e", prompt=(20,)), "outside the vocabulary of 20"),
        (sample("e", prompt=(-1,)), "outside the vocabulary"),
        (sample("e", 254), "exceed the context length of 256"),
        (sample("e", 140), "max_total_tokens is 100"),
        (GenerationInput("e", (1,), SamplingSpec(max_new_tokens=5, stop=("x",))), "need a tokenizer"),
        (GenerationInput("e", (1,), SamplingSpec(max_new_tokens=1), prompt_logprobs_from=1), "logprob_start_len is 1"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(request_: GenerationInput, message: str) -> None:
    engine = GenerationEngine(make_model(), max_total_tokens=100)
    with pytest.raises(RequestError, match=message):
        engine.submit(Job((request_,)))
    assert len(run(engine, sample("e", 5))[0].output_ids) == 5


@pytest.mark.parametrize("spec", [{"top_p": 0.0}, {"top_k": 0}, {"min_p": 1.5}, {"temperature": -0.1}])
def test_sampling_values_out_of_range_are_refused(spec: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(spec))} is {next(iter(spec.values()))}"):
        SamplingSpec(**spec)  # type: ignore[arg-type]


def test_engine_settings_out_of_range_name_the_field() -> None:
    with pytest.raises(ValueError, match="max_running_requests is 0"):
        GenerationEngine(make_model(), max_running_requests=0)
    with pytest.raises(ValueError, match="max_model_len is 300, but the model's positions end at 256"):
        GenerationEngine(make_model(), max_model_len=300)


def test_an_idle_engine_sleeps_and_wakes_for_a_request() -> None:
    engine = GenerationEngine(make_model())
    engine.start()
    first = engine.submit(Job((sample("a", 5),))).result(timeout=LIMIT_S)
    steps = engine.stats().steps
    second = engine.submit(Job((sample("b", 5),))).result(timeout=LIMIT_S)
    assert len(first[0].output_ids) == len(second[0].output_ids) == 5
    assert engine.stats().steps - steps == 5
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.submit(Job((sample("c", 5),)))


def test_a_failing_model_fails_every_waiting_caller(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = make_model()
    engine = GenerationEngine(model)
    broken = threading.Event()

    def fail(*_: object) -> None:
        broken.set()
        raise ValueError("broken model")

    model.register_forward_pre_hook(fail)
    job = engine.submit(Job((sample("a", 5),)))
    make_model(1).save_pretrained(tmp_path)
    update = engine.update_weights(str(tmp_path))
    engine.start()
    future: Future[Any]
    for future in (job, update):
        with pytest.raises(EngineStoppedError, match="broken model"):
            future.result(timeout=LIMIT_S)
    assert broken.is_set()
    assert not engine.healthy


def test_an_engine_that_stops_fails_what_it_has_not_taken_yet(tmp_path: Path) -> None:
    """Requests that the engine's thread has not read when it ends: no caller may wait for them for ever."""
    make_model(1).save_pretrained(tmp_path)
    engine = GenerationEngine(make_model())
    waiting: list[Future[Any]] = [engine.submit(Job((sample("a", 5),))), engine.update_weights(str(tmp_path))]
    waiting.append(engine.abort("a"))
    engine.close()
    for future in waiting:
        assert isinstance(future.exception(timeout=0), EngineStoppedError)


def test_staging_touches_nothing_and_names_what_does_not_fit(tmp_path: Path) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_model(layers=1).save_pretrained(tmp_path / "fewer")
    make_model(layers=3).save_pretrained(tmp_path / "more")
    (tmp_path / "empty").mkdir()
    for folder, message in (("fewer", r"lacks 'model\.layers\.1"), ("more", "does not have"), ("empty", "holds no")):
        with pytest.raises(WeightUpdateError, match=message):
            stage_weights(load_targets(model), tmp_path / folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_progress_of_a_streamed_sample_is_cumulative() -> None:
    engine = GenerationEngine(make_model())
    seen: list[GenerationOutput] = []
    future = engine.submit(Job((sample("s", 12, seed=3),), on_progress=lambda _, output: seen.append(output)))
    drain(engine)
    final = future.result(timeout=0)[0]
    assert [len(output.output_ids) for output in seen] == list(range(1, 13))
    assert all(final.output_ids[: len(output.output_ids)] == output.output_ids for output in seen)
    assert [output.finish is None for output in seen] == [True] * 11 + [False]

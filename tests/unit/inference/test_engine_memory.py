"""The embedded engine gives its memory back while it sleeps, and generates the same afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.api.generation import FinishReason
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, MemoryStateError, SamplingSpec
from asyncrl.inference.messages import MemoryTag, PauseMode
from asyncrl.weights.manifest import WeightUpdateError
from tests.engine_steps import drain, run

EVERYTHING = [*MemoryTag]


def model_of(folder: Path, *, vocabulary: int = 20, hidden: int = 16) -> PreTrainedModel:
    """A model as a server reads it: a map of the files in `folder`."""
    if not folder.exists():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
    model: PreTrainedModel = Qwen2ForCausalLM.from_pretrained(folder, dtype="float32")
    return model


def engine_of(folder: Path, *, saves_memory: bool = True) -> GenerationEngine:
    return GenerationEngine(model_of(folder), weight_version="0", model_path=str(folder), saves_memory=saves_memory)


def sample(rid: str, tokens: int = 30, prompt: tuple[int, ...] = (1, 2, 3), offset: int = 0) -> GenerationInput:
    return GenerationInput(rid, prompt, SamplingSpec(max_new_tokens=tokens, seed=7, seed_offset=offset))


def sleep(engine: GenerationEngine) -> int:
    """Interrupt what runs and release everything; returns the bytes."""
    engine.pause(PauseMode.abort)
    released = engine.release_memory(EVERYTHING)
    drain(engine)
    return released.result(timeout=0)


def wake(engine: GenerationEngine, folder: Path) -> None:
    """In the order in which a server is brought back."""
    engine.resume_memory([MemoryTag.weights])
    drain(engine)
    updated = engine.update_weights(str(folder), "0")
    drain(engine)
    updated.result(timeout=0)
    engine.resume_memory([MemoryTag.kv_cache, MemoryTag.cuda_graph])
    going_on = engine.resume()
    drain(engine)
    going_on.result(timeout=0)


def test_a_sleep_in_the_middle_of_an_answer_changes_none_of_its_tokens(tmp_path: Path) -> None:
    expected = run(engine_of(tmp_path / "m"), sample("whole"))[0]
    engine = engine_of(tmp_path / "m")
    first = engine.submit(Job((sample("first"), sample("other", prompt=(4, 5)))))
    for _ in range(11):
        engine.step()
    sleep(engine)
    begun = first.result(timeout=0)[0]
    assert begun.finish is not None
    assert begun.finish.reason == FinishReason.abort
    assert 0 < len(begun.output_ids) < 30
    wake(engine, tmp_path / "m")
    left, known = 30 - len(begun.output_ids), tuple(begun.output_ids)
    sleeping = run(engine, sample("second", left, (1, 2, 3, *known), offset=len(known)))[0]
    assert [*known, *sleeping.output_ids] == expected.output_ids
    assert [*begun.logprobs, *sleeping.logprobs] == pytest.approx(expected.logprobs, abs=1e-6)


def test_what_arrives_while_the_engine_sleeps_is_answered_afterwards(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "m")
    expected = run(engine, sample("before"))[0].output_ids
    sleep(engine)
    held = engine.submit(Job((sample("held"),)))
    drain(engine)
    assert not held.done()
    wake(engine, tmp_path / "m")
    assert held.result(timeout=0)[0].output_ids == expected


def test_memory_falls_by_what_is_released(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", vocabulary=20_000, hidden=512)  # 40 MB, and as much again in oneDNN's layout
    engine = GenerationEngine(model, model_path=str(tmp_path / "m"), saves_memory=True)
    run(engine, *(sample(f"{number}", 4, prompt=(1, 2, number)) for number in range(4)))
    before = _resident()
    freed = sleep(engine)
    fell = before - _resident()
    assert freed > 2 * 20_000 * 512 * 4
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    assert fell > 0.9 * freed
    assert sleep(engine) == 0, "what is released stays so"
    wake(engine, tmp_path / "m")
    assert _resident() > before - 0.5 * freed
    assert len(run(engine, sample("after", 4))[0].output_ids) == 4


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_released_under_running_samples_and_nothing_runs_without_weights(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "m")
    serving = engine.release_memory(EVERYTHING)
    drain(engine)
    with pytest.raises(MemoryStateError, match="paused and runs nothing"):
        serving.result(timeout=0)
    running = engine.submit(Job((sample("frozen"),)))
    engine.step()
    engine.pause(PauseMode.in_place)
    frozen = engine.release_memory(EVERYTHING)
    drain(engine)
    with pytest.raises(MemoryStateError, match="runs nothing"):
        frozen.result(timeout=0)
    sleep(engine)
    assert running.done()
    for resumed, wanted in (([], "is released"), (EVERYTHING, "no values")):
        engine.resume_memory(resumed)
        going_on = engine.resume()
        drain(engine)
        with pytest.raises(MemoryStateError, match=wanted):
            going_on.result(timeout=0)
    sleep(engine)
    with pytest.raises(WeightUpdateError, match="resume it first"):
        engine.update_weights(str(tmp_path / "m"))


def test_a_server_that_is_no_colocated_server_keeps_its_memory(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "m", saves_memory=False)
    engine.pause(PauseMode.abort)
    refused = engine.release_memory(EVERYTHING)
    drain(engine)
    with pytest.raises(MemoryStateError, match=r"generation\.colocated"):
        refused.result(timeout=0)

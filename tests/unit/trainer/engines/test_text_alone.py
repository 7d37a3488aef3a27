"""What pictures cost a run of text: the functions of their modules that it calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import asyncrl
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.flat import FlatOptimizer, FlatPolicyEngine
from asyncrl.trainer.settings import OptimizerConfig
from tests.engine_steps import run

PACKAGE = str(Path(asyncrl.__file__).parent)


@contextmanager
def calls_counted(counts: Counter[str], totals: Counter[str]) -> Iterator[None]:
    def count(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            totals["calls"] += 1
            if "picture" in file[len(PACKAGE) :] or "picture" in frame.f_code.co_qualname:
                counts[f"{file[len(PACKAGE) + 1 :]}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
        )
    )


def test_no_token_of_text_costs_a_call_of_what_is_there_for_pictures() -> None:
    """Four answers are generated, travel and are trained; longer ones cost more calls, and none of the pictures'."""
    served, weights = GenerationEngine(model()), model()
    trained = FlatPolicyEngine(
        weights,
        temperature=1.0,
        attention=AttentionKind.packed,
        tokens_per_micro_batch=256,
        optimizer=FlatOptimizer(weights.named_parameters(), OptimizerConfig()),
    )
    made, all_calls = [], []
    for tokens in (8, 32):
        counts, totals = Counter[str](), Counter[str]()
        with calls_counted(counts, totals):
            spec = SamplingSpec(max_new_tokens=tokens)
            outputs = run(served, *(GenerationInput(f"s{n}", (1, 2, 3), spec) for n in range(4)))
        ids = [np.array([1, 2, 3, *each.output_ids], np.int32) for each in outputs]
        assert [len(each) for each in ids] == [3 + tokens] * 4
        mask = np.array([0] * 3 + [1] * tokens, np.uint8)
        samples = [Sample(each, mask, -mask.astype(np.float32), mask.astype(np.int32) - 1, 0.0) for each in ids]
        with calls_counted(counts, totals):
            travelled = decode_trajectories(encode_trajectories([Trajectory("r", "p", 0, samples)]))
            batch = build_step_batch(travelled, [0], version=0, num_minibatches=1)
            trained.compute_gradients(
                batch, batch["loss_mask"], range(4), lambda _, outputs: (outputs.logprobs_N.sum(), {})
            )
        made.append(counts.total())
        all_calls.append(totals["calls"])
    assert all_calls[1] > all_calls[0] + 1000, "the calls are counted"
    assert 0 < made[0] < 30, "some a batch, which find no pictures"
    assert made[1] <= made[0] + 4, "at most one for each answer's end, none for a token"

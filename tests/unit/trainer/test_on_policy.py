"""On policy every ratio is 1, whatever the sampling cuts off: the engine that generates against the one that trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.inputs import CorrectionInputs, PolicyLossInputs
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.catalog import resolve
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.types import GenerationInput, Job, SamplingSpec
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.micro_batch_layout import AttentionKind
from asyncrl.trainer.models import load_causal_lm
from asyncrl.trainer.step_batch import StepBatch, build_step_batch

PROMPT = (5, 6, 7)
CPU = torch.device("cpu")


def generated(path: Path, sampling: dict[str, float], count: int = 16) -> StepBatch:
    """Answers of the embedded engine with the log-probabilities that it reports."""
    engine = GenerationEngine(load_causal_lm(path, "float32", "eager", CPU))  # type: ignore[arg-type]
    inputs = [
        GenerationInput(f"r{i:02d}", PROMPT, SamplingSpec(max_new_tokens=12, seed=i, **sampling))  # type: ignore[arg-type]
        for i in range(count)
    ]
    future = engine.submit(Job(tuple(inputs)))
    while engine.step():
        pass
    samples = []
    for output in future.result(timeout=0):
        mask = np.array([0] * len(PROMPT) + [1] * len(output.output_ids), np.uint8)
        samples.append(
            Sample(
                tokens=np.array([*PROMPT, *output.output_ids], np.int32),
                loss_mask=mask,
                behave_logprobs=np.array([0.0] * len(PROMPT) + list(output.logprobs), np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                truncated=False,
            )
        )
    return build_step_batch([Trajectory("r", "p", 0, tuple(samples))], [0], version=0, num_minibatches=1)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_ratios_are_one_and_neither_mask_nor_clip_acts(sampling: dict[str, float], qwen_dir: Path) -> None:
    batch = generated(qwen_dir, sampling)
    policy = FlatPolicyEngine(
        load_causal_lm(qwen_dir, "float32", "sdpa", CPU),  # type: ignore[arg-type]
        temperature=sampling["temperature"],
        attention=AttentionKind.packed,
        tokens_per_micro_batch=100,
    )
    mask_T, behave_T = batch["loss_mask"], batch["behave_logprobs"]
    logprobs_T = policy.logprobs(batch, mask_T)
    assert mask_T.sum() > 50
    ratio_T = (logprobs_T - behave_T).exp()[mask_T]
    torch.testing.assert_close(ratio_T, torch.ones_like(ratio_T), rtol=0, atol=1e-4)

    seq_ids_T = torch.repeat_interleave(torch.arange(batch.num_seqs), torch.tensor(batch.lengths_S))
    masked = resolve("correction", "geometric_mask")(
        CorrectionInputs(logprobs_T, behave_T, mask_T, seq_ids_T, batch.num_seqs)
    )
    assert torch.equal(masked.keep_T, mask_T)
    for sign in (1.0, -1.0):
        inputs = PolicyLossInputs(
            logprobs_T,
            None,
            behave_T,
            torch.full_like(behave_T, sign),
            mask_T,
            seq_ids_T,
            batch.num_seqs,
            batch["versions"],
            0,
        )
        assert resolve("policy_loss", "ppo_clip")(inputs).stats["ppo/clip_fraction"].value() == 0.0

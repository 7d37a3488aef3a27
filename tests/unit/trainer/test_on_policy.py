"""On policy every ratio is 1, whatever the sampling cuts off: the engine that generates against the one that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.inputs import CorrectionInputs, PolicyLossInputs
from asyncrl.algorithms.registry import ProximalMode
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.rank.training_rank import TrainingRank
from tests.engine_steps import run

MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]

PROMPT = (5, 6, 7)
CPU = torch.device("cpu")


def generated(path: Path, sampling: dict[str, Any], count: int = 16) -> StepBatch:
    """Answers of the embedded engine with the log-probabilities that it reports; every third is right."""
    engine = GenerationEngine(load_causal_lm(path, "float32", "eager", CPU))  # type: ignore[arg-type]
    inputs = [
        GenerationInput(f"r{i:02d}", PROMPT, SamplingSpec(max_new_tokens=12, seed=i, **sampling)) for i in range(count)
    ]
    samples = []
    for output in run(engine, *inputs):
        mask = np.array([0] * len(PROMPT) + [1] * len(output.output_ids), np.uint8)
        samples.append(
            Sample(
                tokens=np.array([*PROMPT, *output.output_ids], np.int32),
                loss_mask=mask,
                behave_logprobs=np.array([0.0] * len(PROMPT) + list(output.logprobs), np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(len(samples) % 3 == 0),
                truncated=False,
                episode=len(samples),
            )
        )
    groups = [Trajectory(f"r{i}", f"p{i}", i, tuple(samples[i::4])) for i in range(4)]
    return build_step_batch(groups, [0, 1, 0, 1], version=0, num_minibatches=2)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.6, "allowed_token_ids": (3, 8, 9, 13)},
        {"temperature": 1.3, "allowed_token_ids": (3, 8, 9, 13), "top_k": 3, "top_p": 0.9},
    ],
    ids=str,
)
def test_ratios_are_one_and_neither_mask_nor_clip_acts(sampling: dict[str, Any], qwen_dir: Path) -> None:
    batch = generated(qwen_dir, sampling)
    allowed = sampling.get("allowed_token_ids", ())
    policy = FlatPolicyEngine(
        load_causal_lm(qwen_dir, "float32", "sdpa", CPU),  # type: ignore[arg-type]
        temperature=sampling["temperature"],
        allowed=allowed,
        attention=AttentionKind.packed,
        tokens_per_micro_batch=100,
    )
    mask_T, behave_T = batch["loss_mask"], batch["behave_logprobs"]
    logprobs_T = policy.logprobs(batch, mask_T)
    assert mask_T.sum() > 50
    assert not allowed or set(batch["tokens"][mask_T].tolist()) == set(allowed)
    ratio_T = (logprobs_T - behave_T).exp()[mask_T]
    torch.testing.assert_close(ratio_T, torch.ones_like(ratio_T), rtol=0, atol=1e-4)

    seq_ids_T = torch.repeat_interleave(torch.arange(batch.num_seqs), torch.tensor(batch.lengths_S))
    masked = resolve("correction", "geometric_mask")(
        CorrectionInputs(logprobs_T, behave_T, mask_T, seq_ids_T, batch.num_seqs, logprobs_T, torch.ones_like(behave_T))
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


def test_the_behaviour_in_place_of_the_proximal_policy_changes_rounding_only(
    qwen_dir: Path, config: ExperimentConfig, make_rank: MakeRank, run_step: RunStep
) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9}
    config.rollout.sampling.temperature, config.optimizer.lr = sampling["temperature"], 1e-6
    stats = {}
    for mode in (ProximalMode.recompute, ProximalMode.behave):
        config.algorithm.prox = mode
        run = run_step(config, make_rank(config), generated(qwen_dir, sampling))
        assert ("actor_inf" in run) == (mode == ProximalMode.recompute)
        stats[mode] = run["actor_train"]
    exact, spared = stats.values()
    assert spared["optimizer/steps"] == exact["optimizer/steps"] == 2
    assert exact["ppo/approx_kl"] > 0  # the second minibatch is off policy, so its ratios count
    for figure in ("ppo/loss_per_minibatch", "grad_norm", "ppo/approx_kl"):  # steep logits: 1e-3 is rounding
        assert spared[figure] == pytest.approx(exact[figure], abs=1e-2)
    assert spared["ppo/behave_imp_weight_mean"] == 1.0
    assert spared["ppo/behave_kl"] == pytest.approx(spared["ppo/approx_kl"])  # both are from the behaviour policy
    assert exact["ppo/behave_imp_weight_mean"] == pytest.approx(1.0, abs=1e-4)

"""With η = 0 the whole system, in processes of its own, takes the steps of the single-process reference loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.registry import Choice, ObjectiveSpec
from asyncrl.api import SamplingParams
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.reference import ReferenceConfig, ReferenceTrainer, StepReport

pytestmark = pytest.mark.slow

STEPS = 10
TOLERANCE = 1e-5
CLIP = 0.05  # so narrow that it acts in most of these few small steps
CONFIG = ReferenceConfig(
    seed=7,
    train_batch_size=4,
    group_size=4,
    ppo_minibatches=2,
    lr=3e-3,
    sampling=SamplingParams(max_new_tokens=12, temperature=0.9),
    objective=ObjectiveSpec(Choice("decoupled_ppo", {"clip_low": CLIP, "clip_high": CLIP})),
)


REWARD = """
def mostly_even(data, completion):
    "1 where even digits outnumber odd ones: some groups of a random model agree, so that some carry no signal."
    return float(sum(c in "02468" for c in completion) > sum(c in "13579" for c in completion))
"""


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Import path of the reward; a file of its own, as RolloutWorkers would import all that this one does."""
    file = tmp_path_factory.mktemp("rewards") / "even.py"
    file.write_text(REWARD)
    return f"{file}:mostly_even"


@pytest.fixture(scope="module")
def oracle(tiny_model: Path, reward_path: str) -> list[StepReport]:
    """Return the reports of the reference loop, step by step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = ReferenceTrainer(
        CONFIG,
        AutoModelForCausalLM.from_pretrained(tiny_model).eval(),
        PromptFormat(load_tokenizer(tiny_model), None),
        ArithmeticDataset(seed=CONFIG.seed),
        load_plugin(reward_path),
    )
    reports = [trainer.train_step() for _ in range(STEPS)]
    torch.set_num_threads(threads)
    return reports


@pytest.mark.parametrize(("parallel", "rollout_workers", "steps"), [("d1", 1, 5), ("d2", 3, STEPS)])
def test_losses_are_those_of_the_reference_loop(
    oracle: list[StepReport], start_run: Any, reward_path: str, parallel: str, rollout_workers: int, steps: int
) -> None:
    oracle = oracle[:steps]
    run = start_run(
        trainer__parallel=parallel,
        rollout__workers=rollout_workers,
        reward__path=reward_path,
        seed=CONFIG.seed,
        train_batch_size=CONFIG.train_batch_size,
        group_size=CONFIG.group_size,
        trainer__ppo_minibatches=CONFIG.ppo_minibatches,
        optimizer__lr=CONFIG.lr,
        optimizer__schedule="constant",
        algorithm__policy_loss__params=f"{{clip_low: {CLIP}, clip_high: {CLIP}}}",
        rollout__sampling__max_new_tokens=CONFIG.sampling.max_new_tokens,
        rollout__sampling__temperature=CONFIG.sampling.temperature,
        max_head_offpolicyness=0,
        total_train_steps=steps,
        eval__interval=0,
        checkpoint__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [report.version for report in oracle]
    np.testing.assert_allclose([row["reward/mean"] for row in rows], [report.reward_mean for report in oracle])
    losses = np.array([row["ppo/loss_per_minibatch"] for row in rows])
    np.testing.assert_allclose(losses, [report.losses for report in oracle], rtol=0, atol=TOLERANCE)


def test_the_oracle_has_something_to_say(oracle: list[StepReport]) -> None:
    """The compared policy learns, some of its groups carry no signal, and some ratios are clipped."""
    losses = np.array([report.losses for report in oracle])
    assert np.abs(losses).max() > 1000 * TOLERANCE
    assert (losses == 0).any()
    assert max(report.stats.get("ppo/clip_fraction", 0) for report in oracle) > 0.05
    rewards = [report.reward_mean for report in oracle]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1

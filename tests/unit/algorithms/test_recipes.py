"""Recipes that come as experiments compose the objectives that they are named after, and pass all checks of a start."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.algorithms.objective import Objective
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.trainer.functions.model_functions import objective_spec

Slope = Callable[[int], float]
"""Derivative of a token's loss by its log-probability."""


def scale_rl(batch, spans) -> Slope:
    """CISPO: the ratio to the policy that sampled, at most 5, weighs the policy gradient."""
    return lambda t: -min(math.exp(batch.logprobs[t] - batch.behave[t]), 5.0) * batch.advantages[t]


def deepseek_v32(batch, spans) -> Slope:
    """Equations 1 and 9 of DeepSeek-V3.2: PPO's clip around the sampling policy, negative sequences masked where they
    are far from it, and pi / pi_b times k3, whose derivative is pi / pi_b log(pi / pi_ref).
    """
    ratio = np.exp(batch.logprobs - batch.behave)
    away = {t: np.mean(batch.behave[span] - batch.logprobs[span]) for span in spans for t in span}

    def slope(t: int) -> float:
        advantage = batch.advantages[t]
        clipped = (advantage > 0 and ratio[t] > 1.2) or (advantage < 0 and ratio[t] < 0.8)
        masked = advantage < 0 and away[t] > 0.1
        policy = 0.0 if clipped or masked else -ratio[t] * advantage
        return policy + 0.001 * ratio[t] * (batch.logprobs[t] - batch.ref[t])

    return slope


def kimi_k2(batch, spans) -> Slope:
    """The policy gradient and tau (log pi / pi_b)^2 with tau 0.05, by token."""
    return lambda t: -batch.advantages[t] + 2 * 0.05 * (batch.logprobs[t] - batch.behave[t])


def prime_rl(batch, spans) -> Slope:
    """DPPO's mask at a shift of 0.2 and tau (log pi / pi_b)^2 with tau 0.001."""

    def slope(t: int) -> float:
        shift = math.exp(batch.logprobs[t]) - math.exp(batch.behave[t])
        masked = (batch.advantages[t] > 0 and shift > 0.2) or (batch.advantages[t] < 0 and shift < -0.2)
        log_ratio = batch.logprobs[t] - batch.behave[t]
        return (0.0 if masked else -math.exp(log_ratio) * batch.advantages[t]) + 2 * 0.001 * log_ratio

    return slope


@pytest.mark.parametrize(
    ("name", "slope", "by_token"),
    [
        ("scale_rl", scale_rl, False),
        ("deepseek_v32", deepseek_v32, False),
        ("kimi_k2", kimi_k2, False),
        ("prime_rl", prime_rl, True),
    ],
)
def test_a_recipe_has_the_gradient_of_its_paper(ragged, name: str, slope: Callable[..., Slope], by_token: bool) -> None:
    config = load_experiment(name, [])
    assert isinstance(config, ExperimentConfig)
    validate(config)
    objective = Objective(objective_spec(config.algorithm), resolve)
    assert not objective.needs_prox
    for seed in range(5):
        batch = ragged(seed, spread=0.8)
        inputs = batch.inputs()
        loss, _ = objective(inputs, torch.tensor(batch.ref), objective.normaliser(inputs.loss_tokens))
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_T)
        spans = [span for span in batch.spans() if len(span)]
        of_token, expected = slope(batch, spans), np.zeros(len(batch.mask))
        for span in spans:
            weight = 1 / sum(map(len, spans)) if by_token else 1 / len(spans) / len(span)
            expected[span] = [weight * of_token(t) for t in span]
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-9)

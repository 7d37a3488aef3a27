"""GRPO's group-normalised advantages."""

from __future__ import annotations

from asyncrl.algorithms.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("grpo")
def grpo(inputs: AdvantageInputs, *, divide_by_std: bool = True, std_eps: float = 1e-6) -> AdvantageOutput:
    """A_i = (r_i - mean(group)) / (std(group) + std_eps).

    DeepSeekMath (arXiv:2402.03300) section 4.1.2; the sample standard deviation (n - 1), which `divide_by_std` turns
    off. A group of one, or one of equal rewards, has advantage 0: there is nothing to compare with.

    Raises:
        ValueError: std_eps is not positive.
    """
    if std_eps <= 0.0:
        raise ValueError(f"std_eps is {std_eps}; it keeps groups of equal rewards finite, set it above 0 (1e-6)")
    rewards_S = sequence_rewards(inputs)
    groups = Groups(inputs.group_ids_S)
    advantages_S = rewards_S - groups.mean(rewards_S)
    if divide_by_std:
        advantages_S = advantages_S / (groups.std(rewards_S) + std_eps)
    return over_tokens(advantages_S, inputs)

"""ReMax."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("remax")
def remax(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - r(greedy answer to the same prompt). Li et al. 2024 (arXiv:2310.10505).

    Groups may have any size, also one: the baseline comes from the greedy rollout.

    Raises:
        ValueError: `greedy_rewards_S` is missing; RolloutWorkers add it, samples kept by another run lack it.
    """
    if inputs.greedy_rewards_S is None:
        raise ValueError(
            "greedy_rewards_S is None but remax needs the greedy answer's reward, which only rollouts that are played "
            "for remax have; choose rloo for others"
        )
    rewards_S = sequence_rewards(inputs)
    return over_tokens(rewards_S - inputs.greedy_rewards_S.double(), inputs)

"""MaxRL's advantages."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("max_rl")
def max_rl(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = (r_i - mean(group)) / mean(group): the harder the prompt, the more a right answer counts.

    Tajwar et al. 2026 (arXiv:2602.02710), for rewards of 0 and 1. A group without a reward, or of one episode, has
    advantage 0. The divisor is the mean size of the rewards, which is their mean unless some are negative, so
    |A_i| <= n E + 1 in a group of E episodes, if the episode of sample i has n samples.
    """
    samples = compared(inputs)
    groups = samples.groups
    size_E = groups.mean(groups.episodes(samples.returns_U.abs()))
    advantages_U = samples.centred(groups.mean(samples.returns_E)) / groups.spread(size_E.clamp(min=1e-300))
    return samples.over_tokens(advantages_U)

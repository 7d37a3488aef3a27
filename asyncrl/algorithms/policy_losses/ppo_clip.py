"""PPO's clipped surrogate, symmetric or clip-higher, with optional dual clip."""

from __future__ import annotations

from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses.surrogate import clipped_surrogate
from asyncrl.algorithms.registry import policy_loss


@policy_loss("ppo_clip")
def ppo_clip(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Clipped surrogate: L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    Schulman et al. 2017 (arXiv:1707.06347) eq. 7; clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476 eq. 10).
    With `dual_clip` = c > 1, tokens of negative advantage lose at most -c A: Ye et al. 2020 (arXiv:1912.09729).

    Raises:
        ValueError: clip_low outside [0, 1], clip_high below 0 or dual_clip not above 1.
    """
    return clipped_surrogate(inputs, inputs.old_logprobs_T, clip_low, clip_high, dual_clip)

"""The decoupled PPO objective, asyncrl's default."""

from __future__ import annotations

from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses.surrogate import clipped_surrogate
from asyncrl.algorithms.registry import policy_loss


@policy_loss("decoupled_ppo")
def decoupled_ppo(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Clipped surrogate around the proximal policy: L = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r = pi / pi_prox, w = pi_prox / pi_behave. Hilton et al. 2022 (arXiv:2110.00641); AReaL (arXiv:2505.24298)
    eq. 2. The weight w comes from the correction, which may cap or mask it. The objective multiplies it in; this
    function's result does not contain it.

    Raises:
        ValueError: no proximal log-probabilities, or bounds as in `ppo_clip`.
    """
    return clipped_surrogate(inputs, inputs.required_prox_T, clip_low, clip_high, dual_clip)

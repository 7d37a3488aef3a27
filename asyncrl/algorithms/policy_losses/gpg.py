"""Group Policy Gradient."""

from __future__ import annotations

from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses.reinforce import reinforce
from asyncrl.algorithms.registry import policy_loss


@policy_loss("gpg")
def gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Group Policy Gradient: L = -A log pi, for use with the `gpg` advantage, which rescales for groups without signal.

    Chu et al. 2025 (arXiv:2504.02546): neither ratio, clip nor KL; its factor alpha = B / (B - M), with M of B
    groups of equal rewards, is part of the advantage.
    """
    return reinforce(inputs)

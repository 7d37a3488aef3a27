"""Selections: the tokens of a whole minibatch that keep their policy loss, `(SelectionInputs, *, params) ->
SelectionOutput`.

A selection compares a token with all others of its minibatch, on all ranks. It uses the log-probabilities at the step's
start, before the minibatch's first forward pass, so it depends neither on micro-batches nor on the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import SelectionInputs, SelectionOutput
from asyncrl.algorithms.registry import selection


@selection("m2po")
def m2po(inputs: SelectionInputs, *, threshold: float = 0.04, binding: bool = True) -> SelectionOutput:
    """Second-moment trust region: the tokens of largest l^2 are masked until the mean of l^2 is at most `threshold`.

    l = log(pi / pi_b) at the step's start. M2PO (arXiv:2510.01161): few tokens of extreme ratios make up the variance
    of stale data, and only they are left out. With `binding` only places where the update would leave the behaviour
    policy count and are masked (A > 0 and l > 0, or A < 0 and l < 0), otherwise all, as in AReaL. Tokens of equal l^2
    are masked together.

    Raises:
        ValueError: threshold is not positive.
    """
    if threshold <= 0.0:
        raise ValueError(f"threshold is {threshold}; it bounds a mean of squared log-ratios, set it above 0 (0.04)")
    log_ratio_T = inputs.start_logprobs_T.double() - inputs.behave_logprobs_T.double()
    counts_T = torch.ones_like(log_ratio_T, dtype=torch.bool)
    if binding:
        counts_T = log_ratio_T * inputs.advantages_T > 0
    square_T = log_ratio_T.square()
    everyone_N = inputs.everyone(square_T[counts_T]).sort().values
    means_N = everyone_N.cumsum(0) / torch.arange(1, len(everyone_N) + 1, device=everyone_N.device)
    # The mean of the smallest n grows with n; the last of several equal values decides for all of them.
    last_N = torch.ones_like(everyone_N, dtype=torch.bool)
    last_N[:-1] = everyone_N[1:] > everyone_N[:-1]
    kept_N = everyone_N[last_N & (means_N <= threshold)]
    limit = float(kept_N[-1]) if len(kept_N) else -torch.inf
    return SelectionOutput(~(counts_T & (square_T > limit)))


@selection("clip_cov")
def clip_cov(inputs: SelectionInputs, *, ratio: float = 2e-4, low: float = 1.0, high: float = 5.0) -> SelectionOutput:
    """Mask the tokens of largest covariance, within `low` to `high`: a share `ratio` of all tokens.

    cov_t = (A_t - mean A)(log pi_t - mean log pi) over the minibatch: such tokens make the entropy fall. Cui et al.
    2025 (arXiv:2505.22617), Clip-Cov, which draws them at random; the largest need no random number. At least one.

    Raises:
        ValueError: the share is outside (0, 1], or low > high.
    """
    _check_share(ratio)
    if low > high:
        raise ValueError(f"the covariances are between {low} and {high}; set low <= high (1 and 5)")
    cov_T, everyone_N = _covariances(inputs)
    within_T, within_N = ((values > low) & (values < high) for values in (cov_T, everyone_N))
    return SelectionOutput(~(within_T & (cov_T >= _largest(everyone_N[within_N], ratio * len(everyone_N)))))


@selection("kl_cov")
def kl_cov(inputs: SelectionInputs, *, ratio: float = 2e-4, coef: float = 1.0) -> SelectionOutput:
    """Add coef |log(pi / pi_old)| to the share `ratio` of tokens with the largest covariance; see `clip_cov`.

    Cui et al. 2025 (arXiv:2505.22617), KL-Cov. At least one token.

    Raises:
        ValueError: the share is outside (0, 1], or coef is negative.
    """
    _check_share(ratio)
    if coef < 0.0:
        raise ValueError(f"coef is {coef}; below 0 it rewards large moves, set it to 0 or more (1)")
    cov_T, everyone_N = _covariances(inputs)
    chosen_T = cov_T >= _largest(everyone_N, ratio * len(everyone_N))
    return SelectionOutput(torch.ones_like(chosen_T), torch.where(chosen_T, coef, 0.0))


def _check_share(ratio: float) -> None:
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio is {ratio}; it is a share of the tokens, set it above 0 and to at most 1 (2e-4)")


def _covariances(inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
    """Return the covariance of each token, and the covariances of all ranks."""
    advantages_T, logprobs_T = inputs.advantages_T.double(), inputs.start_logprobs_T.double()
    advantages_N, logprobs_N = inputs.everyone(advantages_T), inputs.everyone(logprobs_T)
    # Sums in the order of size, so that rounding does not depend on the ranks' tokens.
    means = [values_N.sort().values.mean() for values_N in (advantages_N, logprobs_N)]
    cov_T, cov_N = (
        (advantages - means[0]) * (logprobs - means[1])
        for advantages, logprobs in ((advantages_T, logprobs_T), (advantages_N, logprobs_N))
    )
    return cov_T, cov_N


def _largest(values_N: Tensor, count: float) -> float:
    """Return the least of the `count` largest values (rounded down, at least one); infinite without values."""
    if not len(values_N):
        return torch.inf
    return float(values_N.topk(min(max(int(count), 1), len(values_N))).values[-1])

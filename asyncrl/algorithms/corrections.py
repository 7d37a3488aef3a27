"""Off-policy corrections, a weight and a keep mask per token: `(CorrectionInputs, *, params) -> CorrectionOutput`.

Weights are pi_prox / pi_behave, per token or as the product over a sequence; masked tokens stay in the loss's
denominator. The default, `token_truncate`, is in `grpo`.

Selections, `(SelectionInputs, *, params) -> SelectionOutput`, are at the end of the file: the tokens of a whole
minibatch that keep their policy loss. A selection compares a token with all others of its minibatch, on all ranks. It
uses the log-probabilities at the step's start, before the minibatch's first forward pass, so it depends neither on
micro-batches nor on the number of ranks.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import LOG_RATIO_LIMIT, as_float, log_ratio, segment_sum, sequence_mean
from asyncrl.algorithms.grpo import check_cap, log_weight, token_truncate
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput, SelectionInputs, SelectionOutput
from asyncrl.algorithms.registry import correction, selection


def _check_band(low: float, high: float) -> None:
    if not 0.0 <= low < high:
        raise ValueError(f"the band is [{low}, {high}]; importance weights are positive, set 0 <= low < high")


def _sequence_weight(inputs: CorrectionInputs) -> Tensor:
    """prod_t pi_prox / pi_behave over the masked tokens of each sequence, shape [S], its log clamped."""
    log_weight_S = segment_sum(log_weight(inputs), inputs.seq_ids_T, inputs.num_seqs)
    return log_weight_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@correction("none")
def none(inputs: CorrectionInputs) -> CorrectionOutput:
    """Weight 1 for every token. With it, losses other than `decoupled_ppo` take their ratio to the behaviour policy."""
    return CorrectionOutput(torch.ones_like(as_float(inputs.prox_logprobs_T)), inputs.mask_T)


@correction("token_mask")
def token_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, masked above the cap: w = pi_prox / pi_behave where that is <= cap, else the token carries no loss.

    Masked importance sampling; AReaL's behaviour-weight cap (arXiv:2505.24298).

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_weight(inputs).exp()
    above_T = inputs.mask_T & (weight_T > cap)
    return CorrectionOutput(weight_T, inputs.mask_T & ~above_T, {"weight_above_cap": above_T.sum()})


@correction("icepop")
def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> CorrectionOutput:
    """Token weight inside a band: w = pi_prox / pi_behave where low <= w <= high, else the token carries no loss.

    Ling team 2025, "Every step evolves" (arXiv:2510.18855), with its bounds as defaults.

    Raises:
        ValueError: not 0 <= low < high.
    """
    _check_band(low, high)
    weight_T = log_weight(inputs).exp()
    below_T, above_T = inputs.mask_T & (weight_T < low), inputs.mask_T & (weight_T > high)
    masked = {"weight_below_band": below_T.sum(), "weight_above_band": above_T.sum()}
    return CorrectionOutput(weight_T, inputs.mask_T & ~below_T & ~above_T, masked)


@correction("sequence_truncate")
def sequence_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, capped: w = min(prod_t pi_prox / pi_behave, cap) for every token of the sequence.

    Unbiased below the cap, because the product is the ratio of the sequences' probabilities (Liu & Li 2025, "When speed
    kills stability", sequence TIS).

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_S = _sequence_weight(inputs).clamp(max=cap)
    return CorrectionOutput(weight_S[inputs.seq_ids_T], inputs.mask_T)


@correction("sequence_mask")
def sequence_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, masked above the cap: w = prod_t pi_prox / pi_behave where that is <= cap, else no loss.

    Liu & Li 2025, "When speed kills stability", sequence MIS.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = _sequence_weight(inputs)[inputs.seq_ids_T]
    above_T = inputs.mask_T & (weight_T > cap)
    return CorrectionOutput(weight_T, inputs.mask_T & ~above_T, {"sequence_above_cap": above_T.sum()})


@correction("geometric_mask")
def geometric_mask(
    inputs: CorrectionInputs, *, low: float = 0.99, high: float = 1.01, cap: float = 5.0
) -> CorrectionOutput:
    """Token weight, capped, in sequences whose geometric mean ratio lies in [low, high]; the others carry no loss.

    g = exp(mean_t log(pi_prox / pi_behave)), w_t = min(pi_prox / pi_behave, cap). Unlike the product, g does not grow
    with length, so long answers are not selected against (Liu & Li 2025, "When speed kills stability", geometric mask).

    Raises:
        ValueError: not 0 <= low < high, or cap is not positive.
    """
    _check_band(low, high)
    check_cap(cap)
    log_weight_T = log_weight(inputs)
    mean_S = sequence_mean(log_weight_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs).exp()
    mean_T = mean_S[inputs.seq_ids_T]
    below_T, above_T = inputs.mask_T & (mean_T < low), inputs.mask_T & (mean_T > high)
    masked = {"sequence_below_band": below_T.sum(), "sequence_above_band": above_T.sum()}
    return CorrectionOutput(log_weight_T.exp().clamp(max=cap), inputs.mask_T & ~below_T & ~above_T, masked)


@correction("opsm")
def opsm(inputs: CorrectionInputs, *, delta: float = 0.1, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, capped, without negative sequences that have become unlikely: no loss where A < 0 and d > delta.

    d = mean_t log(pi_b / pi) over the sequence's tokens, in nats, pi the policy as it is now. DeepSeek-V3.2
    (arXiv:2512.02556) section 3.1, off-policy sequence masking: a policy learns most from its own mistakes, and
    mistakes that it would not make can mislead it. Weights are those of `token_truncate`; with `algorithm.prox=behave`
    they are 1, as in the paper.

    Raises:
        ValueError: delta is negative, or cap is not positive.
    """
    if delta < 0.0:
        raise ValueError(f"delta is {delta}; it bounds a mean log-ratio in nats, set it to 0 or more (0.1)")
    truncated = token_truncate(inputs, cap=cap)
    away_T = -log_ratio(inputs.logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)
    away_S = sequence_mean(away_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    masked_T = inputs.mask_T & (inputs.advantages_T < 0) & (away_S > delta)[inputs.seq_ids_T]
    return CorrectionOutput(truncated.weight_T, inputs.mask_T & ~masked_T, {"sequence_away": masked_T.sum()})


@correction("chain")
def chain(
    inputs: CorrectionInputs, *, masks: str = "token_k1", bounds: str = "0.5_2", cap: float = 5.0
) -> CorrectionOutput:
    """Token weight, capped, on tokens that pass all of several bounds, in verl's notation.

    `masks="token_k1,seq_mean_k3" bounds="0.5_2,0.01"`: the bounded value is that of a `token`, or a sequence's
    `seq_sum`, `seq_mean` or `seq_max`, of an estimate of the divergence with l = log(pi_prox / pi_b), k1 = -l,
    k2 = l^2 / 2, k3 = e^l - 1 - l. k1 has two bounds, of e^k1; k2 and k3 have an upper bound.
    Sequences are whole, and each criterion uses all tokens, also those that another criterion masks.

    Raises:
        ValueError: an unknown criterion, a bound that does not fit, or cap is not positive.
    """
    check_cap(cap)
    log_weight_T = log_weight(inputs)
    keep_T, masked = inputs.mask_T, {}
    for name, low, high in _criteria(masks, bounds):
        level, _, kind = name.rpartition("_")
        values_T = {
            "k1": -log_weight_T,
            "k2": 0.5 * log_weight_T.square(),
            "k3": torch.expm1(log_weight_T) - log_weight_T,
        }[kind]
        if level != "token":
            values_T = _over_sequences(level, values_T, inputs)[inputs.seq_ids_T]
        outside_T = inputs.mask_T & ((values_T < low) | (values_T > high))
        keep_T, masked[name] = keep_T & ~outside_T, outside_T.sum()
    return CorrectionOutput(log_weight_T.exp().clamp(max=cap), keep_T, masked)


def _over_sequences(level: str, values_T: Tensor, inputs: CorrectionInputs) -> Tensor:
    if level == "seq_mean":
        return sequence_mean(values_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    if level == "seq_sum":
        return segment_sum(torch.where(inputs.mask_T, values_T, 0), inputs.seq_ids_T, inputs.num_seqs)
    zeros_S = values_T.new_zeros(inputs.num_seqs)
    return zeros_S.scatter_reduce(0, inputs.seq_ids_T, torch.where(inputs.mask_T, values_T, 0), "amax")


CRITERIA = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
"""Criteria of `chain`."""


@functools.lru_cache(maxsize=16)
def _criteria(masks: str, bounds: str) -> list[tuple[str, float, float]]:
    """Return each criterion with its bounds; the bounds of k1 are in log space.

    Raises:
        ValueError: as for `chain`.
    """
    names, given = ([part.strip() for part in text.split(",")] for text in (masks, bounds))
    if len(names) != len(given) or len({*names}) != len(names):
        raise ValueError(f"chain has the masks {masks!r} and the bounds {bounds!r}; give each mask once, with a bound")
    found = []
    for name, text in zip(names, given, strict=True):
        if name not in CRITERIA:
            raise ValueError(f"chain mask {name!r} is unknown; use {', '.join(CRITERIA)}")
        try:
            numbers = [float(part) for part in text.split("_")]
        except ValueError:
            numbers = []
        two = name.endswith("k1")
        if len(numbers) != 1 + two or min(numbers) <= 0.0 or numbers != sorted(numbers):
            form = "two ratios, low_high (0.5_2)" if two else "one divergence (0.01)"
            raise ValueError(f"chain bound {text!r} of {name!r}: give {form}, above 0")
        low, high = [math.log(number) for number in numbers] if two else [-math.inf, *numbers]
        found.append((name, low, high))
    return found


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

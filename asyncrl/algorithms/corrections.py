"""Off-policy corrections: `(CorrectionInputs, *, params) -> CorrectionOutput`, a weight and a keep mask per token."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.packed import LOG_RATIO_LIMIT, as_float, log_ratio, segment_sum, sequence_mean
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.registry import correction


def check_cap(cap: float) -> None:
    """Raises ValueError unless cap > 0."""
    if cap <= 0.0:
        raise ValueError(f"cap is {cap}; it bounds an importance weight from above, set it above 0 (2 to 10 is usual)")


def check_band(low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low < high."""
    if not 0.0 <= low < high:
        raise ValueError(f"the band is [{low}, {high}]; importance weights are positive, set 0 <= low < high")


def sequence_weight(inputs: CorrectionInputs) -> Tensor:
    """prod_t pi_prox / pi_behave over the masked tokens of each sequence, shape [S], its log clamped."""
    log_weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)
    log_weight_S = segment_sum(log_weight_T, inputs.seq_ids_T, inputs.num_seqs)
    return log_weight_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@correction("none")
def none(inputs: CorrectionInputs) -> CorrectionOutput:
    """Weight 1 for every token. With it, losses other than `decoupled_ppo` take their ratio to the behaviour policy."""
    return CorrectionOutput(torch.ones_like(as_float(inputs.prox_logprobs_T)), inputs.mask_T)


@correction("token_truncate")
def token_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, capped: w = min(pi_prox / pi_behave, cap).

    Truncated importance sampling: Ionides 2008; Yao et al. 2025 for the gap between trainer and inference engine.
    Every token keeps its loss; large weights are biased towards the cap.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp().clamp(max=cap)
    return CorrectionOutput(weight_T, inputs.mask_T)


@correction("token_mask")
def token_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, masked above the cap: w = pi_prox / pi_behave where that is <= cap, else the token carries no loss.

    Masked importance sampling; AReaL's behaviour-weight cap (arXiv:2505.24298). Masked tokens stay in the denominator.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp()
    above_T = inputs.mask_T & (weight_T > cap)
    return CorrectionOutput(weight_T, inputs.mask_T & ~above_T, {"weight_above_cap": above_T.sum()})


@correction("icepop")
def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> CorrectionOutput:
    """Token weight inside a band: w = pi_prox / pi_behave where low <= w <= high, else the token carries no loss.

    Ling team 2025, "Every step evolves" (arXiv:2510.18855), with its bounds as defaults.

    Raises:
        ValueError: not 0 <= low < high.
    """
    check_band(low, high)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp()
    below_T, above_T = inputs.mask_T & (weight_T < low), inputs.mask_T & (weight_T > high)
    masked = {"weight_below_band": below_T.sum(), "weight_above_band": above_T.sum()}
    return CorrectionOutput(weight_T, inputs.mask_T & ~below_T & ~above_T, masked)


@correction("sequence_truncate")
def sequence_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, capped: w = min(prod_t pi_prox / pi_behave, cap) for every token of the sequence.

    Unbiased below the cap, for the product is the ratio of the sequences' probabilities (Liu & Li 2025, "When speed
    kills stability", sequence TIS).

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_S = sequence_weight(inputs).clamp(max=cap)
    return CorrectionOutput(weight_S[inputs.seq_ids_T], inputs.mask_T)


@correction("sequence_mask")
def sequence_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, masked above the cap: w = prod_t pi_prox / pi_behave where that is <= cap, else no loss.

    Liu & Li 2025, "When speed kills stability", sequence MIS. Masked tokens stay in the denominator.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = sequence_weight(inputs)[inputs.seq_ids_T]
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
    check_band(low, high)
    check_cap(cap)
    log_weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)
    mean_S = sequence_mean(log_weight_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs).exp()
    mean_T = mean_S[inputs.seq_ids_T]
    below_T, above_T = inputs.mask_T & (mean_T < low), inputs.mask_T & (mean_T > high)
    masked = {"sequence_below_band": below_T.sum(), "sequence_above_band": above_T.sum()}
    return CorrectionOutput(log_weight_T.exp().clamp(max=cap), inputs.mask_T & ~below_T & ~above_T, masked)

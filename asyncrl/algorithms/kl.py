"""KL to the reference policy: estimators `(KLInputs, *, params) -> kl_T`, and the penalty in the reward.

The last function moves the reference towards the actor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import as_float, log_ratio
from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("k1")
def k1(inputs: KLInputs) -> Tensor:
    """log(pi / pi_ref): unbiased, high variance, may be negative.

    Schulman 2020, "Approximating KL divergence". For use in the reward: its gradient as a loss has expectation zero.
    """
    return log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T)


@kl_estimator("k2")
def k2(inputs: KLInputs) -> Tensor:
    """(log(pi / pi_ref))^2 / 2: biased, low variance; its gradient as a loss is that of KL(pi || pi_ref) on policy.

    Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T).square()


@kl_estimator("k3")
def k3(inputs: KLInputs, *, cap: float = 10.0) -> Tensor:
    """min(pi_ref / pi - 1 - log(pi_ref / pi), cap): low variance, never negative; GRPO's term in the loss.

    Schulman 2020, "Approximating KL divergence"; DeepSeekMath (arXiv:2402.03300) eq. 4. Unbiased except for the cap, in
    nats. If the policy has almost dropped a token that the reference likes, the ratio and its gradient grow without
    bound (3e8 at a log-ratio of 19.5). The cap is reached by a token that is 13 times (2.6 nats) less
    likely, or 6e4 times (11 nats) more likely, than under the reference. Beyond it the term is constant and has no
    gradient, as in verl and AReaL, whose bound is the default; `inf` removes the cap.

    Raises:
        ValueError: cap is not positive.
    """
    if not cap > 0.0:
        raise ValueError(f"cap is {cap}; it bounds the divergence of a token in nats, set it above 0 (10), or to .inf")
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T)
    return (torch.expm1(-log_ratio_T) + log_ratio_T).clamp(max=cap)


@kl_estimator("k3_unbiased")
def k3_unbiased(inputs: KLInputs, *, cap: float = 10.0) -> Tensor:
    """k3 weighted by pi / pi_b: the gradient of KL(pi || pi_ref) without bias on tokens that another policy sampled.

    DeepSeek-V3.2 (arXiv:2512.02556) eq. 7: r (pi_ref / pi - 1 - log(pi_ref / pi)) with r = pi / pi_b, which is
    differentiated too. k3 alone pulls tokens that the policy has almost dropped without bound; here their weight falls
    as their ratio grows. k3 is held at `cap` nats.

    Raises:
        ValueError: there are no behaviour log-probabilities, as in the reward, or cap is not positive.
    """
    if inputs.behave_logprobs_T is None:
        raise ValueError(
            "kl 'k3_unbiased' needs behaviour log-probabilities, which only a term in the loss has; use k1"
        )
    ratio_T = log_ratio(inputs.logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp()
    return ratio_T * k3(inputs, cap=cap)


@kl_estimator("abs")
def absolute(inputs: KLInputs) -> Tensor:
    """|log(pi / pi_ref)|: not an estimate of the divergence, but a penalty that grows linearly with every move.

    verl's and TRL's earlier `abs`; for use in the reward.
    """
    return log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T).abs()


@kl_estimator("full")
def full(inputs: KLInputs) -> Tensor:
    """sum_v pi(v) log(pi(v) / pi_ref(v)): exact at each position, needs both models' log-softmax over the vocabulary.

    Raises:
        ValueError: `log_probs_TV` or `ref_log_probs_TV` is missing.
    """
    return _divergence(*_distributions(inputs, "full"))


@kl_estimator("forward")
def forward(inputs: KLInputs) -> Tensor:
    """sum_v pi_ref(v) log(pi_ref(v) / pi(v)): the policy covers all that the reference does; exact, as `full`.

    The loss of distillation from a teacher's whole distributions (Hinton et al., arXiv:1503.02531).

    Raises:
        ValueError: as of `full`.
    """
    new_TV, ref_TV = _distributions(inputs, "forward")
    return _divergence(ref_TV, new_TV)


@kl_estimator("jsd")
def jsd(inputs: KLInputs, *, beta: float = 0.5) -> Tensor:
    """beta KL(pi_ref || m) + (1 - beta) KL(pi || m) with m = beta pi_ref + (1 - beta) pi: bounded, between the two.

    Generalised Jensen-Shannon divergence of GKD (Agarwal et al., arXiv:2306.13649) eq. 1; as in TRL's
    `generalized_jsd_loss`, beta 0 stands for `forward` and beta 1 for `full`, its limits up to a factor.

    Raises:
        ValueError: as of `full`, or beta is outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; set it within 0 (as forward) to 1 (as full)")
    if beta == 0.0:
        return forward(inputs)
    if beta == 1.0:
        return full(inputs)
    new_TV, ref_TV = _distributions(inputs, "jsd")
    mixture_TV = torch.logaddexp(ref_TV + math.log(beta), new_TV + math.log1p(-beta))
    kl_T = beta * _divergence(ref_TV, mixture_TV) + (1.0 - beta) * _divergence(new_TV, mixture_TV)
    return torch.where(inputs.mask_T, kl_T, 0)  # elsewhere the mixture's logarithm is 0 up to rounding


def _distributions(inputs: KLInputs, name: str) -> tuple[Tensor, Tensor]:
    """Log-softmax of the policy and, without gradient, of the reference, `[T, V]`; 0 at tokens without loss."""
    if inputs.log_probs_TV is None or inputs.ref_log_probs_TV is None:
        raise ValueError(
            f"kl {name!r} needs log_probs_TV and ref_log_probs_TV, the log-softmax over the vocabulary; "
            "pass them or choose k1, k2 or k3"
        )
    mask_T1 = inputs.mask_T[:, None]
    new_TV = torch.where(mask_T1, as_float(inputs.log_probs_TV), 0)
    return new_TV, torch.where(mask_T1, as_float(inputs.ref_log_probs_TV).detach(), 0)


def _divergence(one_TV: Tensor, other_TV: Tensor) -> Tensor:
    """`[T]`: KL(one || other) of log-probabilities `[T, V]`."""
    # Words that `one` rules out (log 0) contribute nothing, but 0 * -inf would be nan.
    difference_TV = torch.where(torch.isfinite(one_TV), one_TV - other_TV, 0)
    kl_T: Tensor = (one_TV.exp() * difference_TV).sum(dim=1)
    return kl_T


def kl_token_rewards(kl_T: Tensor, mask_T: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl_t at policy tokens, 0 elsewhere: the `token_rewards_T` of `AdvantageInputs`.

    Ziegler et al. 2019 (arXiv:1909.08593) eq. 2; `kl_T` from a kl estimator (k1 is unbiased here), constant.
    """
    return torch.where(mask_T, -kl_coef * kl_T.detach(), 0)


@torch.no_grad()
def ema_update_(reference: Mapping[str, Tensor], actor: Mapping[str, Tensor], decay: float) -> None:
    """reference <- decay * reference + (1 - decay) * actor, in place, parameter by parameter; once per train step.

    Parameters are paired by name, since the two may list them in other orders.

    Keep the reference in fp32: in bf16 a decay above 0.996 rounds every small change away.

    Raises:
        ValueError: decay outside [0, 1], or the two have parameters of other names or shapes.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay is {decay}; set it within 0 (copy the actor) to 1 (frozen)")
    shapes, others = ({name: each.shape for name, each in own.items()} for own in (reference, actor))
    if shapes != others:
        differ = [name for name in shapes | others if shapes.get(name) != others.get(name)]
        raise ValueError(f"the reference and the actor differ in {differ[0]!r} ({len(differ)} parameters)")
    for name, averaged in reference.items():
        averaged.lerp_(actor[name].to(averaged.dtype), 1.0 - decay)

"""The actor's objective, composed of a policy loss, a correction, KL in the loss, further terms, an aggregation.

    total = 1/D sum_t a_t [ w_t k_t L_t + kl_coef KL_t + log_ratio_coef/2 l_t^2 - entropy_coef H_t ]

a_t and D come from the aggregation; D is summed over all micro-batches and ranks before the first backward pass. w_t
and k_t (weight, keep) come from the correction, L_t from the policy loss. A selection, made over the whole minibatch
before its first forward pass (`selection`), masks further tokens of L. l = log(pi / pi_old) is the log-ratio to the
policy that the loss's ratio refers to; its square keeps the policy near that one without a clip (DRO, arXiv:2405.19107;
Kimi k1.5, arXiv:2501.12599; prime-rl), with a gradient of log_ratio_coef l_t grad log pi, also where the loss is
masked. Use:

    D = all_reduce(sum(objective.normaliser(loss_tokens(m)) for m in micro_batches))
    for m in micro_batches:
        loss, stats = objective(inputs(m), ref_logprobs_T(m), D)
        loss.backward()

Each loss is a partial sum: gradients are summed, never averaged, over micro-batches and ranks. Tokens that a correction
masks stay in D, because D is computed before the correction: they contribute zero instead of giving the others more
weight. The loss's ratio refers to the behaviour policy with correction `none` (the vanilla loss), otherwise to the
proximal one, and the correction supplies prox / behave. `decoupled_ppo` always refers to the proximal one.

The default selection (all tokens) and aggregation (their mean) are at the end of the file; others are in `corrections`
and `policy_losses`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import (
    Stats,
    as_float,
    count_stat,
    log_ratio,
    max_stat,
    mean_stat,
)
from asyncrl.algorithms.inputs import (
    Aggregation,
    CorrectionInputs,
    CorrectionOutput,
    KLInputs,
    LossTokens,
    PolicyLossInputs,
    SelectionInputs,
    SelectionOutput,
)
from asyncrl.algorithms.registry import ObjectiveSpec, ProximalMode, Resolve, aggregation, selection


class Objective:
    """The objective of `spec`, composed of the functions that `resolve` finds. Stateless.

    Attributes:
        needs_prox: the trainer must recompute proximal log-probabilities at the step's start.
        needs_reference: it must compute reference log-probabilities.
        acts_without_advantage: a term acts on samples whose advantages are all zero.
        selects: tokens are chosen over the whole minibatch, by `selection`.

    Raises:
        ValueError: a bad coefficient or combination, or any error of `resolve`.
    """

    def __init__(self, spec: ObjectiveSpec, resolve: Resolve) -> None:
        if spec.kl is None and spec.kl_coef != 0.0:
            raise ValueError(f"kl_coef is {spec.kl_coef} but kl is not set; choose an estimator (k3) or set it to 0")
        if spec.kl_coef < 0.0:
            raise ValueError(f"kl_coef is {spec.kl_coef}; below 0 it rewards leaving the reference, set 0 or more")
        if spec.log_ratio_coef < 0.0:
            raise ValueError(f"log_ratio_coef is {spec.log_ratio_coef}; below 0 it rewards large moves, set 0 or more")
        self.spec = spec
        self._loss = resolve("policy_loss", spec.policy_loss.name, spec.policy_loss.params)
        self._correction = resolve("correction", spec.correction.name, spec.correction.params)
        self.selects = spec.selection.name != "none"
        self.selection: Callable[[SelectionInputs], SelectionOutput] = everything
        if self.selects:
            self.selection = resolve("selection", spec.selection.name, spec.selection.params)
        self._aggregation = resolve("aggregation", spec.aggregation.name, spec.aggregation.params)
        self._kl = resolve("kl", spec.kl.name, spec.kl.params) if spec.kl else None
        self._corrects = spec.correction.name != "none"
        # A user's loss, named by its import path, may read them too; if not, they cost only time.
        name = spec.policy_loss.name
        uses_prox = self._corrects or self.selects or name == "decoupled_ppo" or ":" in name
        self.needs_prox = uses_prox and spec.prox == ProximalMode.recompute
        self.needs_reference = self._kl is not None
        self.acts_without_advantage = self.needs_reference or spec.entropy_coef != 0.0 or spec.log_ratio_coef != 0.0

    def normaliser(self, tokens: LossTokens) -> float:
        """Return the share of D of these tokens.

        Add the shares of micro-batches and ranks, and pass the sum to every call.
        """
        return float(self._aggregation(tokens).denominator)

    def __call__(
        self,
        inputs: PolicyLossInputs,
        ref_logprobs_T: Tensor | None,
        normaliser: float,
        *,
        kl_coef: float | None = None,
        log_probs_TV: Tensor | None = None,
        ref_log_probs_TV: Tensor | None = None,
    ) -> tuple[Tensor, Stats]:
        """Return this micro-batch's contribution to the loss (0-d, differentiable) and its statistics.

        Args:
            inputs: the micro-batch; `old_policy` is set here.
            ref_logprobs_T: reference log-probabilities, needed if the spec has a kl.
            normaliser: D; 0 (a batch without loss tokens) gives a loss of 0.
            kl_coef: the adaptive controller's coefficient, in place of the spec's.
            log_probs_TV, ref_log_probs_TV: log-softmax over the vocabulary, for kl `full`.

        Raises:
            ValueError: an input that the spec needs is None.
        """
        inputs = self._with_proximal(inputs)
        mask_T = inputs.mask_T
        correction = self._correct(inputs)
        output = self._loss(inputs)
        # Tokens without loss may have any value, even nan, which a product with 0 would keep.
        keep_T, penalty_T = output.mask_T & correction.keep_T, None
        # With prox `behave`, distances are from the behaviour policy to the current one: to the proximal they are 0.
        without_prox = self.spec.prox == ProximalMode.behave
        measured = dataclasses.replace(inputs, prox_logprobs_T=None) if without_prox else inputs
        stats = {**_policy_stats(measured, correction), **output.stats}
        if self.selects:
            if inputs.selection is None:
                raise ValueError(f"selection is None but the spec has {self.spec.selection.name!r}; select first")
            keep_T, penalty_T = keep_T & inputs.selection.keep_T, inputs.selection.penalty_T
            stats["masked/selected"] = count_stat((mask_T & ~inputs.selection.keep_T).sum())
        policy_T = torch.where(keep_T, output.loss_T, 0) * correction.weight_T
        total_T = policy_T
        if penalty_T is not None:
            total_T = total_T + penalty_T * log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, mask_T).abs()
        stats["loss/policy"] = mean_stat(policy_T, mask_T)
        if self._kl is not None:
            if ref_logprobs_T is None:
                raise ValueError(
                    "ref_logprobs_T is None but the objective has a kl; add the reference model or set kl to null"
                )
            behave_T = inputs.behave_logprobs_T.detach()
            kl_T = self._kl(
                KLInputs(inputs.logprobs_T, ref_logprobs_T, mask_T, log_probs_TV, ref_log_probs_TV, behave_T)
            )
            total_T = total_T + (self.spec.kl_coef if kl_coef is None else kl_coef) * kl_T
            stats["kl/reference"] = mean_stat(kl_T, mask_T)
        if self.spec.log_ratio_coef != 0.0:
            square_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, mask_T).square()
            total_T = total_T + 0.5 * self.spec.log_ratio_coef * square_T
            stats["ppo/log_ratio_square"] = mean_stat(square_T, mask_T)
        if self.spec.entropy_coef != 0.0:
            if inputs.entropy_T is None:
                raise ValueError(
                    "entropy_T is None but entropy_coef is not 0; compute the entropy or set entropy_coef to 0"
                )
            total_T = total_T - self.spec.entropy_coef * as_float(inputs.entropy_T)
        weight_T = self._aggregation(inputs.loss_tokens).weight_T
        scale = 1.0 / normaliser if normaliser > 0.0 else 0.0
        return (torch.where(mask_T, total_T, 0) * weight_T).sum() * scale, stats

    def _with_proximal(self, inputs: PolicyLossInputs) -> PolicyLossInputs:
        if self.spec.prox == ProximalMode.approximate:
            prox_T = approximate_prox_logprobs(
                inputs.logprobs_T, inputs.behave_logprobs_T, inputs.versions_T, inputs.current_version
            )
            inputs = dataclasses.replace(inputs, prox_logprobs_T=prox_T)
        elif self.spec.prox == ProximalMode.behave:
            inputs = dataclasses.replace(inputs, prox_logprobs_T=inputs.behave_logprobs_T)
        return dataclasses.replace(inputs, old_policy="prox" if self._corrects else "behave")

    def _correct(self, inputs: PolicyLossInputs) -> CorrectionOutput:
        if not self._corrects:
            return CorrectionOutput(torch.ones_like(as_float(inputs.behave_logprobs_T)), inputs.mask_T)
        output: CorrectionOutput = self._correction(
            CorrectionInputs(
                inputs.required_prox_T.detach(),
                inputs.behave_logprobs_T.detach(),
                inputs.mask_T,
                inputs.seq_ids_T,
                inputs.num_seqs,
                inputs.logprobs_T.detach(),
                inputs.advantages_T.detach(),
            )
        )
        return output


@torch.no_grad()
def _policy_stats(inputs: PolicyLossInputs, correction: CorrectionOutput) -> Stats:
    """Return the statistics of every objective; a loss that clips overwrites `ppo/clip_fraction`.

    KL figures are k3 estimates in nats per token: `ppo/behave_kl` from the behaviour policy to the proximal one (or to
    the current one, without a proximal policy), `ppo/approx_kl` from the proximal (else the behaviour) policy to the
    current one. `ppo/engine_gap` is the distance of log-probabilities in nats between the engine that generated and the
    trainer, for tokens of the current version only, so no optimizer step is in between. Without `entropy_T`, `entropy`
    is the mean surprise of the sampled tokens.
    """
    mask_T, logprobs_T = inputs.mask_T, inputs.logprobs_T.detach()
    prox_T = logprobs_T if inputs.prox_logprobs_T is None else inputs.prox_logprobs_T
    start_T = inputs.behave_logprobs_T if inputs.prox_logprobs_T is None else inputs.prox_logprobs_T
    move_T = log_ratio(logprobs_T, start_T, mask_T)
    drift_T = log_ratio(prox_T, inputs.behave_logprobs_T, mask_T)
    importance_T = log_ratio(logprobs_T, inputs.behave_logprobs_T, mask_T).exp()
    entropy_T = -logprobs_T if inputs.entropy_T is None else inputs.entropy_T
    current_T = mask_T & (inputs.versions_T == inputs.current_version)
    stats = {
        "ppo/clip_fraction": mean_stat(torch.zeros_like(move_T), mask_T),
        "ppo/behave_imp_weight_mean": mean_stat(correction.weight_T, correction.keep_T),
        "ppo/behave_imp_weight_max": max_stat(correction.weight_T, correction.keep_T),
        "ppo/behave_kl": mean_stat(torch.expm1(drift_T) - drift_T, mask_T),
        "ppo/engine_gap": mean_stat(drift_T.abs(), current_T),
        "ppo/engine_gap_max": max_stat(drift_T.abs(), current_T),
        "ppo/approx_kl": mean_stat(torch.expm1(move_T) - move_T, mask_T),
        "ppo/behave_ratio_mean": mean_stat(importance_T, mask_T),
        "ppo/behave_ratio_square_mean": mean_stat(importance_T.square(), mask_T),
        "entropy": mean_stat(as_float(entropy_T), mask_T),
        "tokens/loss": count_stat(mask_T.sum()),
    }
    for reason, count in correction.masked.items():
        stats[f"masked/{reason}"] = count_stat(count)
    return stats


def approximate_prox_logprobs(
    logprobs_T: Tensor, behave_logprobs_T: Tensor, versions_T: Tensor, current_version: int
) -> Tensor:
    """Approximate log pi_prox per token without a forward pass, detached.

    A token is generated at version b and trained while the trainer, at version v, moves towards v + 1. Its
    log-probability at b was recorded, the current one comes from the loss's own forward pass. If the policy moved at a
    constant rate in log space, version v lies at the fraction alpha (AReaL's log-linear approximation):

        alpha = (v - b) / (v + 1 - b),    log pi_prox = log pi_behave + alpha (log pi - log pi_behave)

    A fresh token (b = v) has alpha = 0, which is exact: its behaviour policy is the proximal one.

    Args:
        versions_T: int64; -1 where the policy did not generate the token, which keeps its behaviour log-probability.
        current_version: the version that the trainer holds at the step's start, v.
    """
    behave_T = as_float(behave_logprobs_T)
    age_T = (current_version - versions_T).clamp(min=0).to(behave_T.dtype)
    mixed_T = torch.lerp(behave_T, as_float(logprobs_T).detach().to(behave_T.dtype), age_T / (age_T + 1.0))
    return torch.where(versions_T >= 0, mixed_T, behave_T)


def weight_variance(weight_mean: float, weight_square_mean: float) -> float:
    """Variance of w / mean(w); 1 / (1 + variance) is Kish's effective sample size over n."""
    return max(weight_square_mean / weight_mean**2 - 1.0, 0.0) if weight_mean > 0.0 else 0.0


def should_stop(stats: Mapping[str, float], *, max_kl: float = 0.0, max_weight_variance: float = 0.0) -> str | None:
    """Return the reason to skip this minibatch and those that follow in the step, or None to continue.

    Call it before a minibatch's optimizer step.

    Args:
        stats: statistics of the minibatch's objective, reduced over ranks, so that all ranks
            decide alike (`stat_values`).
        max_kl: bound on `ppo/approx_kl` in nats per token; 0 for no bound.
        max_weight_variance: bound on the relative variance of the importance weights pi / pi_behave; 0 for no bound.
    """
    kl = stats["ppo/approx_kl"]
    if max_kl and not kl <= max_kl:
        return f"ppo/approx_kl {kl:.4g} is above {max_kl:.4g}"
    variance = weight_variance(stats["ppo/behave_ratio_mean"], stats["ppo/behave_ratio_square_mean"])
    if max_weight_variance and not variance <= max_weight_variance:
        return f"variance of the importance weights {variance:.4g} is above {max_weight_variance:.4g}"
    return None


ERROR_LIMIT = 0.2
"""Ziegler et al. clip the proportional error to +-0.2, so that one odd batch cannot throw the coefficient."""


@dataclass
class KLController:
    """The current KL coefficient, updated once per train step: a constant or, if there is a target,

        coef <- coef (1 + clip(kl / target - 1, +-0.2) n / horizon)

    Ziegler et al. 2019 (arXiv:1909.08593) section 2.2; n and `horizon` are in samples: the larger the horizon, the
    slower. `target` 0 keeps the coefficient constant, and a coefficient of 0 stays 0.
    """

    coef: float
    target: float = 0.0
    horizon: float = 1.0

    def __post_init__(self) -> None:
        self._adapts = self.coef > 0.0 and self.target > 0.0
        self._first = self.coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to a finished step's mean KL (in the units of `target`) over `num_samples`."""
        if self._adapts:
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient for a checkpoint; nothing if it is constant, which is a setting."""
        return {"coef": self.coef, "first": self._first} if self._adapts else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict`, unless the setting, with which it began, has changed since."""
        if self._adapts and state.get("first", self._first) == self._first:
            self.coef = state.get("coef", self.coef)  # it may have been fixed before


@selection("none")
def everything(inputs: SelectionInputs) -> SelectionOutput:
    """Every token keeps its loss."""
    return SelectionOutput(torch.ones_like(inputs.advantages_T, dtype=torch.bool))


@aggregation("token_mean")
def token_mean(tokens: LossTokens) -> Aggregation:
    """Every token has the same weight: sum_t loss_t / number of loss tokens in the global batch.

    DAPO (arXiv:2503.14476) eq. 12.
    """
    return Aggregation(tokens.mask_T.double(), tokens.mask_T.sum(dtype=torch.float64))

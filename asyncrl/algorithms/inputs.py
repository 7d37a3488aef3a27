"""Inputs and outputs of the tensor algorithms.

Per-token tensors are packed (`[T]`) and aligned with tokens: `logprobs_T[t]` is log p(token t | the tokens before it).
`mask_T` is bool, True if the token carries loss. `seq_ids_T` is int64, sorted, 0..S-1. Whole sequences only: a
sequence is never split over two micro-batches, a group never over two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from asyncrl.algorithms.arithmetic import AllReduce, Stats


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """One micro-batch for a policy loss.

    `logprobs_T` requires grad and is that of the policy being trained; everything else is constant. `old_policy` is the
    policy that the loss's ratio refers to: the behaviour policy (the vanilla form) or the proximal one (if a correction
    supplies prox / behave). `versions_T` is int64, -1 where not generated; `current_version` is the version
    that the trainer holds at the step's start. `entropy_T` is in nats.
    """

    logprobs_T: Tensor
    prox_logprobs_T: Tensor | None
    behave_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    seq_ids_T: Tensor
    num_seqs: int
    versions_T: Tensor
    current_version: int
    entropy_T: Tensor | None = None
    old_policy: Literal["behave", "prox"] = "behave"
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The user's columns (`rollout.columns`), [T] each; columns of samples are repeated for their tokens."""
    selection: SelectionOutput | None = None
    """Tokens that the spec's selection chose over the whole minibatch."""
    episode_tokens_T: Tensor | None = None
    """As in `LossTokens`."""

    @property
    def loss_tokens(self) -> LossTokens:
        """The tokens for an aggregation."""
        return LossTokens(self.mask_T, self.seq_ids_T, self.num_seqs, self.episode_tokens_T)

    @property
    def required_prox_T(self) -> Tensor:
        """The proximal log-probabilities.

        Raises:
            ValueError: there are none.
        """
        if self.prox_logprobs_T is None:
            raise ValueError(
                "prox_logprobs_T is None but the loss or its correction needs the proximal policy; recompute it at the "
                "step's start (Objective.needs_prox says when) or set prox to 'approximate'"
            )
        return self.prox_logprobs_T

    @property
    def old_logprobs_T(self) -> Tensor:
        """Log-probabilities under the policy that `old_policy` names."""
        return self.behave_logprobs_T if self.old_policy == "behave" else self.required_prox_T


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """Per-token loss (to minimise, differentiable), the tokens whose loss counts, and statistics."""

    loss_T: Tensor
    mask_T: Tensor
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CorrectionInputs:
    """Log-probabilities of the sampled tokens under the proximal and the behaviour policy; constants.

    `logprobs_T` are those of the policy being trained, without gradient, and `advantages_T` the advantages.
    """

    prox_logprobs_T: Tensor
    behave_logprobs_T: Tensor
    mask_T: Tensor
    seq_ids_T: Tensor
    num_seqs: int
    logprobs_T: Tensor
    advantages_T: Tensor


@dataclass(frozen=True, eq=False)
class CorrectionOutput:
    """The factor of each token's loss, the tokens that keep their loss, and the number of masked tokens by reason.

    `masked` has the same keys whatever the data, so that ranks can reduce it; its values are 0-d counts.
    """

    weight_T: Tensor
    keep_T: Tensor
    masked: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SelectionInputs:
    """The N loss tokens of one minibatch on this rank, as they are at the step's start; constants.

    `start_logprobs_T` are the proximal log-probabilities; those of the behaviour policy if none are computed.
    `gather` concatenates a tensor [N] over all ranks, whose lengths N may differ; None on one rank. Every rank must
    call it the same number of times.
    """

    start_logprobs_T: Tensor
    behave_logprobs_T: Tensor
    advantages_T: Tensor
    gather: Callable[[Tensor], Tensor] | None = None

    def everyone(self, values_T: Tensor) -> Tensor:
        """Return the values of all ranks."""
        return self.gather(values_T) if self.gather else values_T


@dataclass(frozen=True, eq=False)
class SelectionOutput:
    """The tokens that keep their policy loss, and the factor of an added penalty on the size of a token's log-ratio."""

    keep_T: Tensor
    penalty_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KLInputs:
    """Current and reference policy on the sampled tokens; `*_TV`: log-softmax over the vocabulary, for `full`.

    `behave_logprobs_T` are those of the policy that sampled them, in the loss only.
    """

    logprobs_T: Tensor
    ref_logprobs_T: Tensor
    mask_T: Tensor
    log_probs_TV: Tensor | None = None
    ref_log_probs_TV: Tensor | None = None
    behave_logprobs_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """A rank's whole batch for an advantage estimator.

    `values_T[t]` is the value of the prefix before token t, the state in which it was chosen; `bootstrap_values_S` that
    of the whole sequence (`critic.align_values` makes both from a critic's output). `token_rewards_T` adds to
    the sequence's reward token by token (rewards of turns, a KL penalty). A reward at a token without loss, for example
    a token that is too old, is credited to the policy token before it. `group_ids_S` are any integers; members need not
    be adjacent and may stem from different policy versions. `episodes_S` is the episode of each sequence in its group;
    without it each sequence is one. `roles_S` is the role of each sequence in its episode, as a position in `roles`,
    the roles of all ranks. `baselines` are the estimator's results of the step before, by role.
    `all_reduce` sums over ranks; None on one rank.
    """

    rewards_S: Tensor
    group_ids_S: Tensor
    mask_T: Tensor
    seq_ids_T: Tensor
    num_seqs: int
    values_T: Tensor | None = None
    bootstrap_values_S: Tensor | None = None
    truncated_S: Tensor | None = None
    token_rewards_T: Tensor | None = None
    greedy_rewards_S: Tensor | None = None
    episodes_S: Tensor | None = None
    all_reduce: AllReduce | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The user's columns (`rollout.columns`): `token/...` [T], others [S]."""
    roles_S: Tensor | None = None
    roles: Sequence[str] = ("",)
    baselines: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AdvantageOutput:
    """Advantages (0 outside the mask); for a critic its regression targets and the tokens on which it is trained.

    `baselines` are numbers by role that the estimator needs in the next step, equal on all ranks; they are part of
    checkpoints. None: they do not change.
    """

    advantages_T: Tensor
    returns_T: Tensor | None = None
    value_mask_T: Tensor | None = None
    baselines: Mapping[str, float] | None = None


@dataclass(frozen=True, eq=False)
class ValueLossInputs:
    """One micro-batch for the critic. `values_T` requires grad; `old_values_T` are those at the step's start."""

    values_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor
    mask_T: Tensor


@dataclass(frozen=True, eq=False)
class ValueLossOutput:
    """Per-token loss and statistics."""

    loss_T: Tensor
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The tokens of a micro-batch or of a rank's whole minibatch, for an aggregation; `mask_T` are those with loss.

    `episode_tokens_T` is the number of tokens with loss in the token's episode, in all of its sequences, also those in
    other micro-batches; fp64. An episode is never split over two minibatches or ranks. None: it was not counted.
    """

    mask_T: Tensor
    seq_ids_T: Tensor
    num_seqs: int
    episode_tokens_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Aggregation:
    """Token weights of a micro-batch and its share of the denominator.

    The denominators of all micro-batches and ranks are summed to D first; a micro-batch then contributes
    `(loss_T * weight_T).sum() / D`, so the cut into micro-batches and ranks cannot change the total.
    """

    weight_T: Tensor
    denominator: Tensor

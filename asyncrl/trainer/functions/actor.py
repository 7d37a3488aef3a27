"""The actor's calls: log-probabilities of a step's tokens before its first optimizer step, also those of the reference,
and the train step: one optimizer step per minibatch, in each pass over the batch; its loss and denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stat, Stats, count_stat, merge_stats
from asyncrl.algorithms.inputs import LossTokens, PolicyLossInputs, SelectionInputs, SelectionOutput
from asyncrl.algorithms.objective import Objective, should_stop, weight_variance
from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS
from asyncrl.models.chunked_logprobs import EntropyMode
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs, StepOutcome
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function
from asyncrl.trainer.settings import ReferenceMode


@model_function("actor_inf")
def actor_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `prox_logprobs` [T]: log-probabilities under the actor at the step's start.

    They are deferred. `actor_train` computes them before its first optimizer step, and only for samples with loss in
    later minibatches: in the first minibatch the actor still is the proximal policy. Any other reader gets the
    log-probabilities of all tokens.
    """
    defer_logprobs(ctx, batch)
    return {}


@model_function("ref_inf")
def ref_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `ref_logprobs` [T]: log-probabilities under the reference model; deferred until they are read, and
    computed for the tokens that were not scored ahead.
    """
    defer_logprobs(ctx, batch)
    return {}


def defer_logprobs(ctx: CallContext, batch: StepBatch, of_T: Tensor | None = None) -> None:
    """Defer the call's column: log-probabilities under its role, of the tokens `of_T` only if given, 0 elsewhere."""
    policy, ahead_T = ctx.policy(deferred=True), batch.ahead.get(ctx.writes[0])

    def logprobs(wanted_T: Tensor) -> Tensor:
        wanted_T = wanted_T if of_T is None else wanted_T & of_T
        missing_T = wanted_T if ahead_T is None else wanted_T & ahead_T.isnan()
        with policy.on_device():  # all ranks take part, also a rank without missing tokens
            logprobs_T = policy.logprobs(batch, missing_T)
        return logprobs_T if ahead_T is None else torch.where(wanted_T & ~missing_T, ahead_T, logprobs_T)

    batch.defer(ctx.writes[0], logprobs)


def policy_logprobs(ctx: CallContext, batch: StepBatch) -> Tensor:
    """Return log-probabilities [T] of the policy at generation, or of the proximal one if the call reads it."""
    return batch["prox_logprobs" if "prox_logprobs" in ctx.reads else "behave_logprobs"]


def global_normalisers(
    ctx: CallContext,
    batch: StepBatch,
    wanted_T: Tensor,
    episode_tokens_T: Tensor,
    share: Callable[[LossTokens], float],
) -> list[float]:
    """Return the denominator of every minibatch over all ranks, by one collective for the whole step.

    Args:
        wanted_T: the tokens that carry loss, bool [T].
        episode_tokens_T: `batch.episode_tokens(wanted_T)`.
        share: the share of the denominator of some of these tokens.
    """
    minibatches_TE = batch["minibatches"][batch.seq_ids_T]
    shares = torch.zeros(batch.num_minibatches, dtype=torch.float64)
    for number in range(batch.num_minibatches):
        chosen_T = wanted_T & (minibatches_TE == number).any(-1)
        ids, seq_ids_N = torch.unique_consecutive(batch.seq_ids_T[chosen_T], return_inverse=True)
        mask_N = torch.ones_like(seq_ids_N, dtype=torch.bool)
        shares[number] = share(LossTokens(mask_N, seq_ids_N, len(ids), episode_tokens_T[chosen_T]))
    total: list[float] = ctx.ranks.all_reduce_sum(shares).tolist()
    return total


PROX, REF, KEEP = "prox_logprobs", "ref_logprobs", "keep"
COMPUTED, COMPUTED_RATIO = "tokens/computed", "tokens/computed_ratio"
"""Tokens computed for each input token of the samples: sharing prefixes lowers the ratio, padding raises it."""


class Selection:
    """The tokens of a minibatch that the objective's selection keeps, and their penalties.

    Args:
        wanted_T: the tokens that carry loss, bool [T].
        start_T: log-probabilities [T] at the step's start.
    """

    def __init__(self, objective: Objective, batch: StepBatch, wanted_T: Tensor, start_T: Tensor) -> None:
        self._objective, self._batch, self._wanted_T, self._start_T = objective, batch, wanted_T, start_T
        self._keep_T = torch.ones_like(wanted_T)
        self._penalty_T: Tensor | None = None

    def choose(self, number: int, ranks: Ranks) -> None:
        """Choose among all tokens of minibatch `number` on all `ranks`. Every rank calls it."""
        batch = self._batch
        chosen_T = self._wanted_T & (batch["minibatches"][batch.seq_ids_T] == number).any(-1)
        behave_T = batch["behave_logprobs"]
        output = self._objective.selection(
            SelectionInputs(
                start_logprobs_T=self._start_T[chosen_T],
                behave_logprobs_T=behave_T[chosen_T],
                advantages_T=batch["advantages"][chosen_T],
                gather=None if ranks.world == 1 else partial(_of_all_ranks, ranks),
            )
        )
        self._keep_T = torch.ones_like(self._wanted_T)
        self._keep_T[chosen_T] = output.keep_T
        if output.penalty_T is not None:
            self._penalty_T = torch.zeros_like(behave_T)
            self._penalty_T[chosen_T] = output.penalty_T.to(behave_T.dtype)

    def of(self, targets_N: Tensor) -> SelectionOutput:
        """Return the choice among the tokens `targets_N` of the minibatch."""
        return SelectionOutput(self._keep_T[targets_N], None if self._penalty_T is None else self._penalty_T[targets_N])


def _of_all_ranks(ranks: Ranks, values_T: Tensor) -> Tensor:
    """Join the `values_T` of all ranks, in fp64."""
    parts = ranks.all_gather_bytes(values_T.double().cpu().numpy().tobytes())
    return torch.from_numpy(np.concatenate([np.frombuffer(part, np.float64) for part in parts])).to(values_T.device)


class ActorLoss:
    """The objective on this step's batch, with its loss tokens, denominators and the policies it compares."""

    def __init__(self, ctx: CallContext, batch: StepBatch) -> None:
        self._ctx, self._batch = ctx, batch
        self._objective = ctx.state.objective
        spec = self._objective.spec
        self.exact_kl = spec.kl is not None and spec.kl.name in WHOLE_DISTRIBUTIONS
        """True if the KL term needs whole distributions."""
        self.entropy = EntropyMode.differentiable if spec.entropy_coef != 0.0 else EntropyMode.constant
        """Entropies that the loss gets: with gradients for a bonus, else for statistics only."""
        self.wanted_T = self._signal()
        """The tokens that carry loss, bool [T]."""
        self._episode_tokens_T = batch.episode_tokens(self.wanted_T)
        self.normalisers = global_normalisers(
            ctx, batch, self.wanted_T, self._episode_tokens_T, self._objective.normaliser
        )
        # The reference first: it is then done before the actor moves to the device, if idle roles are off-loaded.
        self._ref_T = batch[REF] if self._objective.needs_reference and not self.exact_kl else None
        self._prox_T: Tensor | None = None
        self._first: int | None = None
        """Minibatch up to whose step the actor still is the proximal policy, if that spares a forward pass."""
        if self._objective.needs_prox or PROX in ctx.reads:
            compute = batch.deferred(PROX)
            first = next((number for number, total in enumerate(self.normalisers) if total > 0.0), 0)
            if compute is not None:
                self._first = first
            if compute is None or self._objective.selects:
                self._prox_T = batch[PROX]
            else:
                later_T = (batch["minibatches"] != first).any(-1)[batch.seq_ids_T]
                self._prox_T = compute(self.wanted_T & later_T)
        self._selection: Selection | None = None
        if self._objective.selects:
            start_T = batch["behave_logprobs"] if self._prox_T is None else self._prox_T
            self._selection = Selection(self._objective, batch, self.wanted_T, start_T)

    def select(self, number: int) -> None:
        """Choose among all tokens of minibatch `number`. Every rank calls it, before its first forward pass."""
        if self._selection is not None:
            self._selection.choose(number, self._ctx.ranks)

    def share(self, micro_batch: MicroBatch, outputs: PolicyOutputs, *, number: int) -> tuple[Tensor, Stats]:
        """Return loss share and statistics of a micro-batch of minibatch `number`."""
        if outputs.distributions_NV is None:
            inputs = self._inputs(micro_batch, outputs.logprobs_N, outputs.entropy_N, number)
            ref_N = None if self._ref_T is None else self._ref_T[micro_batch.targets_N]
            share, stats = self._objective(inputs, ref_N, self.normalisers[number], kl_coef=self._ctx.state.kl.coef)
        else:
            share, stats = self._share_with_distributions(
                micro_batch, outputs.logprobs_N, outputs.distributions_NV, number
            )
        computed, whole = micro_batch.model_inputs["input_ids"].numel(), len(micro_batch.sources_I)
        return share, {**stats, **self._computed(computed, whole)}

    def _computed(self, computed: int, whole: int) -> Stats:
        device = self._batch.device
        computed_, whole_ = (torch.full((), float(number), device=device) for number in (computed, whole))
        return {COMPUTED: Stat(whole_, whole_, "sum"), COMPUTED_RATIO: Stat(computed_, whole_)}

    def no_stats(self) -> Stats:
        """Return statistics of no tokens: a rank without loss tokens then has the same keys as the others."""
        device = self._batch.device
        none_N = torch.zeros(0, device=device)
        ids_N = torch.zeros(0, dtype=torch.int64, device=device)
        vocabulary_NV = torch.zeros(0, 1, device=device) if self.exact_kl else None
        inputs = PolicyLossInputs(
            logprobs_T=none_N,
            prox_logprobs_T=none_N,
            behave_logprobs_T=none_N,
            advantages_T=none_N,
            mask_T=ids_N.bool(),
            seq_ids_T=ids_N,
            num_seqs=0,
            versions_T=ids_N,
            current_version=self._batch.version,
            entropy_T=none_N,
            columns=self._batch.own_by_token(ids_N),
            selection=SelectionOutput(ids_N.bool()) if self._objective.selects else None,
            episode_tokens_T=none_N,
        )
        with torch.no_grad():
            stats = self._objective(
                inputs, none_N, 0.0, kl_coef=0.0, log_probs_TV=vocabulary_NV, ref_log_probs_TV=vocabulary_NV
            )[1]
        return {**stats, **self._computed(0, 0)}

    def _share_with_distributions(
        self, micro_batch: MicroBatch, logprobs_N: Tensor, log_probs_NV: Tensor, number: int
    ) -> tuple[Tensor, Stats]:
        ref_NV = self._ctx.policy("ref").distributions(micro_batch)
        inputs = self._inputs(micro_batch, logprobs_N, -(log_probs_NV.exp() * log_probs_NV).sum(-1), number)
        return self._objective(
            inputs,
            ref_NV.gather(-1, micro_batch.tokens_N[:, None]).squeeze(-1),
            self.normalisers[number],
            kl_coef=self._ctx.state.kl.coef,
            log_probs_TV=log_probs_NV,
            ref_log_probs_TV=ref_NV,
        )

    def _inputs(
        self, micro_batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor | None, number: int
    ) -> PolicyLossInputs:
        batch, targets_N = self._batch, micro_batch.targets_N
        prox_N = None
        if self._prox_T is not None:
            prox_N = logprobs_N.detach() if number == self._first else self._prox_T[targets_N]
        return PolicyLossInputs(
            logprobs_T=logprobs_N,
            prox_logprobs_T=prox_N,
            behave_logprobs_T=batch["behave_logprobs"][targets_N],
            advantages_T=batch["advantages"][targets_N],
            mask_T=torch.ones_like(targets_N, dtype=torch.bool),
            seq_ids_T=micro_batch.seq_ids_N,
            num_seqs=micro_batch.num_seqs,
            versions_T=batch["versions"][targets_N],
            current_version=batch.version,
            entropy_T=entropy_N,
            columns=batch.own_by_token(targets_N),
            selection=None if self._selection is None else self._selection.of(targets_N),
            episode_tokens_T=self._episode_tokens_T[targets_N],
        )

    def _signal(self) -> Tensor:
        batch = self._batch
        wanted_T = batch["loss_mask"]
        if KEEP in self._ctx.reads:
            wanted_T = wanted_T & batch[KEEP][batch.seq_ids_T]
        if self._objective.acts_without_advantage or not self._ctx.args.get("drop_zero_advantage", True):
            return wanted_T
        nonzero_T = (batch["advantages"] != 0) & wanted_T
        counts_S = torch.zeros(batch.num_seqs, dtype=torch.int64, device=batch.device)
        signal_S = counts_S.index_add_(0, batch.seq_ids_T, nonzero_T.long()) > 0
        return wanted_T & signal_S[batch.seq_ids_T]


@model_function("actor_train")
def actor_train(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Train the actor on `advantages` with the objective of the config.

    Reads `prox_logprobs`, `ref_logprobs` and `keep` if the graph provides them. Two kinds of samples count neither in
    the loss nor in the normaliser: those that `keep` excludes, and those whose advantages are all zero, which have no
    gradient. The latter stay in if a KL term or an entropy bonus acts on them, or if `args.drop_zero_advantage` is
    false.

    The loop ends early once a bound (`stop_kl`, `stop_weight_variance`) is exceeded: the steps of that minibatch and of
    all later ones, in later passes too, are not taken. In the critic's warm-up steps losses are computed and no step is
    taken.
    """
    loss, engine = ActorLoss(ctx, batch), ctx.policy()
    losses: list[Tensor] = []
    stats: list[Stats] = []
    outcomes: list[StepOutcome] = []
    lr, stopped = 0.0, False
    warmup_steps = ctx.config.algorithm.critic.warmup_steps if ctx.has_role("critic") else 0
    with torch.set_grad_enabled(batch.version >= warmup_steps):
        for number in range(batch.num_minibatches):
            lr = ctx.config.learning_rate(batch.version, number / batch.num_minibatches, first=warmup_steps)
            if loss.normalisers[number] == 0.0:  # no sample of any rank has a signal: nothing to step on
                losses.append(torch.zeros((), device=batch.device))
                continue
            loss.select(number)
            share, parts = engine.compute_gradients(
                batch,
                loss.wanted_T,
                batch.minibatches[number],
                partial(loss.share, number=number),
                entropy=loss.entropy,
                distributions=loss.exact_kl,
            )
            losses.append(share)
            stats += parts
            if torch.is_grad_enabled():
                if stopped := _must_stop(ctx, [loss.no_stats(), *parts]):
                    break
                outcomes.append(engine.step(lr))
    if ctx.config.algorithm.reference.mode == ReferenceMode.ema and "ref" in ctx.engines:
        ctx.policy("ref").average_towards(engine, ctx.config.algorithm.reference.ema_decay)
    generated = count_stat(batch["loss_mask"].sum())
    own = {"tokens/trained": generated, "samples/total": count_stat(torch.tensor(batch.num_seqs, device=batch.device))}
    reduced = ctx.reduce(merge_stats([loss.no_stats(), own, *stats]))
    totals: list[float] = ctx.ranks.all_reduce_sum(torch.stack(losses).double()).tolist()
    if "kl/reference" in reduced:
        ctx.state.kl.update(reduced["kl/reference"], int(reduced["samples/total"]))
    variance = weight_variance(reduced["ppo/behave_ratio_mean"], reduced["ppo/behave_ratio_square_mean"])
    return {
        **reduced,
        "ppo/effective_share": 1.0 / (1.0 + variance),
        "loss": sum(totals) / len(totals),
        "ppo/loss_per_minibatch": totals,
        "ppo/minibatches_skipped": float(batch.num_minibatches - len(losses) + stopped),
        "grad_norm": sum(outcome.grad_norm for outcome in outcomes) / max(1, len(outcomes)),
        "grad_norm/max": max((outcome.grad_norm for outcome in outcomes), default=0.0),
        "optimizer/steps": float(sum(outcome.applied for outcome in outcomes)),
        "optimizer/not_finite": float(sum(not outcome.applied for outcome in outcomes)),
        "lr": lr,
        "kl/coef": ctx.state.kl.coef,
    }


def _must_stop(ctx: CallContext, stats: Sequence[Stats]) -> bool:
    """True if a bound is exceeded, by the statistics of all ranks, so that all ranks decide alike."""
    algorithm = ctx.config.algorithm
    if not algorithm.stop_kl and not algorithm.stop_weight_variance:
        return False
    bounds = {"max_kl": algorithm.stop_kl, "max_weight_variance": algorithm.stop_weight_variance}
    return should_stop(ctx.reduce(merge_stats(stats)), **bounds) is not None

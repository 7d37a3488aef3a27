"""The actor's train step: one optimizer step per minibatch, in each pass over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.sums import Stat, Stats, count_stat, merge_stats
from asyncrl.algorithms.inputs import PolicyLossInputs, SelectionInputs, SelectionOutput
from asyncrl.algorithms.objective import should_stop, weight_variance
from asyncrl.algorithms.spec import WHOLE_DISTRIBUTIONS
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs, StepOutcome
from asyncrl.trainer.functions.calls import CallContext, StatValues, model_function
from asyncrl.trainer.functions.minibatches import global_normalisers
from asyncrl.trainer.model.chunked_logprobs import EntropyMode
from asyncrl.trainer.settings import ReferenceMode

PROX, REF, KEEP = "prox_logprobs", "ref_logprobs", "keep"
COMPUTED_RATIO = "tokens/computed_ratio"
"""Tokens computed for each input token of the samples: below 1 where prefixes are shared, above it by padding."""


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
    loss = _Loss(ctx, batch)
    progress = _Progress()
    warmup_steps = ctx.config.algorithm.critic.warmup_steps if ctx.has_role("critic") else 0
    with torch.set_grad_enabled(batch.version >= warmup_steps):
        _run_minibatches(ctx, batch, loss, progress)
    if ctx.config.algorithm.reference.mode == ReferenceMode.ema and "ref" in ctx.engines:
        ctx.policy("ref").average_towards(ctx.policy(), ctx.config.algorithm.reference.ema_decay)
    return _report(ctx, batch, loss, progress)


@dataclass
class _Progress:
    """Results of the minibatch loop so far."""

    losses: list[Tensor] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    stopped: str | None = None


def _run_minibatches(ctx: CallContext, batch: StepBatch, loss: _Loss, progress: _Progress) -> None:
    engine = ctx.policy()
    for number in range(batch.num_minibatches):
        if loss.normalisers[number] == 0.0:  # no sample of any rank has a signal: nothing to step on
            progress.losses.append(torch.zeros((), device=batch.device))
            continue
        loss.select(number)
        share, stats = engine.compute_gradients(
            batch,
            loss.wanted_T,
            batch.minibatch(number),
            partial(loss.share, number=number),
            entropy=loss.entropy,
            distributions=loss.exact_kl,
        )
        progress.losses.append(share)
        progress.stats += stats
        if torch.is_grad_enabled():
            progress.stopped = _reason_to_stop(ctx, [loss.no_stats(), *stats])
            if progress.stopped:
                return
            progress.outcomes.append(engine.step())


def _reason_to_stop(ctx: CallContext, stats: Sequence[Stats]) -> str | None:
    """Return why the loop must stop, or None. Based on statistics of all ranks, so that all ranks decide alike."""
    algorithm = ctx.config.algorithm
    if not algorithm.stop_kl and not algorithm.stop_weight_variance:
        return None
    reduced = ctx.reduce(merge_stats(stats))
    return should_stop(reduced, max_kl=algorithm.stop_kl, max_weight_variance=algorithm.stop_weight_variance)


class _Loss:
    """The objective on this step's batch, with its loss tokens, denominators and the policies it compares."""

    def __init__(self, ctx: CallContext, batch: StepBatch) -> None:
        self._ctx, self._batch = ctx, batch
        self._objective = ctx.state.objective
        kl = self._objective.spec.kl
        self.exact_kl = kl is not None and kl.name in WHOLE_DISTRIBUTIONS
        bonus = self._objective.spec.entropy_coef != 0.0
        self.entropy = EntropyMode.differentiable if bonus else EntropyMode.constant
        self.wanted_T = self._signal()
        self.normalisers = global_normalisers(ctx, batch, self.wanted_T, self._objective.normaliser)
        self._first = next((number for number, total in enumerate(self.normalisers) if total > 0.0), 0)
        # The reference first: so it is done before the actor comes to its device, where idle roles are off-loaded.
        self._ref_T = batch[REF] if self._objective.needs_reference and not self.exact_kl else None
        self._prox_T = self._proximal()
        self._keep_T: Tensor | None = None
        self._penalty_T: Tensor | None = None

    def select(self, number: int) -> None:
        """Choose among all tokens of minibatch `number`. Every rank calls it, before its first forward pass."""
        if not self._objective.selects:
            return
        batch, ranks = self._batch, self._ctx.ranks
        chosen_T = self.wanted_T & (batch["minibatches"][batch.seq_ids_T] == number).any(-1)
        behave_T = batch["behave_logprobs"]
        start_T = behave_T if self._prox_T is None else self._prox_T
        output = self._objective.selection(
            SelectionInputs(
                start_logprobs_T=start_T[chosen_T],
                behave_logprobs_T=behave_T[chosen_T],
                advantages_T=batch["advantages"][chosen_T],
                gather=None if ranks.world == 1 else partial(_of_all_ranks, ranks),
            )
        )
        self._keep_T = torch.ones_like(self.wanted_T)
        self._keep_T[chosen_T] = output.keep_T
        if output.penalty_T is not None:
            self._penalty_T = torch.zeros_like(behave_T)
            self._penalty_T[chosen_T] = output.penalty_T.to(behave_T.dtype)

    def _selected(self, targets_N: Tensor) -> SelectionOutput | None:
        if self._keep_T is None:
            return None
        return SelectionOutput(self._keep_T[targets_N], None if self._penalty_T is None else self._penalty_T[targets_N])

    def share(self, micro_batch: MicroBatch, outputs: PolicyOutputs, *, number: int) -> tuple[Tensor, Stats]:
        """Loss share and statistics of a micro-batch of minibatch `number`."""
        if outputs.distributions_NV is None:
            inputs = self._inputs(micro_batch, outputs.logprobs_N, outputs.entropy_N, number)
            ref_N = None if self._ref_T is None else self._ref_T[micro_batch.targets_N]
            share, stats = self._objective(inputs, ref_N, self.normalisers[number], kl_coef=self._ctx.state.kl.coef)
        else:
            share, stats = self._share_with_distributions(
                micro_batch, outputs.logprobs_N, outputs.distributions_NV, number
            )
        computed, whole = micro_batch.model_inputs["input_ids"].numel(), len(micro_batch.sources_I)
        return share, {**stats, COMPUTED_RATIO: self._ratio(computed, whole)}

    def _ratio(self, computed: int, whole: int) -> Stat:
        device = self._batch.device
        return Stat(torch.full((), float(computed), device=device), torch.full((), float(whole), device=device))

    def no_stats(self) -> Stats:
        """Statistics of no tokens: every key, so that a rank without loss tokens has the same keys as the others."""
        device = self._batch.device
        none_N = torch.zeros(0, device=device)
        ids_N = torch.zeros(0, dtype=torch.int64, device=device)
        vocabulary_NV = torch.zeros(0, 1, device=device) if self.exact_kl else None
        inputs = PolicyLossInputs(
            *(none_N, none_N, none_N, none_N, ids_N.bool(), ids_N, 0, ids_N, self._batch.version, none_N),
            columns=self._batch.own_by_token(ids_N),
            selection=SelectionOutput(ids_N.bool()) if self._objective.selects else None,
        )
        with torch.no_grad():
            stats = self._objective(
                inputs, none_N, 0.0, kl_coef=0.0, log_probs_TV=vocabulary_NV, ref_log_probs_TV=vocabulary_NV
            )[1]
        return {**stats, COMPUTED_RATIO: self._ratio(0, 0)}

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
        return PolicyLossInputs(
            logprobs_T=logprobs_N,
            prox_logprobs_T=self._proximal_of(micro_batch, logprobs_N, number),
            behave_logprobs_T=batch["behave_logprobs"][targets_N],
            advantages_T=batch["advantages"][targets_N],
            mask_T=torch.ones_like(targets_N, dtype=torch.bool),
            seq_ids_T=micro_batch.seq_ids_N,
            num_seqs=micro_batch.num_seqs,
            versions_T=batch["versions"][targets_N],
            current_version=batch.version,
            entropy_T=entropy_N,
            columns=batch.own_by_token(targets_N),
            selection=self._selected(targets_N),
        )

    def _proximal_of(self, micro_batch: MicroBatch, logprobs_N: Tensor, number: int) -> Tensor | None:
        if self._prox_T is None:
            return None
        if self._prox_deferred and number == self._first:
            return logprobs_N.detach()  # no step has been taken yet: this is the proximal policy
        return self._prox_T[micro_batch.targets_N]

    def _proximal(self) -> Tensor | None:
        """Return proximal log-probabilities [T]; deferred ones are computed for the later minibatches only."""
        self._prox_deferred = False
        batch = self._batch
        if not self._objective.needs_prox and PROX not in self._ctx.reads:
            return None
        compute = batch.deferred(PROX)
        if compute is None:
            return batch[PROX]
        self._prox_deferred = True
        if self._objective.selects:  # it needs those of the first minibatch too
            return batch[PROX]
        later_T = (batch["minibatches"] != self._first).any(-1)[batch.seq_ids_T]
        return compute(self.wanted_T & later_T)

    def _signal(self) -> Tensor:
        """The tokens that carry loss, bool [T]."""
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


def _of_all_ranks(ranks: Ranks, values_T: Tensor) -> Tensor:
    """`values_T`, in fp64, of all ranks, one after the other."""
    told = ranks.all_gather_bytes(values_T.double().cpu().numpy().tobytes())
    return torch.from_numpy(np.concatenate([np.frombuffer(each, np.float64) for each in told])).to(values_T.device)


def _report(ctx: CallContext, batch: StepBatch, loss: _Loss, progress: _Progress) -> StatValues:
    """Reduce the loop's statistics over ranks and update the KL coefficient, once per step."""
    generated = count_stat(batch["loss_mask"].sum())
    own = {"tokens/trained": generated, "samples/total": count_stat(torch.tensor(batch.num_seqs, device=batch.device))}
    reduced = ctx.reduce(merge_stats([loss.no_stats(), own, *progress.stats]))
    missing = batch.num_minibatches - len(progress.losses)
    losses: list[float] = ctx.ranks.all_reduce_sum(torch.stack(progress.losses).double()).tolist()
    outcomes = progress.outcomes
    if "kl/reference" in reduced:
        ctx.state.kl.update(reduced["kl/reference"], int(reduced["samples/total"]))
    variance = weight_variance(reduced["ppo/behave_ratio_mean"], reduced["ppo/behave_ratio_square_mean"])
    return {
        **reduced,
        "ppo/effective_share": 1.0 / (1.0 + variance),
        "loss": sum(losses) / len(losses),
        "ppo/loss_per_minibatch": losses,
        "ppo/minibatches_skipped": float(missing if progress.stopped is None else missing + 1),
        "grad_norm": sum(outcome.grad_norm for outcome in outcomes) / max(1, len(outcomes)),
        "grad_norm/max": max((outcome.grad_norm for outcome in outcomes), default=0.0),
        "optimizer/steps": float(sum(outcome.applied for outcome in outcomes)),
        "optimizer/not_finite": float(sum(not outcome.applied for outcome in outcomes)),
        "lr": outcomes[-1].lr if outcomes else ctx.policy().lr,
        "kl/coef": ctx.state.kl.coef,
    }

"""Forward and backward passes of one role over a step's batch, in micro-batches.

A loss is a function of one micro-batch that returns its *share* of the whole batch's loss (already divided by the
global normaliser). Gradients are therefore summed over micro-batches and ranks and are exact, however the batch was
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.algorithms.stats import Stats
from asyncrl.trainer.micro_batch import MicroBatch, micro_batches, wanted_lengths
from asyncrl.trainer.models import AttentionKind, Critic
from asyncrl.trainer.optimizer import FlatAdamW
from asyncrl.trainer.scoring import EntropyMode, logits_function, token_logprobs
from asyncrl.trainer.step_batch import StepBatch

LossShare = Callable[[MicroBatch], tuple[Tensor, Stats]]
"""A micro-batch's share of the loss (0-d, differentiable) and its statistics."""


class Engine:
    """What actor, reference, reward model and critic share: a trunk, its layout, its optimizer where it is trained.

    Args:
        tokens_per_micro_batch: budget of one forward and backward pass.
        optimizer: None for a frozen role.
    """

    def __init__(
        self,
        module: nn.Module,
        trunk: nn.Module,
        *,
        attention: AttentionKind,
        tokens_per_micro_batch: int,
        optimizer: FlatAdamW | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self._trunk = trunk
        self._attention = attention
        self._budget = tokens_per_micro_batch
        if optimizer is None:
            module.requires_grad_(False)

    @property
    def required_optimizer(self) -> FlatAdamW:
        """The optimizer.

        Raises:
            RuntimeError: the role is frozen.
        """
        if self.optimizer is None:
            raise RuntimeError("this role is frozen: only actor and critic are trained")
        return self.optimizer

    def micro_batches(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int] | None = None
    ) -> Iterator[MicroBatch]:
        """The micro-batches that score the tokens of `wanted_T` (bool) in the samples `seqs` (all by default)."""
        wanted = wanted_T.cpu().numpy()
        lengths = wanted_lengths(wanted, batch.starts_S, batch.lengths_S)
        return self._cut(batch, wanted, lengths, range(batch.num_seqs) if seqs is None else seqs)

    def whole_sequences(self, batch: StepBatch) -> Iterator[MicroBatch]:
        """Micro-batches of all samples to their last token."""
        return self._cut(batch, np.zeros(batch.num_tokens, dtype=np.bool_), batch.lengths_S, range(batch.num_seqs))

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """The trunk's output at every input token, shape [rows * width, H]."""
        output: Tensor = self._trunk(use_cache=False, **micro_batch.model_inputs).last_hidden_state
        return output.flatten(0, 1)

    def accumulate(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int], share_of: LossShare
    ) -> tuple[Tensor, list[Stats]]:
        """Add the gradients of the loss over the samples `seqs`; returns this rank's loss (0-d) and its statistics.

        Where gradients are switched off, only the loss and the statistics are computed.
        """
        total = torch.zeros((), device=batch.device)
        stats: list[Stats] = []
        for micro_batch in self.micro_batches(batch, wanted_T, seqs):
            share, micro_stats = share_of(micro_batch)
            if torch.is_grad_enabled():
                torch.autograd.backward(share)
            total += share.detach()
            stats.append(micro_stats)
        return total, stats

    def _cut(
        self, batch: StepBatch, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], seqs: Sequence[int]
    ) -> Iterator[MicroBatch]:
        return micro_batches(
            batch["tokens"], wanted, batch.starts_S, lengths, seqs, budget=self._budget, kind=self._attention
        )


class PolicyEngine(Engine):
    """A causal language model: log-probabilities and entropies of tokens at the sampling temperature."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, **engine: Any) -> None:
        super().__init__(model, model.base_model, **engine)
        self.model = model
        self._temperature = temperature
        self._logits_of = logits_function(model)
        self._prove_logits()

    def score(self, micro_batch: MicroBatch, entropy: EntropyMode = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of the micro-batch's wanted tokens, [N]."""
        hidden_NH = self.hidden(micro_batch).index_select(0, micro_batch.predictors_N)
        return token_logprobs(
            hidden_NH, micro_batch.tokens_N, self._logits_of, temperature=self._temperature, entropy=entropy
        )

    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities of the whole vocabulary before each wanted token, [N, V]; for the exact KL divergence."""
        hidden_NH = self.hidden(micro_batch).index_select(0, micro_batch.predictors_N)
        return torch.log_softmax(self._logits_of(hidden_NH).float() / self._temperature, dim=-1)

    @torch.no_grad()
    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        """Log-probabilities [T] of the tokens of `wanted_T` (bool), 0 elsewhere. No gradient."""
        logprobs_T = torch.zeros(batch.num_tokens, device=batch.device)
        for micro_batch in self.micro_batches(batch, wanted_T):
            logprobs_T[micro_batch.targets_N] = self.score(micro_batch)[0]
        return logprobs_T

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids` at temperature 1, whatever the engine's own; the first token's is 0."""
        wanted = np.arange(len(token_ids)) > 0
        scored = self._one_sequence(torch.tensor(token_ids, device=self.model.device), wanted, len(token_ids) - 1)
        hidden_NH = self.hidden(scored).index_select(0, scored.predictors_N)
        logprobs_N, _ = token_logprobs(hidden_NH, scored.tokens_N, self._logits_of)
        return [0.0, *(float(value) for value in logprobs_N)]

    @torch.no_grad()
    def _prove_logits(self) -> None:
        """Compare logits on a few tokens with the model's own.

        Raises:
            NotImplementedError: the model does more to its logits than `logits_function` knows.
        """
        tokens_T = torch.arange(4, device=self.model.device)
        probe = self._one_sequence(tokens_T, np.zeros(4, dtype=np.bool_), 4)
        expected = self.model(use_cache=False, **probe.model_inputs).logits.flatten(0, 1)
        if not torch.allclose(self._logits_of(self.hidden(probe)).float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise NotImplementedError(
                f"{type(self.model).__name__} makes its logits in a way that asyncrl does not know; it trains models "
                "whose logits are the output embedding of the last hidden state, soft-capped or not"
            )

    def _one_sequence(self, tokens_T: Tensor, wanted_T: NDArray[np.bool_], input_tokens: int) -> MicroBatch:
        starts_S, lengths_S = np.zeros(1, dtype=np.int64), np.array([input_tokens])
        (whole,) = micro_batches(
            tokens_T, wanted_T, starts_S, lengths_S, [0], budget=input_tokens, kind=self._attention
        )
        return whole


class ValueEngine(Engine):
    """A trunk with a scalar head: critic or reward model."""

    def __init__(self, critic: Critic, **engine: Any) -> None:
        super().__init__(critic, critic.trunk, **engine)
        self.critic = critic

    def score(self, micro_batch: MicroBatch) -> Tensor:
        """The value of the prefix before each wanted token, [N]."""
        return self.critic.values(self.hidden(micro_batch).index_select(0, micro_batch.predictors_N))

    @torch.no_grad()
    def outputs(self, batch: StepBatch) -> Tensor:
        """The head's output after each token, [T]. No gradient."""
        outputs_T = torch.zeros(batch.num_tokens, device=batch.device)
        for micro_batch in self.whole_sequences(batch):
            hidden_IH = self.hidden(micro_batch).index_select(0, micro_batch.places_I)
            outputs_T[micro_batch.sources_I] = self.critic.values(hidden_IH)
        return outputs_T

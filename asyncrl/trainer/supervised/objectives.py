"""Objectives of supervised training: the gradients of a batch's loss, by the engines of RL training.

With N data-parallel ranks, a rank takes every N-th row of a batch. Losses are divided by the size of the whole batch,
so gradients and losses add up over ranks and micro-batches.

An engine may put a pair's two answers into different micro-batches. So a loss on judged answers takes two passes. The
first computes the score of each answer, without gradients. The loss depends only on these numbers, so autograd gives
its derivative with respect to each. The second pass adds up the engine's gradients of the scores, each times its
derivative, which are the gradients of the loss for any cut. The second forward pass costs a third more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, segment_sum
from asyncrl.algorithms.preference_losses import AnswerPairs, LabelledAnswers, ScoredPairs
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.config.setting import Dtype
from asyncrl.data.demonstrations import Demonstration, JudgedAnswer
from asyncrl.models.model_config import placeholder_in
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, PolicyOutputs, TrainingEngine, ValueEngine, engine_loader
from asyncrl.trainer.model.lora import LoraReference
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import LearningRateSchedule, LoraPublish, OptimizerConfig, OptimizerName
from asyncrl.trainer.supervised.checks import PAIR_LOSS, REWARD_LOSS, loss_kind
from asyncrl.trainer.supervised.settings import SFTConfig


class Measures(NamedTuple):
    """Means over a batch, before a step on it.

    Attributes:
        loss: in nats per answer token of demonstrations, else per pair or labelled answer.
        accuracy: share of the pairs whose chosen answer scores higher; None without pairs.
        margin: difference of the mean scores of chosen and rejected answers; None without judged answers of both kinds.
            Scores are a reward model's, or log-ratios to the start model in nats.
    """

    loss: float
    accuracy: float | None = None
    margin: float | None = None


class Imitation:
    """Cross entropy of the tokens that carry loss. All ranks call the methods together, with the same batch."""

    def __init__(self, engine: PolicyEngine, position: RankPosition, device: torch.device) -> None:
        self.engine, self._position, self._device = engine, position, device

    def compute_gradients(self, batch: Sequence[Demonstration]) -> Measures:
        """Compute the gradients of the loss, which replace earlier ones. Return the figures of `batch`."""
        answer_tokens = sum(item.answer_length for item in batch)

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
            return -outputs.logprobs_N.sum() / answer_tokens, {}

        mine = self._mine(batch)
        loss, _ = self.engine.compute_gradients(mine, mine["loss_mask"], range(mine.num_seqs), share)
        return Measures(self._position.data.all_reduce_sum(loss.double()).item())

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """Return the figures of `batch` without computing gradients."""
        mine = self._mine(batch)
        total = -self.engine.logprobs(mine, mine["loss_mask"]).double().sum()
        return Measures(self._position.data.all_reduce_sum(total).item() / sum(item.answer_length for item in batch))

    def _mine(self, batch: Sequence[Demonstration]) -> StepBatch:
        data = self._position.data
        return step_batch(batch[data.rank :: data.world], self._device)


class JudgedObjective(ABC):
    """Base of the losses on judged answers, which differ in `_scores` and `_losses`.

    Args:
        loss: the losses of pairs or of labelled answers.
    """

    engine: TrainingEngine
    """The engine of the model that is trained."""
    _width: ClassVar[int] = 2
    """Number of answers per loss: 2 for a pair, 1 for a labelled answer."""

    def __init__(self, loss: Callable[[Any], Tensor], position: RankPosition, device: torch.device) -> None:
        self._loss, self._position, self._device = loss, position, device
        self._losses([], self._tensor([]))  # refuses wrong parameters before the first step

    def compute_gradients(self, batch: Sequence[Demonstration]) -> Measures:
        """See `Imitation`."""
        judged = cast(Sequence[JudgedAnswer], batch)
        own = self._own(judged)
        scores_S = self._scores(own, judged).requires_grad_()
        measures, loss = self._measured(own, scores_S, judged)
        (derivatives_S,) = torch.autograd.grad(loss, scores_S)
        self._backpropagate(own, derivatives_S.float())
        return measures

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """See `Imitation`."""
        judged = cast(Sequence[JudgedAnswer], batch)
        own = self._own(judged)
        return self._measured(own, self._scores(own, judged), judged)[0]

    @abstractmethod
    def _scores(self, own: Sequence[JudgedAnswer], batch: Sequence[JudgedAnswer]) -> Tensor:
        """Return scores [S] of this rank's answers, in fp64, without gradients."""

    @abstractmethod
    def _losses(self, own: Sequence[JudgedAnswer], scores_S: Tensor) -> Tensor:
        """Return losses of this rank's pairs or answers, differentiable by `scores_S`."""

    @abstractmethod
    def _backpropagate(self, own: Sequence[JudgedAnswer], derivatives_S: Tensor) -> None:
        """Compute the gradients of the scores, each times its derivative."""

    def _own(self, batch: Sequence[JudgedAnswer]) -> list[JudgedAnswer]:
        """Return this rank's part of `batch`; pairs stay together."""
        data, width = self._position.data, self._width
        return [item for index, item in enumerate(batch) if index // width % data.world == data.rank]

    def _measured(
        self, own: Sequence[JudgedAnswer], scores_S: Tensor, batch: Sequence[JudgedAnswer]
    ) -> tuple[Measures, Tensor]:
        """Return the figures of the whole batch, and this rank's share of the loss."""
        number = len(batch) // self._width
        loss = self._losses(own, scores_S).sum() / number
        found_S, preferred_S = scores_S.detach(), self._tensor([item.preferred for item in own], torch.bool)
        right = (found_S[0::2] > found_S[1::2]).sum() if self._width == 2 else found_S.new_zeros(())
        sums = [loss.detach(), right, found_S[preferred_S].sum(), found_S[~preferred_S].sum()]
        total, right, chosen, rejected = self._position.data.all_reduce_sum(
            torch.stack([s.double() for s in sums])
        ).tolist()
        liked = sum(item.preferred for item in batch)
        margin = chosen / liked - rejected / (len(batch) - liked) if 0 < liked < len(batch) else None
        return Measures(total, right / number if self._width == 2 else None, margin), loss

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


class RewardModelling(JudgedObjective):
    """A loss on a reward model's scores of pairs. An answer's score is the head's output at its last token."""

    def __init__(
        self, engine: ValueEngine, loss: Callable[[ScoredPairs], Tensor], position: RankPosition, device: torch.device
    ) -> None:
        super().__init__(loss, position, device)
        self.engine: ValueEngine = engine

    def _scores(self, own: Sequence[JudgedAnswer], batch: Sequence[JudgedAnswer]) -> Tensor:
        columns = step_batch(own, self._device)
        ends_S = torch.from_numpy(columns.starts_S + columns.lengths_S - 1).to(self._device)
        return self.engine.outputs(columns)[ends_S].double()

    def _losses(self, own: Sequence[JudgedAnswer], scores_S: Tensor) -> Tensor:
        margins_P = self._tensor([item.margin for item in own[0::2]])
        return self._loss(ScoredPairs(scores_S[0::2], scores_S[1::2], margins_P))

    def _backpropagate(self, own: Sequence[JudgedAnswer], derivatives_S: Tensor) -> None:
        # The engine gives the values of the prefixes before wanted tokens: a token after the last one is wanted.
        longer = [
            replace(item, token_ids=[*item.token_ids, 0], loss_mask=[False] * len(item.token_ids) + [True])
            for item in own
        ]
        columns = step_batch(longer, self._device)

        def share(micro_batch: MicroBatch, values_N: Tensor) -> tuple[Tensor, Stats]:
            return (values_N * _of_tokens(derivatives_S, columns, micro_batch)).sum(), {}

        self.engine.compute_gradients(columns, columns["loss_mask"], range(columns.num_seqs), share)


class PolicyPreference(JudgedObjective):
    """A loss on the log-ratios of answers: of the policy to `reference`, the frozen start model."""

    def __init__(
        self,
        engine: PolicyEngine,
        reference: PolicyEngine,
        loss: Callable[[Any], Tensor],
        position: RankPosition,
        device: torch.device,
    ) -> None:
        super().__init__(loss, position, device)
        self.engine: PolicyEngine = engine
        self._reference = reference

    def _scores(self, own: Sequence[JudgedAnswer], batch: Sequence[JudgedAnswer]) -> Tensor:
        columns = step_batch(own, self._device)
        policy_T, reference_T = (
            engine.logprobs(columns, columns["loss_mask"]).double() for engine in (self.engine, self._reference)
        )
        return segment_sum(policy_T - reference_T, columns.seq_ids_T, columns.num_seqs)

    def _backpropagate(self, own: Sequence[JudgedAnswer], derivatives_S: Tensor) -> None:
        columns = step_batch(own, self._device)

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
            return (outputs.logprobs_N * _of_tokens(derivatives_S, columns, micro_batch)).sum(), {}

        self.engine.compute_gradients(columns, columns["loss_mask"], range(columns.num_seqs), share)


class PairPreference(PolicyPreference):
    """A loss on the log-ratios of pairs."""

    def _losses(self, own: Sequence[JudgedAnswer], scores_S: Tensor) -> Tensor:
        lengths_S = self._tensor([item.answer_length for item in own])
        return self._loss(AnswerPairs(scores_S[0::2], scores_S[1::2], lengths_S[0::2], lengths_S[1::2]))


class LabelPreference(PolicyPreference):
    """A loss on the log-ratios of labelled answers.

    The divergence from the start model is estimated as TRL does it: by the mean log-ratio of answers that belong to
    other prompts, each prompt of the batch with the answer of the next.
    """

    _width = 1
    _kl: Tensor | None = None

    def _scores(self, own: Sequence[JudgedAnswer], batch: Sequence[JudgedAnswer]) -> Tensor:
        others = [with_answer_of(item, batch[(index + 1) % len(batch)]) for index, item in enumerate(batch)]
        total = super()._scores(self._own(others), batch).sum()
        self._kl = (self._position.data.all_reduce_sum(total) / len(batch)).clamp(min=0.0)
        return super()._scores(own, batch)

    def _losses(self, own: Sequence[JudgedAnswer], scores_S: Tensor) -> Tensor:
        desirable_S = self._tensor([item.preferred for item in own], torch.bool)
        kl = scores_S.new_zeros(()) if self._kl is None else self._kl
        return self._loss(LabelledAnswers(scores_S, desirable_S, kl))


def with_answer_of(item: JudgedAnswer, other: JudgedAnswer) -> JudgedAnswer:
    """Return the prompt of `item` with the answer of `other`."""
    prompt, answer = item.loss_mask.index(True), other.loss_mask.index(True)
    return replace(
        item,
        token_ids=item.token_ids[:prompt] + other.token_ids[answer:],
        loss_mask=item.loss_mask[:prompt] + other.loss_mask[answer:],
    )


def step_batch(own: Sequence[Demonstration], device: torch.device) -> StepBatch:
    """Return the sequences `own` as input of the engines."""
    columns = {
        "tokens": torch.tensor([token for item in own for token in item.token_ids], dtype=torch.int64),
        "loss_mask": torch.tensor([learnt for item in own for learnt in item.loss_mask], dtype=torch.bool),
        "lengths": torch.tensor([len(item.token_ids) for item in own], dtype=torch.int64),
        "rollouts": torch.arange(len(own)),
        "minibatches": torch.zeros(len(own), 1, dtype=torch.int64),
    }
    columns = {name: column.to(device) for name, column in columns.items()}
    pictures = [item.pictures for item in own] if any(item.pictures for item in own) else ()
    names = [str(n) for n in range(len(own))]
    return StepBatch(columns, version=0, num_minibatches=1, rollout_ids=names, pictures=pictures)


def _of_tokens(values_S: Tensor, batch: StepBatch, micro_batch: MicroBatch) -> Tensor:
    """Return for each wanted token the value of its sequence, [N], from `values_S` of the sequences of `batch`."""
    return values_S[batch.seq_ids_T[micro_batch.targets_N]]


MUON_DECAY = 0.01
"""Weight decay of the matrices of a model that Muon trains from scratch."""


def make_objective(
    config: SFTConfig, settings: ExperimentConfig, position: RankPosition, device: torch.device
) -> Imitation | JudgedObjective:
    """Return the objective of `loss`, with the engine of the model in `model.path` of `settings`.

    Raises:
        ValueError: the model cannot be trained correctly, or a parameter of the loss is wrong.
    """
    path, optimizer = str(settings.model.path), settings.optimizer
    loader = engine_loader(engine_of(settings))(settings, position, device)
    kind = loss_kind(config.loss)
    if kind is None:
        return Imitation(loader.policy(path, Dtype.float32, optimizer), position, device)
    loss = resolve(kind, config.loss.name, config.loss.params)
    if kind == REWARD_LOSS:
        return RewardModelling(loader.reward_model(path, optimizer), loss, position, device)
    engine = loader.policy(path, Dtype.float32, optimizer)
    reference = LoraReference(engine) if config.model.lora.rank else loader.policy(path, Dtype.float32, None)
    objective = PairPreference if kind == PAIR_LOSS else LabelPreference
    return objective(engine, reference, loss, position, device)


def engine_settings(config: SFTConfig, model: Path, total: int) -> ExperimentConfig:
    """Translate `config` into the settings of an RL experiment, which the engines read."""
    translated = ExperimentConfig(seed=config.seed, total_train_steps=total)
    publish = LoraPublish.adapter if placeholder_in(model) is None else LoraPublish.merged
    translated.model.path, translated.model.lora = str(model), replace(config.model.lora, publish=publish)
    translated.model.vision, translated.model.dtype = config.model.vision, Dtype.float32
    translated.trainer.parallel, translated.trainer.device = config.trainer.parallel, config.device
    translated.trainer.gradient_checkpointing = config.trainer.gradient_checkpointing
    translated.trainer.tokens_per_micro_batch = config.tokens_per_micro_batch
    translated.trainer.share_prefixes, translated.trainer.ppo_minibatches, translated.trainer.ppo_epochs = False, 1, 1
    translated.trainer.threads = config.threads
    translated.generation.context_length = config.dataset.max_tokens
    by_muon = config.optimizer == OptimizerName.muon
    translated.optimizer = OptimizerConfig(
        name=config.optimizer,
        lr=config.adamw_lr,
        muon_lr=config.lr if by_muon else None,
        weight_decay=MUON_DECAY if by_muon else 0.0,
        decay_embeddings=not by_muon,
        max_grad_norm=config.max_grad_norm,
        schedule=LearningRateSchedule.cosine,
        min_lr_share=config.min_lr_share,
        warmup_steps=config.warmup_steps,
    )
    return translated

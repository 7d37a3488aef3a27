"""Interface of a role's model for model functions, checkpoints and publishing, independent of its layout over ranks.

    EngineLoader     model folder ──▶ engine, trained where it is given an optimizer, else frozen
    PolicyEngine     log-probabilities (forward only), gradients of a loss on them, whole tensors to publish
    ValueEngine      values (forward only), gradients of a loss on them
    both             step, state for checkpoints, by names that say nothing of how it is spread

A train step on a minibatch is `compute_gradients`, then `step`; whoever decides between the two not to take the step
just does not. Nothing outside this package sees parameters, gradients or the optimizer, so an engine is free in where
it keeps them: whole on every rank (`flat`), in slices, or in stages.

A loss is a function of one micro-batch and of the engine's outputs on it. It returns the micro-batch's *share* of the
whole minibatch's loss, already divided by the global normaliser: shares, and so gradients, add up over micro-batches
and ranks and are exact however the batch was cut. The engine calls it where the outputs are, once per micro-batch; it
must not run the model itself.

All verbs are called by all ranks together, in the same order, also by a rank that has no samples.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from asyncrl.algorithms.arithmetic.sums import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.model.scoring import EntropyMode
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import OptimizerConfig
from asyncrl.weights.versions.published import TensorSpec as TensorSpec


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`grad_norm` before clipping; `applied` is False where it was not finite and the step was left out."""

    grad_norm: float
    lr: float
    applied: bool


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOutputs:
    """Outputs for the wanted tokens of a micro-batch: log-probabilities [N] and, if asked for, entropies [N] and whole
    distributions [N, V].

    All are of the distribution at the sampling temperature, in nats.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    distributions_NV: Tensor | None = None


PolicyLoss = Callable[[MicroBatch, PolicyOutputs], tuple[Tensor, Stats]]
"""A micro-batch's share of the loss (0-d, differentiable) and its statistics."""
ValueLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Stats]]
"""The same, from the values [N] of the prefixes before its wanted tokens."""


class TrainingEngine(ABC):
    """One role's model on this rank."""

    @property
    @abstractmethod
    def trained(self) -> bool:
        """True if the role has an optimizer."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the next step.

        Raises:
            RuntimeError: the role is frozen.
        """

    @abstractmethod
    def step(self) -> StepOutcome:
        """Sum the gradients over the data-parallel ranks, clip, update, advance the schedule.

        A gradient that is not finite changes nothing.

        Raises:
            RuntimeError: the role is frozen.
        """

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state that a checkpoint stores, the same for every layout: tensors by name, and JSON that is equal
        on all ranks.

        The names are `weights.<name>` (master values, fp32), and where the role is trained `exp_avg.<name>` and
        `exp_avg_sq.<name>`; `<name>` is the parameter's in a Hugging Face folder, tied ones once, under the
        embedding's, and of a value model `trunk.<name>`, `head.weight` and `head.bias`. The JSON is `{"step": n}`, the
        optimizer steps taken, and nothing where the role is frozen.

        The tensors *are* the engine's storage: views, or DTensors of which this rank holds a part, and reading a
        checkpoint writes into them. A rank of a pipeline stage has the names of its own stage alone. A plain tensor is
        the same on all ranks that name it.
        """

    @abstractmethod
    def offload(self) -> None:
        """From now on keep the role in host memory whenever it is idle, that is outside of `resident`."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[None]:
        """Within it the role is on its device. Whatever computes, or reads or writes the tensors of `state`, is called
        within it; it may be entered again. Of a role that is not off-loaded it does nothing.
        """

    @abstractmethod
    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Take up what was written into the tensors of `state`, and `meta`, the JSON that came with them."""

    @property
    @abstractmethod
    def model_config(self) -> PretrainedConfig:
        """The model's configuration."""

    @abstractmethod
    def published_specs(self) -> list[TensorSpec]:
        """Return the specs of the tensors that servers load: all tensors of a Hugging Face folder, tied ones once, in
        the model's order.

        The same on all ranks, whatever part each holds; nothing is exchanged.

        Raises:
            RuntimeError: it is a critic, which no folder holds.
        """

    @abstractmethod
    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, each on the rank that owns it: a collective of all ranks, each of which iterates to the end.

        At most one tensor beyond what this rank holds anyway is in memory at a time. What is yielded may be the
        engine's own storage, or be used again for the next: it is valid until that is asked for.

        Args:
            owners: worker index by name, the same on all ranks. What is not named is left out on all of them.

        Yields:
            Name and tensor of what this rank owns, in the order of `published_specs`, on the engine's device.
        """


class PolicyEngine(TrainingEngine):
    """A causal language model: log-probabilities and entropies of tokens at the sampling temperature."""

    @abstractmethod
    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        """Log-probabilities [T] of the tokens of `wanted_T` (bool), 0 elsewhere. No gradient."""

    @abstractmethod
    def score_sequences(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]] = ()
    ) -> list[list[float]]:
        """Log-probabilities of the tokens of `sequences` at temperature 1, whatever the engine's own; 0 for first ones.

        They are computed in one micro-batch, as training computes them.

        Args:
            pictures: those of each sequence; none where it is empty.
        """

    @abstractmethod
    def placeholders(self, picture: Picture) -> list[int]:
        """Token ids that stand for `picture` in a prompt; none if the model is used for text alone."""

    @abstractmethod
    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities of the whole vocabulary before each wanted token, [N, V]; for the exact KL divergence. No
        gradient.
        """

    @abstractmethod
    def compute_gradients(
        self,
        batch: StepBatch,
        wanted_T: Tensor,
        seqs: Sequence[int],
        loss: PolicyLoss,
        *,
        entropy: EntropyMode = EntropyMode.none,
        distributions: bool = False,
    ) -> tuple[Tensor, list[Stats]]:
        """The gradients of the loss over the samples `seqs`, in place of those before.

        Where gradients are switched off, only the loss and the statistics are computed.

        Args:
            wanted_T: bool [T], the tokens whose outputs the loss gets.
            entropy: whether it gets entropies.
            distributions: whether it gets whole distributions; entropies are then left out.

        Returns:
            This rank's loss (0-d) and its statistics, a dictionary per micro-batch.

        Raises:
            RuntimeError: the role is frozen.
        """

    @abstractmethod
    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        """Move the weights towards those of `source`: decay * mine + (1 - decay) * its."""

    @abstractmethod
    def without_adapters(self) -> AbstractContextManager[None]:
        """Within it the model computes as the base of its adapters; nothing changes where it has none."""


class ValueEngine(TrainingEngine):
    """A trunk with a scalar head: critic or reward model."""

    @abstractmethod
    def outputs(self, batch: StepBatch, seqs: Sequence[int] | None = None) -> Tensor:
        """The head's output after each token, [T], of the samples `seqs` (default: all), 0 elsewhere. No gradient."""

    @abstractmethod
    def compute_gradients(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int], loss: ValueLoss
    ) -> tuple[Tensor, list[Stats]]:
        """As `PolicyEngine.compute_gradients`; the loss gets the values of the prefixes before the wanted tokens."""


class EngineLoader(ABC):
    """Makes engines from model folders, onto `device`, as `config` sets them, for the rank at `place`."""

    @abstractmethod
    def __init__(self, config: ExperimentConfig, place: RankPosition, device: torch.device) -> None: ...

    @abstractmethod
    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> PolicyEngine:
        """The language model in `path`; frozen without an optimizer.

        Raises:
            OSError: `path` holds no model.
        """

    @abstractmethod
    def critic(self, path: str, optimizer: OptimizerConfig) -> ValueEngine:
        """An untrained critic on the trunk in `path`."""

    @abstractmethod
    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> ValueEngine:
        """The sequence classifier with one label in `path`; frozen without an optimizer.

        To be trained, `path` may be a language model's folder: its trunk then gets a head without a bias, at 0.

        Raises:
            ValueError: it gives no single score.
        """


def engine_loader(name: str) -> type[EngineLoader]:
    """Return the loader of the engine `name` of `ENGINES`."""
    loader: type[EngineLoader] = pkgutil.resolve_name(ENGINES[name].loader)
    return loader

"""Interface of a role's model for model functions, checkpoints and publishing, independent of its layout over ranks.

    EngineLoader     model folder ──▶ engine, trained if it has an optimizer, else frozen
    PolicyEngine     log-probabilities (forward only), gradients of a loss on them, whole tensors to publish
    ValueEngine      values (forward only), gradients of a loss on them
    both             step, and state for checkpoints by names that do not depend on the layout

A train step on a minibatch is `compute_gradients`, then `step`; the caller may leave out `step`. Nothing outside this
package sees parameters, gradients or the optimizer, so an engine decides where they are: whole on every rank (`flat`),
in slices, or in stages.

A loss is a function of one micro-batch and of the engine's outputs on it. It returns the micro-batch's *share* of the
whole minibatch's loss, already divided by the global normaliser: shares, and so gradients, add up over micro-batches
and ranks and are exact however the batch was cut. The engine calls it where the outputs are, once per micro-batch; it
must not run the model itself.

All methods are called by all ranks together, in the same order, also by a rank that has no samples.
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

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.models.chunked_logprobs import EntropyMode
from asyncrl.models.host_copies import HostCopy
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerConfig
from asyncrl.weights.folder_tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`grad_norm` before clipping. `applied` is False if the norm was not finite, so that the step was left out."""

    grad_norm: float
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
"""Loss share and statistics from the values [N] of the prefixes before the micro-batch's wanted tokens."""


class TrainingEngine(ABC):
    """One role's model on this rank.

    Attributes:
        pieces: number of micro-batches that this rank has begun for the role.
    """

    pieces: int = 0

    @property
    @abstractmethod
    def trained(self) -> bool:
        """True if the role has an optimizer."""

    @property
    def flops(self) -> float | None:
        """Floating point operations in matrix products of this rank for the role so far; None: they are not counted."""
        return None

    @abstractmethod
    def step(self, lr: float) -> StepOutcome:
        """Sum the gradients over the data-parallel ranks, clip, and update with the learning rate `lr`.

        A gradient that is not finite changes nothing.

        Raises:
            RuntimeError: the role is frozen.
        """

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state that a checkpoint stores, the same for every layout: tensors by name, and JSON that is equal
        on all ranks.

        The tensors are `weights.<name>` (master values, fp32) and, if the role is trained, `exp_avg.<name>` and
        `exp_avg_sq.<name>`. `<name>` is the parameter's name in a Hugging Face folder; tied parameters are there once,
        under the embedding's name. A value model has `trunk.<name>` and `head.weight`. The JSON is
        `{"step": n}`, the optimizer steps taken; it is empty if the role is frozen.

        The tensors *are* the engine's storage: views, or DTensors of which this rank holds a part, and reading a
        checkpoint writes into them. A rank of a pipeline stage has the names of its own stage alone. A plain tensor is
        the same on all ranks that name it.
        """

    @abstractmethod
    def add_pending_copy(self, copy: HostCopy) -> None:
        """Delay changes of the tensors of `state` until `copy`, which reads them, has ended. The host does not wait."""

    @abstractmethod
    def offload(self) -> None:
        """From now on keep the role in host memory while it is idle, that is, outside of `on_device`."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[None]:
        """Keep the role on its device within this block; does nothing if the role is not off-loaded.

        Everything that computes, or that reads or writes the tensors of `state`, must be called within it. Blocks may
        be nested.
        """

    @abstractmethod
    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Continue from the values that were written into the tensors of `state`, and from `meta`, the JSON stored with
        them.
        """

    @property
    @abstractmethod
    def model_config(self) -> PretrainedConfig:
        """The model's configuration."""

    @abstractmethod
    def published_specs(self) -> list[TensorSpec]:
        """Return the specs of the tensors that servers load: all tensors of a Hugging Face folder, tied ones once, in
        the model's order.

        The result is the same on all ranks, whatever part each holds; nothing is exchanged.

        Raises:
            RuntimeError: the role is a critic, which has no model folder.
        """

    @abstractmethod
    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Gather whole tensors, each on the rank that owns it. A collective: every rank iterates to the end.

        At most one tensor beyond this rank's own is in memory at a time. A yielded tensor may be the engine's own
        storage, or a buffer that the next one reuses: it is valid until the next iteration.

        Args:
            owners: worker index by tensor name, the same on all ranks. Tensors without an owner are skipped.

        Yields:
            Name and tensor of what this rank owns, in the order of `published_specs`, on the engine's device.
        """


class PolicyEngine(TrainingEngine):
    """A causal language model: log-probabilities and entropies of tokens at the sampling temperature."""

    @abstractmethod
    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        """Return log-probabilities [T] of the tokens of `wanted_T` (bool), 0 elsewhere. No gradient."""

    @abstractmethod
    def score_sequences(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]] = ()
    ) -> list[list[float]]:
        """Return the log-probabilities of the tokens of `sequences` at temperature 1; 0 for each first token.

        They are computed in one micro-batch, as training computes them, but never at the engine's own temperature.

        Args:
            pictures: pictures of each sequence; empty if no sequence has any.
        """

    @abstractmethod
    def placeholders(self, picture: Picture) -> list[int]:
        """Return the token ids that stand for `picture` in a prompt; none if the model is used for text alone."""

    @abstractmethod
    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        """Return log-probabilities of the whole vocabulary before each wanted token, [N, V]; for the exact KL
        divergence. No gradient.
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
        """Compute the gradients of the loss over the samples `seqs`. They replace earlier gradients.

        Under `torch.no_grad` only the loss and the statistics are computed.

        Args:
            wanted_T: bool [T], the tokens whose outputs the loss gets.
            entropy: give the loss entropies.
            distributions: give the loss whole distributions, and no entropies.

        Returns:
            This rank's loss (0-d) and its statistics, a dictionary per micro-batch.

        Raises:
            RuntimeError: the role is frozen.
        """

    @abstractmethod
    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        """Move the weights towards those of `source`: w = decay * w + (1 - decay) * w_source."""

    @abstractmethod
    def without_adapters(self) -> AbstractContextManager[None]:
        """Within this block the model computes without its adapters; nothing changes if it has none."""


class ValueEngine(TrainingEngine):
    """A trunk with a scalar head: critic or reward model."""

    @abstractmethod
    def outputs(self, batch: StepBatch, seqs: Sequence[int] | None = None) -> Tensor:
        """Return the head's output after each token, [T], of the samples `seqs` (default: all), 0 elsewhere. No
        gradient.
        """

    @abstractmethod
    def compute_gradients(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int], loss: ValueLoss
    ) -> tuple[Tensor, list[Stats]]:
        """As `PolicyEngine.compute_gradients`, but the loss gets the values of the prefixes before wanted tokens."""


class EngineLoader(ABC):
    """Loads models from folders onto `device` and makes engines of them, for the rank at `position`."""

    @abstractmethod
    def __init__(self, config: ExperimentConfig, position: RankPosition, device: torch.device) -> None: ...

    @abstractmethod
    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> PolicyEngine:
        """Load the language model in `path`; frozen without an optimizer.

        Raises:
            OSError: `path` holds no model.
        """

    @abstractmethod
    def critic(self, path: str, optimizer: OptimizerConfig) -> ValueEngine:
        """Build an untrained critic on the trunk in `path`."""

    @abstractmethod
    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> ValueEngine:
        """Load the sequence classifier with one label in `path`; frozen without an optimizer.

        If it is trained, `path` may be a language model's folder: its trunk then gets a head without a bias, at 0.

        Raises:
            ValueError: the classifier has more than one label.
        """


def engine_loader(name: str) -> type[EngineLoader]:
    """Return the loader of the engine `name` of `ENGINES`."""
    loader: type[EngineLoader] = pkgutil.resolve_name(ENGINES[name].loader)
    return loader

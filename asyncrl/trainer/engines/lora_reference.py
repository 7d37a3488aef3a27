"""The reference model of adapters: their base, which needs no copy. Imported only by runs with adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from torch import Tensor
from transformers import PretrainedConfig

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.host_copies import HostCopy
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, StepOutcome
from asyncrl.weights.folder_tensors import TensorSpec


class LoraReference(PolicyEngine):
    """`actor` with its adapters off. What is not documented here is in `asyncrl.trainer.engines.base`."""

    def __init__(self, actor: PolicyEngine) -> None:
        self._actor = actor

    @property
    def trained(self) -> bool:
        return False

    @property
    def flops(self) -> float:
        return 0.0  # included in the actor's count

    @property
    def model_config(self) -> PretrainedConfig:
        return self._actor.model_config

    def step(self, lr: float) -> StepOutcome:
        self._is_frozen()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return nothing: the role's weights are those of the model folder."""
        return {}, {}

    def add_pending_copy(self, copy: HostCopy) -> None:
        """Do nothing: the role has no state."""

    def offload(self) -> None:
        """Do nothing: the role has no tensors of its own."""

    def on_device(self) -> AbstractContextManager[None]:
        return self._actor.on_device()

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing to load."""

    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        with self._actor.without_adapters():
            return self._actor.logprobs(batch, wanted_T)

    def placeholders(self, picture: Picture) -> list[int]:
        return self._actor.placeholders(picture)

    def score_sequences(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]] = ()
    ) -> list[list[float]]:
        with self._actor.without_adapters():
            return self._actor.score_sequences(sequences, pictures)

    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        with self._actor.without_adapters():
            return self._actor.distributions(micro_batch)

    def compute_gradients(self, *_: Any, **__: Any) -> tuple[Tensor, list[Stats]]:
        self._is_frozen()

    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        self._is_frozen()

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def published_specs(self) -> list[TensorSpec]:
        self._is_frozen()

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        self._is_frozen()

    def _is_frozen(self) -> NoReturn:
        raise RuntimeError("this role is frozen: it is the base of the actor's adapters")

"""Common parts of the engines: a role's optimizer, its state for checkpoints, the cut into micro-batches."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.api.picture import Picture
from asyncrl.models.host_copies import HostCopy
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.routing import Routers
from asyncrl.models.storages import own_storage
from asyncrl.models.weights.versions.published import Published, TensorSpec
from asyncrl.trainer.batches.micro_batch import MicroBatch, micro_batches, wanted_lengths
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import StepOutcome, TrainingEngine
from asyncrl.trainer.engines.host_offload import HostOffload, local
from asyncrl.trainer.engines.optimizer import EngineOptimizer
from asyncrl.trainer.engines.vision import RoleVision
from asyncrl.trainer.model.flops import FlopCount, ForwardPass
from asyncrl.trainer.model.lora import adapters_off
from asyncrl.trainer.parallel.rank_position import RankPosition

Optimizer = TypeVar("Optimizer", bound=EngineOptimizer)
_log = logging.getLogger(__name__)


class RoleEngine(TrainingEngine, Generic[Optimizer]):
    """One role's model on this rank. What is not documented here is in `asyncrl.trainer.engines.base`.

    Args:
        attention: how sequences are laid out.
        tokens_per_micro_batch: budget of one forward and backward pass.
        optimizer: None for a frozen role.
        place: position of this rank.
        routers: routers that replay the expert choices of a batch's routing; None: choices are not replayed.
        pictures: picture processing of the model; None: the model is used for text alone.
    """

    def __init__(
        self,
        *,
        attention: AttentionKind,
        tokens_per_micro_batch: int,
        optimizer: Optimizer | None,
        place: RankPosition,
        routers: Routers | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.attention = attention
        self.routers = routers
        self.vision = RoleVision(pictures, trained=optimizer is not None)
        self._budget, self._optimizer, self._place = tokens_per_micro_batch, optimizer, place
        self._offload: HostOffload | None = None
        self._reading: list[HostCopy] = []
        self._flops: FlopCount | None = None

    @property
    def pictures(self) -> Pictures | None:
        """The picture processing of the model; None if the model is used for text alone."""
        return self.vision.pictures

    def replaying(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Within this block the routers choose the experts recorded in `micro_batch`."""
        return nullcontext() if self.routers is None else self.routers.replaying(micro_batch.routing)

    @contextmanager
    def choosing_freely(self) -> Iterator[None]:
        """Within this block the routers choose by themselves, whatever a micro-batch has recorded."""
        before, self.routers = self.routers, None
        try:
            yield
        finally:
            self.routers = before

    def _count_from_now(self, trunk: PreTrainedModel) -> None:
        """Start to count this rank's operations. Called once the model is complete, as it will be trained."""
        try:
            self._flops = FlopCount(self.root, trunk)
        except Exception as error:  # a missing metric must not end a run
            _log.info("rank/mfu is not reported: %s: %s", type(error).__name__, error)
            return
        if self._flops.left_out:
            _log.info("rank/mfu does not count %s: it is a little too small", " and ".join(self._flops.left_out))

    def _count(self, micro_batch: MicroBatch) -> None:
        """Count this rank's part of a forward pass over `micro_batch`, and of its backward pass if gradients are
        recorded.
        """
        self.pieces += 1
        if self._flops is not None:
            work = ForwardPass(micro_batch.depths, len(micro_batch.targets_N))
            backward = self.trained and torch.is_grad_enabled()
            self._flops.add(work, backward=backward, share=1.0 / self._place.context.world)

    @property
    def flops(self) -> float | None:
        return None if self._flops is None else self._flops.total

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, or its parts of them, by their names in checkpoints."""

    @property
    @abstractmethod
    def root(self) -> nn.Module:
        """The module that has this rank's parameters and buffers."""

    @property
    def trained(self) -> bool:
        return self._optimizer is not None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            RuntimeError: the role is frozen.
        """
        if self._optimizer is None:
            raise RuntimeError("this role is frozen: only actor and critic are trained")
        return self._optimizer

    def step(self, lr: float) -> StepOutcome:
        self._before_changes()
        outcome = self.optimizer.step(lr)
        self.vision.weights_changed()
        return outcome

    @cached_property
    def _published(self) -> Published:
        """The model's tensors; a policy sets it."""
        raise RuntimeError("this role is a critic, which is not published: no model folder holds its head")

    def published_specs(self) -> list[TensorSpec]:
        return self._published.published_specs()

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        return self._published.gather(owners)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `TrainingEngine`; a frozen role has its weights."""
        if self._optimizer is not None:
            return self._optimizer.state()
        return {f"weights.{name}": parameter.detach() for name, parameter in self.parameters().items()}, {}

    def let_end(self, copy: HostCopy) -> None:
        """See `TrainingEngine`."""
        self._reading.append(copy)

    def _before_changes(self) -> None:
        """Called before the tensors of `state` change."""
        while self._reading:
            self._reading.pop().before_changes()

    def load_state(self, meta: Mapping[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.load_state(meta)
        self.vision.weights_changed()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See `PolicyEngine`. Routers choose by themselves, and picture rows are recomputed."""
        with adapters_off(self.root), self.choosing_freely():
            self.vision.weights_changed()
            try:
                yield
            finally:
                self.vision.weights_changed()

    def offload(self) -> None:
        own_storage(self.root)
        self._offload = HostOffload(self._offloadable_tensors, self._transient_tensors, self._leave)

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._offload is None else self._offload.on_device()

    def _offloadable_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that move to the host and back: parameters, buffers, and the optimizer's moments if they
        are on the device.
        """
        yield from map(local, self.root.parameters())
        yield from map(local, self.root.buffers())
        if self._optimizer is not None:
            yield from map(local, self._optimizer.kept())

    def _transient_tensors(self) -> Iterable[Tensor]:
        """Return device tensors whose values are not needed while the role is idle."""
        return ()

    def _leave(self) -> None:
        """Called before the role leaves the device, where its tensors lose their values."""
        self._before_changes()

    def micro_batches(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int] | None = None
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches that score the tokens of `wanted_T` (bool) in the samples `seqs` (None: all)."""
        wanted = wanted_T.cpu().numpy()
        lengths = wanted_lengths(wanted, batch.starts_S, batch.lengths_S)
        return self._cut(batch, wanted, lengths, range(batch.num_seqs) if seqs is None else seqs)

    def _whole_sequences(self, batch: StepBatch, seqs: Sequence[int] | None) -> Iterator[MicroBatch]:
        """Return micro-batches of the samples `seqs` (None: all) to their last token."""
        chosen = range(batch.num_seqs) if seqs is None else seqs
        return self._cut(batch, np.zeros(batch.num_tokens, dtype=np.bool_), batch.lengths_S, chosen)

    def _cut(
        self, batch: StepBatch, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], seqs: Sequence[int]
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches.

        All are laid out, and their copies to the device begun, before the first is yielded.
        """
        made = deque(self._laid_out(batch, wanted, lengths, seqs))
        while made:
            self._count(made[0])
            yield made.popleft()  # frees a computed micro-batch, with the masks that it made

    def _laid_out(
        self, batch: StepBatch, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], seqs: Sequence[int]
    ) -> Iterator[MicroBatch]:
        return micro_batches(
            batch["tokens"],
            wanted,
            batch.starts_S,
            lengths,
            seqs,
            budget=self._budget,
            kind=self.attention,
            prefixes=batch.prefixes if self.attention.shares_prefixes else None,
            routing=batch.routing if self.routers is not None else None,
            shown=self.vision.shown_tokens(batch),
        )

    def placeholders(self, picture: Picture) -> list[int]:
        """See `PolicyEngine`."""
        return self.vision.placeholders(picture)

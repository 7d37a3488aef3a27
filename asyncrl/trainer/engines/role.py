"""Common parts of the engines: a role's optimizer, its state for checkpoints, the cut into micro-batches, its pictures,
and its time off the device.

Off the device
--------------
A role's tensors may be on the device while the role works, and in host memory while it is idle (`HostOffload`):

    on the device   ──▶  storages filled: copied from the host
    idle            ──▶  copied to the host (pinned if the device is a GPU), storages emptied

Tensors and their views stay the same objects. Only storages are emptied and filled, as FSDP does with gathered
parameters. So the holders of a tensor (an optimizer, a flat vector's views, FSDP2) need not know. While a role is idle
its tensors have shape and type but no values, and reading them crashes.

On a CPU the host is the device: the same happens, without a benefit.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.host_copies import HostCopy, host_buffer, own_storage, storages
from asyncrl.models.pictures import Pictures, SeenPicture
from asyncrl.models.routing import Routers
from asyncrl.trainer.batches.micro_batch import MicroBatch, ShownTokens, micro_batches, wanted_lengths
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, StepOutcome, TrainingEngine
from asyncrl.trainer.engines.optimizer import EngineOptimizer, local
from asyncrl.trainer.model.flops import FlopCount, ForwardPass
from asyncrl.trainer.model.lora import adapters_off
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.weights.folder_tensors import Published, TensorSpec


class RoleVision:
    """The pictures of a role's model. Those of a batch are prepared once for all calls of its step.

    Args:
        pictures: picture processing of the model; None if the model is used for text alone.
        trained: True if the role is trained.
    """

    def __init__(self, pictures: Pictures | None, *, trained: bool) -> None:
        self.pictures = pictures
        self._shown: WeakKeyDictionary[StepBatch, ShownTokens] = WeakKeyDictionary()
        tower = () if pictures is None or not trained else pictures.tower.parameters()
        self._trains_tower = any(parameter.requires_grad for parameter in tower)

    def weights_changed(self) -> None:
        """Forget the rows of pictures that were computed with earlier weights."""
        if self.pictures is not None:
            self.pictures.tower.weights_changed()

    def seeing(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Within this block the model sees the pictures of `micro_batch`.

        If the vision tower is trained and gradients are recorded, it computes their rows with gradients. Otherwise the
        rows are computed once per version of the weights.
        """
        if self.pictures is None or micro_batch.shown is None:
            return nullcontext()
        keep = not (self._trains_tower and torch.is_grad_enabled())
        return self.pictures.holding(micro_batch.shown, keep=keep)

    def shown_tokens(self, batch: StepBatch) -> ShownTokens | None:
        """Return the tokens of `batch` with its pictures; None if it has no pictures.

        Raises:
            ValueError: the batch has pictures, and the model is used for text alone.
        """
        if not batch.pictures:
            return None
        if self.pictures is None:
            raise ValueError("the batch has pictures, and the model is used for text alone (model.vision)")
        shown = self._shown.get(batch)
        if shown is None:
            tokens = batch["tokens"].tolist()
            ends = (batch.starts_S + batch.lengths_S).tolist()
            parts = [tokens[start:end] for start, end in zip(batch.starts_S.tolist(), ends, strict=True)]
            ids, held = self.shown_ids(parts, batch.pictures)
            shown = self._shown[batch] = ShownTokens.of(self.pictures, ids, batch.device, held)
        return shown

    def shown_ids(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]]
    ) -> tuple[list[Sequence[int]], list[SeenPicture]]:
        """Return `sequences` with the ids of their pictures' rows, and the pictures, which the caller must keep
        alive.
        """
        if self.pictures is None or not pictures:
            return list(sequences), []
        made = [self.pictures.ids.shown(*each) for each in zip(sequences, pictures, strict=True)]
        return [ids for ids, _ in made], [seen for _, held in made for seen in held]

    def placeholders(self, picture: Picture) -> list[int]:
        """Return the token ids that stand for `picture` in a prompt; none if the model is used for text alone."""
        if self.pictures is None:
            return []
        return [self.pictures.ids.token_id] * self.pictures.ids.seen(picture).rows


Kept = Callable[[], Iterable[Tensor]]


class HostOffload:
    """Keeps a role on its device only within `on_device`.

    Args:
        kept: returns the tensors to bring back; called each time, because FSDP2 replaces some of them.
        scratch: returns tensors whose values are not needed while the role is idle.
        leave: called before the role leaves the device.
    """

    def __init__(self, kept: Kept, scratch: Kept, leave: Callable[[], None]) -> None:
        self._kept, self._scratch, self._leave = kept, scratch, leave
        self._hosts: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.device, int, Tensor | None]] = []
        self._users = 1  # the creator of the role
        self._release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the role on its device within this block. Blocks may be nested."""
        self._enter()
        try:
            yield
        finally:
            self._release()

    def _enter(self) -> None:
        self._users += 1
        if self._users > 1:
            return
        away, self._away = self._away, []
        for storage, device, size, host in away:
            storage.resize_(size)
            if host is not None:
                _bytes_of(storage, device, size).copy_(host, non_blocking=True)

    def _release(self) -> None:
        self._users -= 1
        if self._users:
            return
        self._leave()
        for device, storage in storages(self._kept()):
            size = storage.nbytes()
            self._away.append((storage, device, size, self._on_host(storage, device, size)))
        self._away += [(storage, device, storage.nbytes(), None) for device, storage in storages(self._scratch())]
        for device in {device for _, device, _, _ in self._away if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the copied storages are freed below
        for storage, *_ in self._away:
            storage.resize_(0)

    def _on_host(self, storage: torch.UntypedStorage, device: torch.device, size: int) -> Tensor:
        key = storage._cdata
        if key not in self._hosts or len(self._hosts[key]) != size:  # pinning is slow, so each buffer is pinned once
            self._hosts[key] = host_buffer([size], torch.uint8, device)
        return self._hosts[key].copy_(_bytes_of(storage, device, size), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


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
        self.pictures = pictures
        self.vision = RoleVision(pictures, trained=optimizer is not None)
        self._budget, self._optimizer, self._place = tokens_per_micro_batch, optimizer, place
        self._offload: HostOffload | None = None
        self._reading: list[HostCopy] = []
        self._flops: FlopCount | None = None

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
        made = deque(
            micro_batches(
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
        )
        while made:
            self._count(made[0])
            yield made.popleft()  # frees a computed micro-batch, with the masks that it made

    def placeholders(self, picture: Picture) -> list[int]:
        """See `PolicyEngine`."""
        return self.vision.placeholders(picture)


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

    def let_end(self, copy: HostCopy) -> None:
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

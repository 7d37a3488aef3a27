"""A role of either engine: its micro-batches and the loop over them, its optimizer, its pictures, its state for
checkpoints.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.chunked_logprobs import EntropyMode
from asyncrl.models.host_copies import HostCopy, own_storage
from asyncrl.trainer.batches.micro_batch import MicroBatch, micro_batches, one_micro_batch, wanted_lengths
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import (
    PolicyEngine,
    PolicyLoss,
    PolicyOutputs,
    StepOutcome,
    TrainingEngine,
    ValueEngine,
    ValueLoss,
)
from asyncrl.trainer.engines.optimizer import EngineOptimizer, local
from asyncrl.trainer.model.flops import FlopCount, ForwardPass
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.weights.folder_tensors import Published, TensorSpec

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures, ShownTokens
    from asyncrl.models.routing import Routers
    from asyncrl.trainer.engines.offload import HostOffload

Optimizer = TypeVar("Optimizer", bound=EngineOptimizer)
Outputs = tuple[Any, ...]
"""Outputs of a micro-batch: of a policy the fields of `PolicyOutputs`, in their order; of a value model its values."""
Finish = Callable[[MicroBatch, Outputs], Tensor]
_log = logging.getLogger(__name__)


class RoleEngine(TrainingEngine, Generic[Optimizer]):
    """One role's model on this rank. What is not documented here is in `asyncrl.trainer.engines.base`.

    Args:
        device: device that the rank computes on.
        attention: how sequences are laid out.
        tokens_per_micro_batch: budget of one forward and backward pass.
        optimizer: None for a frozen role.
        position: position of this rank.
        routers: routers that replay the expert choices of a batch's routing; None: choices are not replayed.
        pictures: picture processing of the model; None: the model is used for text alone.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        attention: AttentionKind,
        tokens_per_micro_batch: int,
        optimizer: Optimizer | None,
        position: RankPosition,
        routers: Routers | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.device, self.attention = device, attention
        self.routers, self.pictures = routers, pictures
        self._budget, self._optimizer, self._position = tokens_per_micro_batch, optimizer, position
        tower = () if pictures is None or optimizer is None else pictures.tower.parameters()
        self._trains_tower = any(parameter.requires_grad for parameter in tower)
        self._shown: WeakKeyDictionary[StepBatch, ShownTokens] = WeakKeyDictionary()
        self._offload: HostOffload | None = None
        self._reading: list[HostCopy] = []
        self._flops: FlopCount | None = None

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, or its parts of them, by their names in checkpoints."""

    @property
    @abstractmethod
    def root(self) -> nn.Module:
        """The module that has this rank's parameters and buffers."""

    # -- the loop over micro-batches

    @abstractmethod
    def _run(self, own: Iterable[MicroBatch], finish: Finish, **outputs: Any) -> None:
        """Compute the micro-batches `own`, one after the other. `finish` gets the outputs of each where they are, and
        returns the loss of the backward pass, which runs if gradients are recorded.

        Args:
            outputs: which outputs; a policy's are at `temperature`, with entropies by `entropy`.
        """

    def _accumulate(
        self, own: Iterable[MicroBatch], share_of: Callable[[MicroBatch, Outputs], tuple[Tensor, Stats]], **outputs: Any
    ) -> tuple[Tensor, list[Stats]]:
        """Compute the gradients of the loss shares of `own`; return their sum and the statistics of each."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        stats: list[Stats] = []

        def finish(micro_batch: MicroBatch, out: Outputs) -> Tensor:
            share, micro_stats = share_of(micro_batch, out)
            total.add_(share.detach())
            stats.append(micro_stats)
            return share

        self._run(own, finish, **outputs)
        return total, stats

    @torch.no_grad()
    def _collect(
        self, tokens: int, own: Iterable[MicroBatch], where: Callable[[MicroBatch], Tensor], **outputs: Any
    ) -> Tensor:
        """Return a column [tokens] with the first output of each micro-batch at the positions `where`, 0 elsewhere."""
        column_T = torch.zeros(tokens, device=self.device)

        def finish(micro_batch: MicroBatch, out: Outputs) -> Tensor:
            found: Tensor = out[0]
            column_T[where(micro_batch)] = found
            return found

        self._run(own, finish, **outputs)
        return column_T

    def micro_batches(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int] | None = None
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches that score the tokens of `wanted_T` (bool) in the samples `seqs` (None: all)."""
        wanted = wanted_T.cpu().numpy()
        lengths = wanted_lengths(wanted, batch.starts_S, batch.lengths_S)
        return self._cut(batch, wanted, lengths, seqs)

    def _cut(
        self, batch: StepBatch, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], seqs: Sequence[int] | None
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
                range(batch.num_seqs) if seqs is None else seqs,
                budget=self._budget,
                kind=self.attention,
                prefixes=batch.prefixes if self.attention.shares_prefixes else None,
                routing=batch.routing if self.routers is not None else None,
                shown=self._shown_tokens(batch),
            )
        )
        while made:
            self._count(made[0])
            yield made.popleft()  # frees a computed micro-batch, with the masks that it made

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
            self._flops.add(work, backward=backward, share=1.0 / self._position.context.world)

    @property
    def flops(self) -> float | None:
        return None if self._flops is None else self._flops.total

    # -- experts and pictures

    def router_replay(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Within this block the routers choose the experts recorded in `micro_batch`."""
        return nullcontext() if self.routers is None else self.routers.router_replay(micro_batch.routing)

    def seeing(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Within this block the model sees the pictures of `micro_batch`.

        If the vision tower is trained and gradients are recorded, it computes their rows with gradients. Otherwise the
        rows are computed once per version of the weights.
        """
        if self.pictures is None or micro_batch.shown is None:
            return nullcontext()
        return self.pictures.holding(micro_batch.shown, keep=not (self._trains_tower and torch.is_grad_enabled()))

    def _shown_tokens(self, batch: StepBatch) -> ShownTokens | None:
        """Return the tokens of `batch` with its pictures, which are prepared once for all calls of its step; None if it
        has no pictures.

        Raises:
            ValueError: the batch has pictures, and the model is used for text alone.
        """
        if not batch.pictures:
            return None
        if self.pictures is None:
            raise ValueError("the batch has pictures, and the model is used for text alone (model.vision)")
        if batch not in self._shown:
            tokens, starts = batch["tokens"].tolist(), batch.starts_S.tolist()
            ends = (batch.starts_S + batch.lengths_S).tolist()
            parts = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
            ids, held = self.pictures.shown(parts, batch.pictures)
            self._shown[batch] = self.pictures.tokens(ids, batch.device, held)
        return self._shown[batch]

    def _weights_changed(self) -> None:
        """Forget the rows of pictures that were computed with earlier weights."""
        if self.pictures is not None:
            self.pictures.tower.weights_changed()

    # -- weights and state

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
        self._weights_changed()
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

    def load_state(self, meta: Mapping[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.load_state(meta)
        self._weights_changed()

    def add_pending_copy(self, copy: HostCopy) -> None:
        self._reading.append(copy)

    def _before_changes(self) -> None:
        """Called before the tensors of `state` change."""
        while self._reading:
            self._reading.pop().wait_on_device()

    def offload(self) -> None:
        from asyncrl.trainer.engines.offload import HostOffload  # only with trainer.offload

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


class RolePolicy(RoleEngine[Optimizer], PolicyEngine):
    """A causal language model; its tokens are scored at `temperature`, among the tokens `allowed` (empty: all)."""

    def __init__(self, *, temperature: float, allowed: Sequence[int] = (), **role: Any) -> None:
        super().__init__(**role)
        self._sampled: dict[str, Any] = {"temperature": temperature, "entropy": EntropyMode.none}
        if allowed:
            self._sampled["allowed_A"] = torch.tensor(allowed, device=self.device)

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
        def share_of(micro_batch: MicroBatch, out: Outputs) -> tuple[Tensor, Stats]:
            return loss(micro_batch, PolicyOutputs(*out))

        wanted = self._sampled | {"entropy": entropy} | ({"distributions": True} if distributions else {})
        return self._accumulate(self.micro_batches(batch, wanted_T, seqs), share_of, **wanted)

    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        own = self.micro_batches(batch, wanted_T)
        return self._collect(batch.num_tokens, own, lambda micro_batch: micro_batch.targets_N, **self._sampled)

    def score_sequences(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]] = ()
    ) -> list[list[float]]:
        ids, _held = (sequences, []) if self.pictures is None else self.pictures.shown(sequences, pictures)
        together = one_micro_batch(ids, self.attention, self.device, wanted=True, pictures=self.pictures)
        lengths = [len(tokens) for tokens in sequences]
        found_T = self._collect(
            sum(lengths),
            [together],
            lambda micro_batch: micro_batch.targets_N,
            temperature=1.0,
            entropy=EntropyMode.none,
        )
        return [logprobs.tolist() for logprobs in torch.split(found_T, lengths)]

    def placeholders(self, picture: Picture) -> list[int]:
        if self.pictures is None:
            return []
        return [self.pictures.ids.token_id] * self.pictures.ids.seen(picture).rows

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See `PolicyEngine`. Routers choose by themselves, and picture rows are recomputed."""
        from asyncrl.trainer.model.lora import adapters_off  # only with model.lora

        routers, self.routers = self.routers, None
        self._weights_changed()
        try:
            with adapters_off(self.root):
                yield
        finally:
            self.routers = routers
            self._weights_changed()


class RoleValue(RoleEngine[Optimizer], ValueEngine):
    """A critic or reward model."""

    def compute_gradients(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int], loss: ValueLoss
    ) -> tuple[Tensor, list[Stats]]:
        own = self.micro_batches(batch, wanted_T, seqs)
        return self._accumulate(own, lambda micro_batch, out: loss(micro_batch, out[0]), everywhere=False)

    def outputs(self, batch: StepBatch, seqs: Sequence[int] | None = None) -> Tensor:
        nothing = np.zeros(batch.num_tokens, dtype=np.bool_)
        own = self._cut(batch, nothing, batch.lengths_S, seqs)  # samples to their last token
        return self._collect(batch.num_tokens, own, lambda micro_batch: micro_batch.sources_I, everywhere=True)

"""The flat engine: every rank has the whole model, its gradients and its optimizer, and trains its own samples.

All trainable values lie in one vector (`flat_optimizer`), so that a step is one all-reduce, one norm and one kernel.
Inherited methods are documented in `asyncrl.trainer.engines.base`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.algorithms.kl import ema_update_
from asyncrl.api.picture import PlacedPicture
from asyncrl.models.chunked_logprobs import EntropyMode, logits_function, restricted, token_logprobs
from asyncrl.models.fused_norms import fuse_norms
from asyncrl.models.parity import Tokens, in_rms, other_kernel, plain_hidden, plain_logprobs
from asyncrl.models.transformers_internals import trunk_of
from asyncrl.models.weights.versions.published import Published, WholeModel
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import (
    PolicyEngine,
    PolicyLoss,
    PolicyOutputs,
    StepOutcome,
    ValueEngine,
    ValueLoss,
)
from asyncrl.trainer.engines.flat.flat_optimizer import FlatOptimizer
from asyncrl.trainer.engines.role import RoleEngine
from asyncrl.trainer.model.compiled import as_written, compile_layers
from asyncrl.trainer.model.gradient_checkpointing import checkpoint_layers
from asyncrl.trainer.model.load_models import (
    Critic,
)
from asyncrl.trainer.model.lora import (
    Merged,
    WholeAdapters,
    WholeBase,
    plain_name,
)
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import LoraConfig


class FlatEngine(RoleEngine[FlatOptimizer]):
    """Base of the flat policy and value engines: a trunk, its layout, and its optimizer if it is trained.

    Args:
        gradient_checkpointing: True if a trained role's layers recompute their activations.
        activations_on_host: True if the inputs of such layers are kept in host memory.
        compiled: True if the token-wise parts of the layers are compiled.
        role: see `RoleEngine`; gradients are summed over the data-parallel ranks of its `place`.
    """

    def __init__(
        self,
        module: nn.Module,
        trunk: PreTrainedModel,
        *,
        optimizer: FlatOptimizer | None = None,
        place: RankPosition | None = None,
        gradient_checkpointing: bool = False,
        activations_on_host: bool = False,
        compiled: bool = False,
        **role: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, place=place or RankPosition(), **role)
        self.module = module
        self._trunk = trunk
        self._as_written = as_written if compiled else nullcontext
        if compiled:
            compile_layers(trunk)
        elif trunk.device.type == "cuda":
            fuse_norms(trunk, gradients=optimizer is not None)
        if optimizer is None:
            module.requires_grad_(False)
        elif gradient_checkpointing:
            checkpoint_layers(trunk, self.routers, on_host=activations_on_host)
        self._count_from_now(trunk)

    @property
    def root(self) -> nn.Module:
        return self.module

    def _transient_tensors(self) -> Iterable[Tensor]:
        return () if self._optimizer is None else (self._optimizer.grad,)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def step(self, lr: float) -> StepOutcome:
        self._place.data.all_reduce_sum(self.optimizer.grad)
        return super().step(lr)

    @property
    @abstractmethod
    def network(self) -> PreTrainedModel:
        """See `ParityTestable`."""

    def plain_again(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        """See `ParityTestable`."""
        with self._as_written():
            return other_kernel(self.network, sequences)

    def _proof_engine(self) -> dict[str, Any]:
        return {"attention": self.attention, "tokens_per_micro_batch": self._budget}

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Return the trunk's output at every input token, shape [rows * width, H]."""
        with self.replaying(micro_batch), self.vision.seeing(micro_batch):
            output: Tensor = self._trunk(use_cache=False, **micro_batch.model_inputs).last_hidden_state
        return output.flatten(0, 1)

    def _accumulate(
        self,
        batch: StepBatch,
        wanted_T: Tensor,
        seqs: Sequence[int],
        share_of: Callable[[MicroBatch], tuple[Tensor, Stats]],
    ) -> tuple[Tensor, list[Stats]]:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=batch.device)
        stats: list[Stats] = []
        for micro_batch in self.micro_batches(batch, wanted_T, seqs):
            share, micro_stats = share_of(micro_batch)
            if torch.is_grad_enabled():
                torch.autograd.backward(share)
            total += share.detach()
            stats.append(micro_stats)
        return total, stats


class FlatPolicyEngine(FlatEngine, PolicyEngine):
    """A whole causal language model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        allowed: Sequence[int] = (),
        lora: LoraConfig | None = None,
        merge: bool = False,
        **engine: Any,
    ) -> None:
        super().__init__(model, trunk_of(model), **engine)
        self._model = model
        self._published = (
            WholeModel(model, self._place.worker) if lora is None else WholeAdapters(model, self._place.worker)
        )
        if lora is not None and merge:
            base = WholeBase(model, self._place.worker)
            self._published = Merged(base, self._published, lora, base.folder, model.config)
        self._temperature = temperature
        self._logits_of = self._sampled_logits_of = logits_function(model)
        if allowed:
            allowed_A = torch.tensor(allowed, device=model.device)
            self._sampled_logits_of = lambda hidden_NH: restricted(self._logits_of(hidden_NH), allowed_A)

    @property
    def model_config(self) -> PretrainedConfig:
        config: PretrainedConfig = self._model.config
        return config

    def score(
        self, micro_batch: MicroBatch, entropy: EntropyMode = EntropyMode.none, *, distributions: bool = False
    ) -> PolicyOutputs:
        """Return the outputs at the micro-batch's wanted tokens; differentiable."""
        if distributions:
            all_NV = self._distributions(micro_batch)
            return PolicyOutputs(all_NV.gather(-1, micro_batch.tokens_N[:, None]).squeeze(-1), None, all_NV)
        hidden_NH = self._hidden(micro_batch).index_select(0, micro_batch.predictors_N)
        logprobs_N, entropy_N = token_logprobs(
            hidden_NH, micro_batch.tokens_N, self._sampled_logits_of, temperature=self._temperature, entropy=entropy
        )
        return PolicyOutputs(logprobs_N, entropy_N)

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
        def share_of(micro_batch: MicroBatch) -> tuple[Tensor, Stats]:
            return loss(micro_batch, self.score(micro_batch, entropy, distributions=distributions))

        return self._accumulate(batch, wanted_T, seqs, share_of)

    @torch.no_grad()
    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        self._count(micro_batch)
        return self._distributions(micro_batch)

    @torch.no_grad()
    def logprobs(self, batch: StepBatch, wanted_T: Tensor) -> Tensor:
        logprobs_T = torch.zeros(batch.num_tokens, device=batch.device)
        for micro_batch in self.micro_batches(batch, wanted_T):
            logprobs_T[micro_batch.targets_N] = self.score(micro_batch).logprobs_N
        return logprobs_T

    @torch.no_grad()
    def score_sequences(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]] = ()
    ) -> list[list[float]]:
        ids, _held = self.vision.shown_ids(sequences, pictures)
        return [[0.0, *logprobs.tolist()] for logprobs in self.together(ids)]

    @property
    def network(self) -> PreTrainedModel:
        return self._model

    def weights(self) -> dict[str, Tensor]:
        return _weights_of(self._model)

    def around(self, network: PreTrainedModel) -> FlatPolicyEngine:
        pictures = None if self.pictures is None else self.pictures.around(network)
        return FlatPolicyEngine(network, temperature=self._temperature, pictures=pictures, **self._proof_engine())

    def plain(self, tokens: Tokens) -> Tensor:
        with self._as_written():
            return plain_logprobs(self._model, tokens, self.pictures)

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        packed = one_micro_batch(sequences, self.attention, self._model.device, wanted=True, pictures=self.pictures)
        hidden_NH = self._hidden(packed).index_select(0, packed.predictors_N)
        logprobs_N, _ = token_logprobs(hidden_NH, packed.tokens_N, self._logits_of)
        in_order = logprobs_N.index_select(0, packed.targets_N.argsort())
        return torch.split(in_order, [len(tokens) - 1 for tokens in sequences])

    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        """See `PolicyEngine`; `source` is a trained flat engine, whose fp32 master values count."""
        assert isinstance(source, FlatPolicyEngine), type(source)
        self._before_changes()
        theirs = dict(source.network.named_parameters()) | source.optimizer.masters()  # a frozen part has no master
        ema_update_(dict(self._model.named_parameters()), theirs, decay)
        self.vision.weights_changed()

    def _distributions(self, micro_batch: MicroBatch) -> Tensor:
        hidden_NH = self._hidden(micro_batch).index_select(0, micro_batch.predictors_N)
        return torch.log_softmax(self._sampled_logits_of(hidden_NH).float() / self._temperature, dim=-1)


class FlatValueEngine(FlatEngine, ValueEngine):
    """A whole critic or reward model.

    Args:
        classifier: for a reward model, the transformers model of its trunk and head.
    """

    def __init__(self, critic: Critic, *, classifier: PreTrainedModel | None = None, **engine: Any) -> None:
        super().__init__(critic, critic.trunk, **engine)
        self._critic = critic
        self._classifier = classifier

    @property
    def model_config(self) -> PretrainedConfig:
        return (self._classifier or self._critic.trunk).config

    @cached_property
    def _published(self) -> Published:
        return super()._published if self._classifier is None else WholeModel(self._classifier, self._place.worker)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the prefix before each wanted token, [N]; differentiable."""
        return self._critic.values(self._hidden(micro_batch).index_select(0, micro_batch.predictors_N))

    def compute_gradients(
        self, batch: StepBatch, wanted_T: Tensor, seqs: Sequence[int], loss: ValueLoss
    ) -> tuple[Tensor, list[Stats]]:
        return self._accumulate(batch, wanted_T, seqs, lambda micro_batch: loss(micro_batch, self.values(micro_batch)))

    @torch.no_grad()
    def outputs(self, batch: StepBatch, seqs: Sequence[int] | None = None) -> Tensor:
        outputs_T = torch.zeros(batch.num_tokens, device=batch.device)
        for micro_batch in self._whole_sequences(batch, seqs):
            hidden_IH = self._hidden(micro_batch).index_select(0, micro_batch.places_I)
            outputs_T[micro_batch.sources_I] = self._critic.values(hidden_IH)
        return outputs_T

    @property
    def network(self) -> PreTrainedModel:
        return self._critic.trunk

    def weights(self) -> dict[str, Tensor]:
        return _weights_of(self._critic.trunk)

    def around(self, network: PreTrainedModel) -> FlatValueEngine:
        pictures = None if self.pictures is None else self.pictures.around(network)
        return FlatValueEngine(Critic(network), pictures=pictures, **self._proof_engine())

    def plain(self, tokens: Tokens) -> Tensor:
        with self._as_written():
            return plain_hidden(self._critic.trunk, tokens, self.pictures)

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        device = self._critic.trunk.device
        packed = one_micro_batch(sequences, self.attention, device, wanted=False, pictures=self.pictures)
        hidden_IH = self._hidden(packed).index_select(0, packed.places_I)
        in_order = hidden_IH.index_select(0, packed.sources_I.argsort())
        return torch.split(in_rms(in_order), [len(tokens) for tokens in sequences])


def _weights_of(network: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters by the names that they had before adapters were added."""
    return {plain_name(name): each for name, each in network.named_parameters(remove_duplicate=False)}

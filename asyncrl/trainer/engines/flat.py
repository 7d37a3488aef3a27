"""The flat engine: every rank has the whole model, its gradients and its optimizer, and trains its own samples.

What is not documented here is in `asyncrl.trainer.engines.base`.

All trainable parameters live end to end in one fp32 vector, their gradients in a second one. So one all-reduce, one
norm and one fused AdamW kernel serve the whole model, whatever the number of its tensors. Parameters in fp32 are views
of the vector and their `.grad` are views of the gradient vector: nothing is copied. Parameters of lower precision keep
their own storage. Their gradients are added into the fp32 vector as soon as each is ready, so they never accumulate in
low precision. After a step they are rounded from the fp32 master values.

Parameters with weight decay (`decay_groups`) come first, then those without, so AdamW sees two tensors at most. Muon's
matrices come before both, each a view of its own; of its two moments only the first is used. A checkpoint names the
order of the parameters in its vectors and is loaded name by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.algorithms.kl import ema_update_
from asyncrl.api.picture import PlacedPicture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import Dtype, token_ids
from asyncrl.models.chunked_logprobs import EntropyMode, logits_function, restricted, token_logprobs
from asyncrl.models.fused_norms import fuse_norms
from asyncrl.models.parity import Tokens, in_rms, other_kernel, plain_hidden, plain_logprobs
from asyncrl.models.routing import Routers
from asyncrl.models.transformers_internals import compute_head_in_float32, trunk_of
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import (
    EngineLoader,
    PolicyEngine,
    PolicyLoss,
    PolicyOutputs,
    StepOutcome,
    ValueEngine,
    ValueLoss,
)
from asyncrl.trainer.engines.optimizer import (
    MOMENTS,
    EngineOptimizer,
    Moments,
    NamedParameter,
    decay_groups,
    embedding_names,
    matrices_of_layers,
    trainable,
    zero_moments,
)
from asyncrl.trainer.engines.role import RoleEngine
from asyncrl.trainer.model.layers import as_written, checkpoint_layers, compile_layers
from asyncrl.trainer.model.layout_parity import first_layout, refuse_longer_than_independent, select_attention
from asyncrl.trainer.model.load_models import (
    Critic,
    load_causal_lm,
    load_critic,
    load_reward_model,
    prepare_vision,
)
from asyncrl.trainer.model.lora import (
    Merged,
    WholeAdapters,
    WholeBase,
    add_adapters,
    initialise,
    plain_name,
)
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import KeptOn, LoraConfig, OptimizerConfig, OptimizerName, VisionMode
from asyncrl.weights.folder_tensors import Published, WholeModel


class FlatOptimizer(EngineOptimizer):
    """The optimizer of `parameters`, whose values it moves into its flat vector.

    Args:
        parameters: (name, parameter) pairs, each once; all on one device.
        undecayed: names of parameters without weight decay, besides norms and biases.
        matrices: names of parameters that Muon moves, if they decay.

    Raises:
        ValueError: there is no trainable parameter.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        config: OptimizerConfig,
        undecayed: Collection[str] = (),
        matrices: Collection[str] = (),
    ) -> None:
        given = trainable(parameters)
        split = decay_groups(given, undecayed)
        muons = [named for named in split.decayed if named[0] in matrices]
        decayed = [named for named in split.decayed if named[0] not in matrices]
        groups = split._replace(decayed=decayed).with_decay(config.weight_decay)
        self._parameters = [*muons, *(named for group, _ in groups for named in group)]
        device = given[0][1].device
        sizes = [parameter.numel() for _, parameter in muons]
        sizes += [sum(parameter.numel() for _, parameter in group) for group, _ in groups]
        self.flat = nn.Parameter(torch.empty(sum(sizes), dtype=torch.float32, device=device))
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        self._low_precision: list[tuple[nn.Parameter, Tensor]] = []
        self._adopt()
        self._moments = zero_moments(self.grad, config)
        shapes = [parameter.shape for _, parameter in muons] + [torch.Size([size]) for size in sizes[len(muons) :]]
        parts: list[tuple[nn.Parameter, Moments]] = []
        vectors = (self.flat.data, self.grad, *self._moments.values())
        for shape, cut in zip(shapes, zip(*(torch.split(each, sizes) for each in vectors), strict=True), strict=True):
            values, grad, *moments = (view.view(shape) for view in cut)
            part = nn.Parameter(values)
            part.grad = grad
            parts.append((part, dict(zip(MOMENTS, moments, strict=True))))
        rest = zip(parts[len(muons) :], groups, strict=True)
        super().__init__([([part], decay) for part, (_, decay) in rest], config, parts[: len(muons)])

    def masters(self) -> dict[str, Tensor]:
        """Return the trainable parameters' fp32 master values, by name; views."""
        return self._views(self.flat.detach())

    def kept(self) -> Iterator[Tensor]:
        yield self.flat.data  # parameters of lower precision are not views of it
        yield from super().kept()

    def zero_grad(self) -> None:
        self.grad.zero_()

    def step(self, lr: float) -> StepOutcome:
        outcome = super().step(lr)
        if outcome.applied:
            self._round_low_precision()
        return outcome

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        vectors = {"weights": self.flat.detach(), **self._moments}
        tensors = {
            f"{kind}.{name}": view for kind, vector in vectors.items() for name, view in self._views(vector).items()
        }
        return tensors, {"step": self.steps}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        self.resume(meta)
        self._round_low_precision()

    def _norm(self) -> Tensor:
        return nn.utils.get_total_norm([self.grad])

    def _clipped(self) -> Iterable[Tensor]:
        return (self.flat,)

    def _views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return each parameter's part of a vector, in the parameter's shape."""
        parts = torch.split(vector, [parameter.numel() for _, parameter in self._parameters])
        named = zip(self._parameters, parts, strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in named}

    def _adopt(self) -> None:
        """Move every parameter's values into the flat vector and its gradient into the gradient vector."""
        masters, grads = self._views(self.flat.data), self._views(self.grad)
        for name, parameter in self._parameters:
            master, grad = masters[name], grads[name]
            master.copy_(parameter.data)
            if parameter.dtype == torch.float32:
                parameter.data, parameter.grad = master, grad
            else:
                self._low_precision.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(partial(_widen, grad))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _round_low_precision(self) -> None:
        for parameter, master in self._low_precision:
            parameter.copy_(master)


@torch.no_grad()
def _widen(destination: Tensor, parameter: Tensor) -> None:
    """Add the low-precision gradient of `parameter` into its part of the fp32 vector, and free the gradient."""
    assert parameter.grad is not None
    destination.add_(parameter.grad)
    parameter.grad = None


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

    def with_network(self, network: PreTrainedModel) -> FlatPolicyEngine:
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

    def with_network(self, network: PreTrainedModel) -> FlatValueEngine:
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


Engine = TypeVar("Engine", FlatPolicyEngine, FlatValueEngine)


class FlatLoader(EngineLoader):
    """Loads whole models onto `device`, as `config` sets them, for the rank at `place`. All ranks of a grid load a
    model together, so that they fail together.

    Each model is proven before it is returned (`trainer.model.layout_parity`); a model that cannot be trained right
    raises `UnsupportedModelError`, a ValueError.
    """

    def __init__(self, config: ExperimentConfig, place: RankPosition, device: torch.device) -> None:
        self._config, self._place, self._device = config, place, device
        self._attention = config.model.attn_implementation
        self._dtype, self._vision = config.model.dtype.on(device.type), config.model.vision
        self._engine: dict[str, Any] = {
            "attention": first_layout(self._attention).kind,
            "tokens_per_micro_batch": config.trainer.tokens_per_micro_batch,
            "place": place,
            "gradient_checkpointing": config.trainer.gradient_checkpointing,
            "activations_on_host": config.trainer.activations_on == KeptOn.host,
            "compiled": config.trainer.compile,
        }

    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> FlatPolicyEngine:
        def load() -> FlatPolicyEngine:
            model = load_causal_lm(path, dtype.on(self._device.type), self._attention, self._device)
            pictures = prepare_vision(model, path, self._vision)
            if self._config.model.float32_head:
                compute_head_in_float32(model)
            lora = self._config.model.lora if optimizer is not None and self._config.model.lora.rank else None
            if lora is not None:
                add_adapters(model, lora, vision=self._vision == VisionMode.train)
                initialise(model.named_parameters(), self._config.seed)
            # Greedy answers report their log-probabilities at temperature 1.
            temperature = self._config.rollout.sampling.temperature or 1.0
            made = None if optimizer is None else self._optimizer(model, optimizer)
            routers = None
            if optimizer is not None and self._config.moe.replay_routing:
                routers = Routers(trunk_of(model), model.config.get_text_config().model_type)
            return FlatPolicyEngine(
                model,
                temperature=temperature,
                allowed=token_ids(self._config.rollout.sampling.allowed_token_ids),
                optimizer=made,
                lora=lora,
                merge=not publishes_adapters(self._config),
                routers=routers,
                pictures=pictures,
                **self._engine,
            )

        return self._together(load, path)

    def critic(self, path: str, optimizer: OptimizerConfig) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            critic = load_critic(path, self._dtype, self._attention, self._device)
            pictures = prepare_vision(critic.trunk, path, self._vision)
            made = self._optimizer(critic, optimizer)
            return FlatValueEngine(critic, optimizer=made, pictures=pictures, **self._engine)

        return self._together(load, path)

    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            trained = optimizer is not None
            critic, classifier = load_reward_model(path, self._dtype, self._attention, self._device, trained=trained)
            made = None if optimizer is None else self._optimizer(critic, optimizer)
            return FlatValueEngine(critic, classifier=classifier, optimizer=made, **self._engine)

        return self._together(load, path)

    def _together(self, load: Callable[[], Engine], path: str) -> Engine:
        def proven() -> Engine:
            engine = load()
            longest = context_length(self._config, engine.network.config.to_dict())
            refuse_longer_than_independent(engine.network, longest)
            select_attention(
                engine,
                self._attention,
                longest=longest,
                row=self._config.trainer.tokens_per_micro_batch,
                share_prefixes=self._config.trainer.share_prefixes,
            )
            return engine

        return self._place.everyone.together(proven, f"loading {path}")

    def _optimizer(self, module: nn.Module, config: OptimizerConfig) -> FlatOptimizer:
        named = ((plain_name(name), parameter) for name, parameter in module.named_parameters())
        undecayed = () if config.decay_embeddings else embedding_names(module)
        matrices = matrices_of_layers(module) if config.name == OptimizerName.muon else ()
        return FlatOptimizer(named, config, undecayed, matrices)

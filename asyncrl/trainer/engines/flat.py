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
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import Dtype, token_ids
from asyncrl.models.chunked_logprobs import EntropyMode, logits_function, restricted, token_logprobs
from asyncrl.models.parity import Tokens, in_rms, other_kernel, plain_hidden, plain_logprobs
from asyncrl.models.transformers_internals import compute_head_in_float32, trunk_of
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.engines.base import EngineLoader, PolicyEngine, StepOutcome
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
from asyncrl.trainer.engines.role import Finish, Outputs, RoleEngine, RolePolicy, RoleValue
from asyncrl.trainer.model.layout_parity import first_layout, refuse_longer_than_independent, select_attention
from asyncrl.trainer.model.load_models import load_causal_lm, plain_name, prepare_vision
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import KeptOn, LoraConfig, OptimizerConfig, OptimizerName, VisionMode
from asyncrl.weights.folder_tensors import Published, WholeModel

if TYPE_CHECKING:
    from asyncrl.trainer.model.value_models import Critic


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
        role: see `RoleEngine`; gradients are summed over the data-parallel ranks of its `position`.
    """

    def __init__(
        self,
        module: nn.Module,
        trunk: PreTrainedModel,
        *,
        optimizer: FlatOptimizer | None = None,
        position: RankPosition | None = None,
        gradient_checkpointing: bool = False,
        activations_on_host: bool = False,
        compiled: bool = False,
        **role: Any,
    ) -> None:
        super().__init__(device=trunk.device, optimizer=optimizer, position=position or RankPosition(), **role)
        self.module = module
        self._trunk = trunk
        self._as_written: Callable[[], AbstractContextManager[None]] = nullcontext
        if compiled:
            from asyncrl.trainer.model.layers import as_written, compile_layers  # only with trainer.compile

            self._as_written = as_written
            compile_layers(trunk)
        elif self.device.type == "cuda":
            from asyncrl.models.fused_norms import fuse_norms  # torch has the kernel on GPUs

            fuse_norms(trunk, gradients=optimizer is not None)
        if optimizer is None:
            module.requires_grad_(False)
        elif gradient_checkpointing:
            from asyncrl.trainer.model.layers import checkpoint_layers  # only with trainer.gradient_checkpointing

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
        self._position.data.all_reduce_sum(self.optimizer.grad)
        return super().step(lr)

    def _run(self, own: Iterable[MicroBatch], finish: Finish, **outputs: Any) -> None:
        for micro_batch in own:
            loss = finish(micro_batch, self.outputs_of(micro_batch, **outputs))
            if torch.is_grad_enabled():
                torch.autograd.backward(loss)

    @abstractmethod
    def outputs_of(self, micro_batch: MicroBatch, *_: Any, **outputs: Any) -> Outputs:
        """Return the outputs of a micro-batch; differentiable."""

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Return the trunk's output at every input token, shape [rows * width, H]."""
        with self.router_replay(micro_batch), self.seeing(micro_batch):
            output: Tensor = self._trunk(use_cache=False, **micro_batch.model_inputs).last_hidden_state
        return output.flatten(0, 1)

    # -- for the parity check (`ParityTestable`)

    @property
    @abstractmethod
    def network(self) -> PreTrainedModel:
        """See `ParityTestable`."""

    def weights(self) -> dict[str, Tensor]:
        return {plain_name(name): each for name, each in self.network.named_parameters(remove_duplicate=False)}

    def with_network(self, network: PreTrainedModel) -> Self:
        pictures = None if self.pictures is None else self.pictures.around(network)
        return self._of_network(
            network, pictures=pictures, attention=self.attention, tokens_per_micro_batch=self._budget
        )

    @classmethod
    @abstractmethod
    def _of_network(cls, network: PreTrainedModel, **engine: Any) -> Self:
        """Return a frozen engine of `network`."""

    def plain_again(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        with self._as_written():
            return other_kernel(self.network, sequences)


class FlatPolicyEngine(FlatEngine, RolePolicy[FlatOptimizer]):
    """A whole causal language model."""

    def __init__(
        self, model: PreTrainedModel, *, lora: LoraConfig | None = None, merge: bool = False, **engine: Any
    ) -> None:
        super().__init__(model, trunk_of(model), **engine)
        self._model = model
        if lora is None:
            self._published = WholeModel(model, self._position.worker)
        else:
            from asyncrl.trainer.model.lora import published_whole  # only with model.lora

            self._published = published_whole(model, self._position.worker, lora, merge=merge)
        self._logits_of = logits_function(model)

    @property
    def model_config(self) -> PretrainedConfig:
        config: PretrainedConfig = self._model.config
        return config

    def outputs_of(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.none,
        distributions: bool = False,
        allowed_A: Tensor | None = None,
    ) -> Outputs:
        """Return the fields of `PolicyOutputs` at the micro-batch's wanted tokens; differentiable."""

        def logits_of(hidden_NH: Tensor) -> Tensor:
            logits_NV = self._logits_of(hidden_NH)
            return logits_NV if allowed_A is None else restricted(logits_NV, allowed_A)

        hidden_NH, tokens_N = self._hidden(micro_batch).index_select(0, micro_batch.predictors_N), micro_batch.tokens_N
        if not distributions:
            return token_logprobs(hidden_NH, tokens_N, logits_of, temperature=temperature, entropy=entropy)
        all_NV = torch.log_softmax(logits_of(hidden_NH).float() / temperature, dim=-1)
        return all_NV.gather(-1, tokens_N[:, None]).squeeze(-1), None, all_NV

    @torch.no_grad()
    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        self._count(micro_batch)
        all_NV: Tensor = self.outputs_of(micro_batch, **self._sampled, distributions=True)[2]
        return all_NV

    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        """See `PolicyEngine`; `source` is a trained flat engine, whose fp32 master values count."""
        from asyncrl.algorithms.kl import ema_update_  # only with algorithm.reference.mode=ema

        assert isinstance(source, FlatPolicyEngine), type(source)
        self._before_changes()
        theirs = dict(source.network.named_parameters()) | source.optimizer.masters()  # a frozen part has no master
        ema_update_(dict(self._model.named_parameters()), theirs, decay)
        self._weights_changed()

    @property
    def network(self) -> PreTrainedModel:
        return self._model

    @classmethod
    def _of_network(cls, network: PreTrainedModel, **engine: Any) -> Self:
        return cls(network, temperature=1.0, **engine)

    def plain(self, tokens: Tokens) -> Tensor:
        with self._as_written():
            return plain_logprobs(self._model, tokens, self.pictures)

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        packed = one_micro_batch(sequences, self.attention, self.device, wanted=True, pictures=self.pictures)
        in_order = self.outputs_of(packed)[0].index_select(0, packed.targets_N.argsort())
        return torch.split(in_order, [len(tokens) - 1 for tokens in sequences])


class FlatValueEngine(FlatEngine, RoleValue[FlatOptimizer]):
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
        return (self._classifier or self._trunk).config

    @cached_property
    def _published(self) -> Published:
        return super()._published if self._classifier is None else WholeModel(self._classifier, self._position.worker)

    def outputs_of(self, micro_batch: MicroBatch, *, everywhere: bool = False) -> Outputs:
        """Return the value of the prefix before each wanted token, or up to each input token (`everywhere`)."""
        indices = micro_batch.indices_I if everywhere else micro_batch.predictors_N
        return (self._critic.values(self._hidden(micro_batch).index_select(0, indices)),)

    @property
    def network(self) -> PreTrainedModel:
        return self._trunk

    @classmethod
    def _of_network(cls, network: PreTrainedModel, **engine: Any) -> Self:
        from asyncrl.trainer.model.value_models import Critic  # only with a critic or reward model

        return cls(Critic(network), **engine)

    def plain(self, tokens: Tokens) -> Tensor:
        with self._as_written():
            return plain_hidden(self._trunk, tokens, self.pictures)

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        packed = one_micro_batch(sequences, self.attention, self.device, wanted=False, pictures=self.pictures)
        hidden_IH = self._hidden(packed).index_select(0, packed.indices_I)
        in_order = hidden_IH.index_select(0, packed.sources_I.argsort())
        return torch.split(in_rms(in_order), [len(tokens) for tokens in sequences])


Engine = TypeVar("Engine", FlatPolicyEngine, FlatValueEngine)


class FlatLoader(EngineLoader):
    """Loads whole models onto `device`, as `config` sets them, for the rank at `position`. All ranks of a grid load a
    model together, so that they fail together.

    Each model is proven before it is returned (`trainer.model.layout_parity`); a model that cannot be trained right
    raises `UnsupportedModelError`, a ValueError.
    """

    def __init__(self, config: ExperimentConfig, position: RankPosition, device: torch.device) -> None:
        self._config, self._position, self._device = config, position, device
        self._attention = config.model.attn_implementation
        self._dtype, self._vision = config.model.dtype.on(device.type), config.model.vision
        self._engine: dict[str, Any] = {
            "attention": first_layout(self._attention).kind,
            "tokens_per_micro_batch": config.trainer.tokens_per_micro_batch,
            "position": position,
            "gradient_checkpointing": config.trainer.gradient_checkpointing,
            "activations_on_host": config.trainer.activations_on == KeptOn.host,
            "compiled": config.trainer.compile,
        }

    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> FlatPolicyEngine:
        config = self._config

        def load() -> FlatPolicyEngine:
            model = load_causal_lm(path, dtype.on(self._device.type), self._attention, self._device)
            pictures = prepare_vision(model, path, self._vision)
            if config.model.float32_head:
                compute_head_in_float32(model)
            lora: LoraConfig | None = None
            merge, routers = False, None
            if optimizer is not None and config.model.lora.rank:
                from asyncrl.trainer.model.lora import add_adapters, initialise  # only with model.lora
                from asyncrl.trainer.model.lora_checks import publishes_adapters

                lora, merge = config.model.lora, not publishes_adapters(config)
                add_adapters(model, lora, vision=self._vision == VisionMode.train)
                initialise(model.named_parameters(), config.seed)
            if optimizer is not None and config.moe.replay_routing:
                from asyncrl.models.routing import Routers  # only with moe.replay_routing

                routers = Routers(trunk_of(model), model.config.get_text_config().model_type)
            return FlatPolicyEngine(
                model,
                # Greedy answers report their log-probabilities at temperature 1.
                temperature=config.rollout.sampling.temperature or 1.0,
                allowed=token_ids(config.rollout.sampling.allowed_token_ids),
                optimizer=self._optimizer(model, optimizer),
                lora=lora,
                merge=merge,
                routers=routers,
                pictures=pictures,
                **self._engine,
            )

        return self._together(load, path)

    def critic(self, path: str, optimizer: OptimizerConfig) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            from asyncrl.trainer.model.value_models import load_critic  # only with a critic

            critic = load_critic(path, self._dtype, self._attention, self._device)
            pictures = prepare_vision(critic.trunk, path, self._vision)
            made = self._optimizer(critic, optimizer)
            return FlatValueEngine(critic, optimizer=made, pictures=pictures, **self._engine)

        return self._together(load, path)

    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            from asyncrl.trainer.model.value_models import load_reward_model  # only with a reward model

            trained = optimizer is not None
            critic, classifier = load_reward_model(path, self._dtype, self._attention, self._device, trained=trained)
            made = self._optimizer(critic, optimizer)
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

        return self._position.everyone.together(proven, f"loading {path}")

    def _optimizer(self, module: nn.Module, config: OptimizerConfig | None) -> FlatOptimizer | None:
        if config is None:
            return None
        named = ((plain_name(name), parameter) for name, parameter in module.named_parameters())
        undecayed = () if config.decay_embeddings else embedding_names(module)
        matrices = matrices_of_layers(module) if config.name == OptimizerName.muon else ()
        return FlatOptimizer(named, config, undecayed, matrices)

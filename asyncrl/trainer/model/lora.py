"""Low-rank adapters (Hu et al., "LoRA", 2021) by peft: W x + (alpha / rank) B A x with W frozen.

Adapters are the same in every layout. A starts uniform as in peft (He et al.'s bound); the random numbers of a layer
depend only on the layer's name. B starts at zero, so an untrained adapter changes nothing. Adapters are kept in fp32. A
frozen reference that equals the base needs no copy of the base: it is the actor with its adapters off
(`LoraReference`).

peft is an extra, imported only if there are adapters.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.host_copies import HostCopy
from asyncrl.models.transformers_internals import language_model_on_meta, text_part, trunk_of
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, StepOutcome
from asyncrl.trainer.model.load_models import plain_name
from asyncrl.trainer.settings import ALL_LINEAR, LoraConfig
from asyncrl.weights.adapters import Adapters, model_name, published_name
from asyncrl.weights.folder_tensors import FolderTensor, Published, TensorSpec, WholeModel, held_tensors

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

_NAMES_OF_EXPERTS = frozenset({"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, vision: bool = False) -> None:
    """Freeze `model` and add adapters in fp32, without values, to the layers that `config` names. Works on any device.

    Args:
        vision: add adapters to the vision tower and the projector of a model that takes pictures, too.

    Raises:
        ValueError: no layer has one of the names, or only some of the layers keep their weights transposed.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    trunk = trunk_of(model) if vision else text_part(trunk_of(model))
    head = trunk.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = {
        name: module
        for name, module in trunk.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    chosen = config.targets
    names = [name for name in linear if ALL_LINEAR in chosen or name.rsplit(".", 1)[-1] in chosen]
    kinds = {name.rsplit(".", 1)[-1] for name in linear}
    for target in config.targets:
        if target not in (ALL_LINEAR, *kinds):
            raise ValueError(
                f"model.lora.targets={config.targets}: no layer is called {target!r}; there are "
                f"{', '.join(sorted(kinds))}, or {ALL_LINEAR}"
            )
    beside = sorted({name.rsplit(".", 1)[-1] for name in names} & _NAMES_OF_EXPERTS)
    if beside and any(name.endswith(".experts") for name, _ in trunk.named_modules()):
        raise ValueError(
            f"model.lora.targets={config.targets}: in a mixture of experts peft takes {', '.join(beside)} for the "
            f"experts', which have no adapters; name others of {', '.join(sorted(kinds - _NAMES_OF_EXPERTS))}"
        )
    if len(transposed := {isinstance(linear[name], Conv1D) for name in names}) > 1:
        raise ValueError(
            f"model.lora.targets={config.targets}: some of these layers keep their weights transposed (Conv1D) and "
            "others do not, which one configuration of adapters cannot say; name layers of one kind"
        )
    inject_adapter_in_model(peft_config(config, names, transposed=any(transposed)), trunk)
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """True if the parameter `name` belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


class WholeBase(WholeModel):
    """The base under the adapters of a `model` that every rank holds whole; see `Published`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, in the model's order."""
        held = {plain_name(name): tensor for name, tensor in held_tensors(self._model).items() if not is_adapter(name)}
        return {tensor.name: tensor.of(held[tensor.parameter]) for tensor in self.folder}


class Merged:
    """Publishable tensors of `base` with `adapters` merged; see `Published`.

    A merged layer equals, bit for bit, the result of `weights.adapters` for a published base and adapters.

    Args:
        config: the settings of the adapters.
        folder: positions of a model folder's tensors in parameters.
        model_config: the model's configuration.

    Raises:
        ValueError: the model folder stores a layer that has an adapter as several tensors.
    """

    def __init__(
        self,
        base: Published,
        adapters: Published,
        config: LoraConfig,
        folder: Iterable[FolderTensor],
        model_config: PretrainedConfig,
    ) -> None:
        self._base, self._adapters, self._scale = base, adapters, config.alpha / config.rank
        specs = adapters.published_specs()
        self._transposed = are_transposed(model_config, specs)
        weights = {f"{adapted_layer(spec.name)}.weight" for spec in specs}
        self._layer_of = {part.name: part.parameter for part in folder if part.parameter in weights and part.is_whole}
        if cut := sorted(weights - set(self._layer_of.values())):
            raise ValueError(
                f"model.lora.publish: {cut[0]!r} has an adapter and is no tensor of a model folder; use adapter, or "
                "leave it out of model.lora.targets"
            )

    def published_specs(self) -> list[TensorSpec]:
        """See `Published`."""
        return self._base.published_specs()

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `Published`."""
        owner_of = {self._layer_of[name]: owner for name, owner in owners.items() if name in self._layer_of}
        parts_of = {spec.name: f"{adapted_layer(spec.name)}.weight" for spec in self._adapters.published_specs()}
        mine = dict(
            self._adapters.gather({name: owner_of[layer] for name, layer in parts_of.items() if layer in owner_of})
        )
        layers: dict[str, list[Tensor]] = {}
        for name in parts_of:  # A before B, as they are published
            if name in mine:
                layers.setdefault(parts_of[name], []).append(mine[name])
        adapters = Adapters(None, self._scale, {layer: (a, b) for layer, (a, b) in layers.items()}, self._transposed)
        for name, tensor in self._base.gather(owners):
            layer = self._layer_of.get(name)
            yield name, tensor if layer is None else adapters.merged(layer, tensor).to(tensor.dtype)


def adapted_layer(published: str) -> str:
    """Return the name, in the model, of the layer that the adapter tensor `published` belongs to."""
    return model_name(published).rsplit(".", 2)[0]  # <layer>.lora_A.weight


def are_transposed(model_config: PretrainedConfig, specs: Iterable[TensorSpec]) -> bool:
    """Return True if the layers of the published adapters `specs` keep their weights as [in, out]."""
    model = language_model_on_meta(model_config)
    return any(isinstance(model.get_submodule(adapted_layer(spec.name)), Conv1D) for spec in specs)


class WholeAdapters:
    """The adapters of a `model` that every rank holds whole; see `weights.folder_tensors.Published`."""

    def __init__(self, model: PreTrainedModel, worker: int) -> None:
        self._model, self._worker = model, worker

    def published_specs(self) -> list[TensorSpec]:
        """See `Published`."""
        return published_adapters(self._model, self._model.dtype)

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `Published`."""
        for name, parameter in self._model.named_parameters():
            published = published_name(plain_name(name))
            if is_adapter(name) and owners.get(published) == self._worker:
                yield published, parameter.detach().to(self._model.dtype)


def published_whole(model: PreTrainedModel, worker: int, config: LoraConfig, *, merge: bool) -> Published:
    """Return what a `model` with adapters publishes that every rank holds whole: its adapters, or all of it merged."""
    adapters = WholeAdapters(model, worker)
    if not merge:
        return adapters
    base = WholeBase(model, worker)
    return Merged(base, adapters, config, base.folder, model.config)


def published_adapters(model: nn.Module, dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs of the tensors that a model with adapters publishes: the adapters alone, by their names in
    peft's folder.
    """
    return [
        TensorSpec(published_name(plain_name(name)), tuple(parameter.shape), dtype)
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    ]


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Fill the adapters among `parameters` with values that depend on their names and not on the layout."""
    for name, parameter in parameters:
        if not is_adapter(name):
            continue
        if ".lora_B." in name:
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(seed * 0x1_0000_0000 + zlib.crc32(plain_name(name).encode()))
        bound = math.sqrt(1.0 / parameter.shape[1])  # kaiming_uniform_ with a = sqrt(5)
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(values)


@contextmanager
def adapters_off(trunk: nn.Module) -> Iterator[None]:
    """Within this block `trunk` computes without its adapters."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in trunk.modules() if isinstance(module, LoraLayer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


def peft_config(
    config: LoraConfig, targets: list[str], base: str | None = None, *, transposed: bool = False
) -> PeftConfig:
    """Translate `config` into peft's settings, for the layers `targets` of `base`, given by name or by the last
    part of the name.
    """
    from peft import LoraConfig as PeftConfig

    alpha: Any = config.alpha  # annotated as an integer, used as a number
    return PeftConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def adapter_config(config: LoraConfig, base: str, specs: Sequence[TensorSpec], model_config: PretrainedConfig) -> bytes:
    """Return the content of peft's `adapter_config.json` for the published adapters `specs` of the model in `base`."""
    kinds = sorted({adapted_layer(spec.name).rsplit(".", 1)[-1] for spec in specs})
    made = peft_config(config, kinds, base, transposed=are_transposed(model_config, specs))
    described: dict[str, Any] = made.to_dict()  # type: ignore[no-untyped-call]
    described |= {"target_modules": kinds, "inference_mode": True}
    return json.dumps(described, indent=2, sort_keys=True).encode()


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

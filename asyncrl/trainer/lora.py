"""Low-rank adapters (Hu et al., "LoRA", 2021) by peft: W x + (alpha / rank) B A x with W frozen.

Adapters are the same in every layout: A starts uniform as peft has it (He et al.'s bound), drawn for each layer by the
layer's name alone, and B at zero, so that an untrained adapter changes nothing. They are kept in fp32. A frozen
reference that is the very base needs no copy of it: it is the actor with its adapters off.

peft is imported where there are adapters only: it is an extra.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from asyncrl.trainer.settings import ALL_LINEAR, LoraConfig
from asyncrl.weights.adapters import published_name
from asyncrl.weights.published import TensorSpec

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

_ADAPTER = ".default"
_NAMES_OF_EXPERTS = frozenset({"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
BASE_LAYER = ".base_layer"
"""In the name of a parameter of the base, which a model folder does not know."""


def add_adapters(trunk: nn.Module, config: LoraConfig, layers: str = "layers") -> None:
    """Freeze `trunk` and give the layers that `config` names adapters, in fp32; on any device, without values.

    Raises:
        ValueError: no layer has such a name.
    """
    from peft import inject_adapter_in_model

    names = [
        name
        for name, module in trunk.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{layers}.") and _wanted(name, config.targets)
    ]
    kinds = {name.rsplit(".", 1)[-1] for name, module in trunk.named_modules() if isinstance(module, nn.Linear)}
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
    inject_adapter_in_model(peft_config(config, names), trunk)
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


def _wanted(name: str, targets: list[str]) -> bool:
    return ALL_LINEAR in targets or name.rsplit(".", 1)[-1] in targets


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """A parameter's name without peft's insertions: of the base as in a model folder, of an adapter without its key."""
    return name.replace(BASE_LAYER, "").replace(_ADAPTER, "")


class WholeAdapters:
    """The adapters of a `model` that every rank holds whole; see `asyncrl.weights.published.Published`."""

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


def published_adapters(model: nn.Module, dtype: torch.dtype) -> list[TensorSpec]:
    """What is published of a model with adapters: these alone, by their names in peft's folder."""
    return [
        TensorSpec(published_name(plain_name(name)), tuple(parameter.shape), dtype)
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    ]


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Fill the adapters among `parameters`, by their names; alike in every layout."""
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
    """`trunk` computes as its base."""
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


def peft_config(config: LoraConfig, targets: list[str], base: str | None = None) -> PeftConfig:
    """`config` in peft's words, for the layers `targets`, by their names or by the last part of these, of `base`."""
    from peft import LoraConfig as PeftConfig

    alpha: Any = config.alpha  # annotated as an integer, used as a number
    return PeftConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def adapter_config(config: LoraConfig, base: str, specs: Iterable[TensorSpec]) -> bytes:
    """The content of peft's `adapter_config.json` beside the published adapters `specs` of the model in `base`."""
    kinds = sorted({spec.name.rsplit(".", 3)[1] for spec in specs})  # <layers>.q_proj.lora_A.weight
    described: dict[str, Any] = peft_config(config, kinds, base).to_dict()  # type: ignore[no-untyped-call]
    described |= {"target_modules": kinds, "inference_mode": True}
    return json.dumps(described, indent=2, sort_keys=True).encode()

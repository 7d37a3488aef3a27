"""Floating point operations of training, counted from a model's shapes, for MFU (arXiv 2204.02311, appendix B).

Only matrix products are counted: a multiplication and an addition are two operations.

    forward     2 for each value of a matrix and each computed token; in the head each wanted token;
                2 heads (d_qk + d_v) for each pair of a token and one that it attends to
    backward    as much for the gradients of trained matrices, and as much for the gradients of their inputs, from the
                first layer with trained parameters on; twice as much for pairs

A shared prefix counts once. Padding, recomputation (gradient checkpointing, chunks of the head), norms, activations,
softmax and the states of recurrent layers do not count. The matrices
of a vision tower are counted as they are multiplied (`FlopCount`), as their rows depend on the sizes of pictures; pairs
of its patches are left out. If the embedding is frozen, torch needs no gradient of the input of the first layer with
adapters; it is counted all the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.models.model_config import ModelFacts
from asyncrl.models.transformers_internals import layer_memories, text_part

EXPERTS = "experts"
"""Name of the module that has a layer's experts, in all models of transformers."""
TENSOR_AXIS = "tensor"
_QUERIES = ("q_proj.weight", "q_b_proj.weight", "qkv_proj.weight")
"""Matrices whose slices are those of the heads."""
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_NO_LAYER = sys.maxsize
"""First trained layer of a model if only parameters after its layers are trained."""


class NotCounted(ValueError):
    """The model's configuration lacks what the count needs; the message names it."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Tokens of a forward pass.

    Attributes:
        depths: [tokens], of each computed token how many tokens it sees, itself included, if nothing hides them.
        wanted: tokens that the head is computed for.
    """

    depths: NDArray[np.int64]
    wanted: int


@dataclass(frozen=True, slots=True)
class Product:
    """Operations of matrices for a row of their input: forward, and of both gradients as far as they are computed."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Product) -> Product:
        return Product(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, slots=True)
class Attended:
    """Limit of the tokens that a token of an attention layer sees: the last `window`, or those of its `chunk`."""

    window: int | None = None
    chunk: int | None = None

    def pairs(self, depths: NDArray[np.int64]) -> int:
        """Return the number of pairs of a token and a token that it sees."""
        if self.chunk is not None:
            depths = (depths - 1) % self.chunk + 1
        elif self.window is not None:
            depths = np.minimum(depths, self.window)
        return int(depths.sum())


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of this rank's part of a model.

    Attributes:
        token: for each computed token.
        wanted: for each token that the head is computed for.
        pairs: for each pair of a token and a token that it sees, by the layers' limit.
    """

    token: Product
    wanted: Product
    pairs: Mapping[Attended, Product] = field(default_factory=dict)

    def of(self, work: ForwardPass, *, backward: bool) -> float:
        """The operations of a forward pass over `work`, and of its backward pass if there is one."""
        parts = [(self.token, len(work.depths)), (self.wanted, work.wanted)]
        parts += [(product, attended.pairs(work.depths)) for attended, product in self.pairs.items()]
        return sum((each.forward + (each.backward if backward else 0.0)) * number for each, number in parts)


def model_flops(root: nn.Module, trunk: PreTrainedModel) -> ModelFlops:
    """Count a model as it is on this rank: this rank's part of layers that are cut over ranks, and no vision tower.

    Args:
        root: the trunk and its head.

    Raises:
        NotCounted: the model has experts, and the configuration lacks the number of experts per token.
    """
    text, config = text_part(trunk), trunk.config.get_text_config()
    first = _first_trained(text, trunk)
    token = sum((product for _, product in _products(text, config, first)), Product())
    inside = set(trunk.modules())
    head = Product()
    for module in root.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 2:
                    head += _product(parameter, 1.0, inputs=first is not None)
    return ModelFlops(token, head, _pairs(text, config, first))


def _first_trained(text: nn.Module, trunk: nn.Module) -> int | None:
    """Return the first layer that needs a gradient; None if nothing is trained.

    -1: the embedding, or the rows of a vision tower, need a gradient too.
    """
    trained = {id(parameter) for parameter in trunk.parameters() if parameter.requires_grad}
    before = trained - {id(parameter) for parameter in text.parameters()}
    for module in text.modules():
        if isinstance(module, nn.Embedding):
            before |= trained & {id(module.weight)}
    if before:
        return -1
    layers = [_layer(name) for name, parameter in text.named_parameters() if id(parameter) in trained]
    return min((layer for layer in layers if layer is not None), default=_NO_LAYER if layers else None)


def _layer(name: str) -> int | None:
    """Return the number of the layer that the parameter `name` belongs to."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _products(text: nn.Module, config: PretrainedConfig, first: int | None) -> Iterator[tuple[str, Product]]:
    """Yield each matrix of `text` that tokens are multiplied with."""
    for name, module in text.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        share = _chosen_experts(config) if EXPERTS in name.split(".") else 1.0
        layer = _layer(f"{name}.")
        inputs = first is not None and (layer is None or layer >= first)
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not own.endswith("bias"):  # experts have a bias each
                yield name, _product(parameter, share, inputs=inputs)


def _product(parameter: Tensor, share: float, *, inputs: bool) -> Product:
    """Return the operations with a parameter, of which this rank has its own tensor slice, and all of FSDP's parts.

    Args:
        share: share of the tokens that are multiplied with it.
        inputs: True if the gradient of its input is computed.
    """
    forward = 2.0 * parameter.numel() / _slices(parameter) * share
    return Product(forward, forward * (inputs + bool(parameter.requires_grad)))


def _slices(parameter: Tensor) -> int:
    """Return the number of tensor slices of a parameter."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement, size in zip(mesh.mesh_dim_names or (), parameter.placements, mesh.shape, strict=True):
            if axis == TENSOR_AXIS and placement.is_shard():
                return int(size)
    return 1


def _chosen_experts(config: PretrainedConfig) -> float:
    """Return the share of the experts that a token goes through."""
    facts = ModelFacts.of(config.to_dict())
    if not facts.experts_per_token:
        raise NotCounted(f"the configuration of {config.model_type} does not say how many experts a token goes through")
    return facts.experts_per_token / facts.experts


def _pairs(text: nn.Module, config: PretrainedConfig, first: int | None) -> dict[Attended, Product]:
    """Return the operations per pair over all attention layers of this rank."""
    kinds = list(getattr(config, "layer_types", None) or [])
    present = {layer for name, _ in text.named_parameters() if (layer := _layer(name)) is not None}
    attending = [layer for layer, memory in enumerate(layer_memories(config)) if memory.keys and layer in present]
    found: dict[Attended, Product] = {}
    for layer in attending:
        own = config.per_layer_config[layer]  # Gemma 4's layers have heads of two sizes
        per_pair = 2.0 * _heads(text, own)
        sees = _sees(own, kinds[layer] if layer < len(kinds) else None)
        backward = 2.0 * per_pair if first is not None and layer >= first else 0.0
        found[sees] = found.get(sees, Product()) + Product(per_pair, backward)
    return found


def _sees(config: PretrainedConfig, kind: str | None) -> Attended:
    window = getattr(config, "sliding_window", None)
    if kind == "chunked_attention":
        return Attended(chunk=config.attention_chunk_size)
    if window and (kind == "sliding_attention" or (kind is None and getattr(config, "use_sliding_window", True))):
        return Attended(window=int(window))
    return Attended()


def _heads(text: nn.Module, config: PretrainedConfig) -> float:
    """Return the size of a token's queries and values together, over the heads that this rank computes."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise NotCounted(f"the configuration of {config.model_type} does not have one number of attention heads")
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if getattr(config, "kv_lora_rank", None):  # DeepSeek's latent attention: heads of their own sizes
        queries, values = int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)
    else:
        queries = values = size
    asking = (
        parameter
        for name, parameter in text.named_parameters()
        if name.replace(".base_layer.", ".").endswith(_QUERIES)  # which adapters lie around
    )
    return heads * (queries + values) / max(map(_slices, asking), default=1)


class FlopCount:
    """Operations that this rank does for a role, added up.

    Args:
        root, trunk: see `model_flops`; in the state in which they are trained. This attaches hooks to the linear layers
            and convolutions of a vision tower.

    Attributes:
        total: operations so far.
        left_out: parts of the model that are not counted, each in a few words; empty for a decoder of attention layers.

    Raises:
        NotCounted: see `model_flops`.
    """

    def __init__(self, root: nn.Module, trunk: PreTrainedModel) -> None:
        self.total = 0.0
        self.left_out: list[str] = []
        self._model = model_flops(root, trunk)
        decoder = set(text_part(trunk).modules())
        tower = [
            module
            for module in trunk.modules()
            if module not in decoder and isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))
        ]
        for module in tower:
            module.register_forward_hook(self._add_tower)
        if tower:
            self.left_out.append("attention between the patches of a picture")
        if recurrent := sum(memory.states > 0 for memory in layer_memories(trunk.config.get_text_config())):
            self.left_out.append(f"the states of {recurrent} recurrent layers")

    def add(self, work: ForwardPass, *, backward: bool, share: float = 1.0) -> None:
        """Add `share` of a forward pass over `work`, and of its backward pass if there is one."""
        self.total += share * self._model.of(work, backward=backward)

    def _add_tower(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = cast(Tensor, module.weight)
        forward = 2.0 * weight.numel() * (output.numel() / weight.shape[0])
        gradients = (inputs[0].requires_grad + weight.requires_grad) * torch.is_grad_enabled()
        self.total += forward * (1 + gradients)

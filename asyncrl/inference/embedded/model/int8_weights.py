"""Weights of linear layers with the values that they have in int8: a stand-in for servers that quantise.

    row r of a weight    scale_r = max|w_r| / 127,  w_r becomes scale_r * round(w_r / scale_r)

That is int8 by output channel without a change of the activations. The values are those of such an engine; memory and
speed are those of the model's own type, since the products are computed there. Embeddings, the head, norms, biases and
fused experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LARGEST = 127


def rounded(weight: Tensor) -> Tensor:
    """Return `weight`, [outputs, inputs], with the values of int8 and a scale for each output, in float32."""
    values = weight.float()
    scale = values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    return (values / scale).round() * scale


class Int8Weights:
    """Rounds the linear layers of `model` at construction, and weights that are staged for them later.

    A staged tensor may be a part of a layer's weight, because each row has a separate scale.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]
        self._storages = {_storage(layer.weight) for layer in layers}
        for layer in layers:
            layer.weight.data.copy_(rounded(layer.weight.data))

    def staged(self, tensors: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (tensor of the model, its new value), those of linear layers rounded."""
        return [
            (target, rounded(value) if target.dim() == 2 and _storage(target) in self._storages else value)
            for target, value in tensors
        ]


def _storage(tensor: Tensor) -> Any:
    """Identity of the memory of `tensor`, which stays while a guest's storage is emptied."""
    return tensor.untyped_storage()._cdata

"""Linear layers over weights in oneDNN's own blocked layout, without touching the model.

A decode step is mostly products of a few rows with large weights. Torch passes fp32 products to MKL with the weight as
it is. oneDNN packs the weight once, and was up to twice as fast where it was measured (AMD Zen 5, 8 to 128 rows). While
a `PackedLinears` is in force (it is a context manager), `F.linear` with a weight that it has packed goes to oneDNN;
everything else is unchanged. A 16-bit output embedding that computes in float32 (`compute_head_in_float32`) has a copy
in float32, which would otherwise be made at each step: `weight.float()` returns that copy.

The copies take the memory of the weights once more. They are rebuilt after a weight update: some 0.1 ms per weight for
oneDNN's preparation, beside the copying. A few dozen decode steps of many rows win that back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LEAST_WEIGHT = 2**16
"""Entries below which a weight is left alone: oneDNN's fixed cost of a call, some 8 us, would exceed the gain."""


@torch.jit.script
def _packed_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a packed weight; scripted because `torch.jit.trace` cannot record the empty list of scalars."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


class PackedLinears(TorchFunctionMode):
    """The packed weights of a model's linear layers; empty if oneDNN would not help (other dtypes and devices).

    Args:
        weights: the parameters, as the layers hold them.
        packed: `weights` in oneDNN's layout, in the same order.
    """

    def __init__(self, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = tuple(weights)
        self.packed: tuple[Tensor, ...] = ()
        self._by_id: dict[int, Tensor] = {}
        self._hold(packed)

    @classmethod
    def of(cls, *parts: nn.Module, head: Tensor | None = None) -> PackedLinears:
        """Pack the weights of a model's `parts` that are large enough.

        Args:
            head: weight of another type that is used in float32.
        """
        extra = [] if head is None else [head]
        if not torch._C._has_mkldnn:
            return cls(extra, [_pack(weight) for weight in extra])
        layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]
        found = {id(layer.weight): layer.weight for layer in layers}
        weights = [
            weight
            for weight in found.values()
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST_WEIGHT
        ]
        weights += extra
        return cls(weights, [_pack(weight) for weight in weights])

    def drop(self) -> int:
        """Drop the copies until `renew`; return their bytes."""
        freed = sum(weight.numel() * torch.float32.itemsize for weight in self.weights) if self.packed else 0
        self.packed, self._by_id = (), {}
        return freed

    def renew(self) -> None:
        """Pack the weights as they are now, into the memory of the former copies, which are dropped first."""
        self.drop()
        self._hold([_pack(weight) for weight in self.weights])

    def _hold(self, packed: Sequence[Tensor]) -> None:
        self.packed = tuple(packed)
        pairs = list(zip(self.weights, packed, strict=True))
        self._by_id = {id(weight): copy for weight, copy in pairs}
        self._by_id |= {id(copy): copy for weight, copy in pairs if weight.dtype != torch.float32 and copy.is_mkldnn}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Send `F.linear(states, weight, bias)` to oneDNN if `weight` is packed."""
        if func is Tensor.float and args[0].dtype != torch.float32 and id(args[0]) in self._by_id:
            return self._by_id[id(args[0])]
        if func is nn.functional.linear and not kwargs:
            packed = self._by_id.get(id(args[1]))
            if packed is not None:
                return _packed_linear(args[0], packed, args[2] if len(args) > 2 else None)
        return func(*args, **(kwargs or {}))


def _pack(weight: Tensor) -> Tensor:
    values = weight.detach().float()
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return values
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values)
    return packed

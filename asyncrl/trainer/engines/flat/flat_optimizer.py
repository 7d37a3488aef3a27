"""AdamW, or Muon, over one flat vector.

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

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.engines.decay_groups import NamedParameter, decay_groups
from asyncrl.trainer.engines.optimizer import MOMENTS, EngineOptimizer, Moments, trainable, zero_moments
from asyncrl.trainer.settings import OptimizerConfig


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
                parameter.register_post_accumulate_grad_hook(_Widen(grad))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _round_low_precision(self) -> None:
        for parameter, master in self._low_precision:
            parameter.copy_(master)


class _Widen:
    """Adds a low-precision gradient into its part of the fp32 vector and frees the gradient."""

    def __init__(self, destination: Tensor) -> None:
        self._destination = destination

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._destination.add_(parameter.grad)
        parameter.grad = None

"""AdamW with clipping: the common part of both engines' optimizers.

An engine's optimizer decides where parameters and moments are stored. This module runs torch's fused kernel over them,
with groups by weight decay, and returns their state for checkpoints. The caller gives each step its learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.engines.decay_groups import NamedParameter
from asyncrl.trainer.engines.host_offload import local, zeros_on_host
from asyncrl.trainer.settings import KeptOn, OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in the state of torch's AdamW, and in checkpoints."""
PIECE = 1 << 24
"""Values of a moment that are on the device at a time, where moments are in host memory: 64 MiB each of two."""

Moments = Mapping[str, Tensor]
"""Optimizer moments of one parameter, by the names in `MOMENTS`."""


def zero_moments(like: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
    """Create zero moments for a parameter, on the device or the host as `optimizer.moments_on` says."""
    on_host = config.moments_on == KeptOn.host
    return {
        moment: zeros_on_host(like) if on_host else torch.zeros_like(like, requires_grad=False) for moment in MOMENTS
    }


def trainable(parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
    """Return the parameters that have a gradient.

    Raises:
        ValueError: no parameter has one.
    """
    found = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not found:
        raise ValueError("the model has no trainable parameter; set requires_grad on what is to be trained")
    return found


class _LocalAdamW(torch.optim.AdamW):
    """torch's AdamW over this rank's own parts. Given lists of DTensors, torch would first search for the placements of
    the results, which takes seconds in each new process.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.AdamW`."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            averages, squares = ([local(state[moment]) for state in states] for moment in MOMENTS)
            _update(
                group,
                [local(parameter) for parameter in parameters],
                [local(cast(Tensor, parameter.grad)) for parameter in parameters],
                averages,
                squares,
                [state["step"] for state in states],
            )


class _HostMomentsAdamW(torch.optim.AdamW):
    """torch's AdamW with its moments in host memory; they pass through the device piece by piece."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.AdamW`."""
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the moments are next read on the host

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        values = (parameter.detach(), cast(Tensor, parameter.grad), *(state[moment] for moment in MOMENTS))
        pieces = (torch.split(local(value).view(-1), PIECE) for value in values)
        for value, grad, *hosts in zip(*pieces, strict=True):
            average, square = (host.to(value.device, non_blocking=True, copy=True) for host in hosts)
            _update(group, [value], [grad], [average], [square], [state["step"].clone()])
            for host, moment in zip(hosts, (average, square), strict=True):
                host.copy_(moment, non_blocking=True)
        state["step"] += 1


def _update(
    group: Mapping[str, Any],
    values: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Run torch's fused kernel over tensors of the same `group`, with their moments and their steps so far."""
    beta1, beta2 = group["betas"]
    adamw(
        values,
        grads,
        averages,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class EngineAdamW(ABC):
    """AdamW over groups of parameters.

    Args:
        groups: the parameters of each group with their moments, and the group's weight decay. Moments exist from the
            start, so that a checkpoint can be loaded into them.

    Attributes:
        steps: steps taken, counted on the host: AdamW counts on the device, and reading that count waits for its
            copies.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[tuple[nn.Parameter, Moments]], float]],
        config: OptimizerConfig,
    ) -> None:
        self.steps = 0
        self._max_grad_norm = config.max_grad_norm
        self._on_host = config.moments_on == KeptOn.host
        self._adamw = (_HostMomentsAdamW if self._on_host else _LocalAdamW)(
            [{"params": [parameter for parameter, _ in group], "weight_decay": decay} for group, decay in groups],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for group, _ in groups:
            for parameter, moments in group:  # as AdamW's own first step would make it
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self._adamw.state[parameter] = {"step": step, **moments}

    def step(self, lr: float) -> StepOutcome:
        """Clip, and update with the learning rate `lr`. A gradient that is not finite changes nothing."""
        norm_0 = self._norm()
        norm = float(norm_0)
        applied = norm < float("inf")  # False for nan too
        if applied:
            if self._max_grad_norm > 0.0:
                nn.utils.clip_grads_with_norm_(self._clipped(), self._max_grad_norm, norm_0)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self.steps += 1
        return StepOutcome(norm, applied)

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Continue after the number of steps in `meta`."""
        self.steps = int(meta["step"])
        for state in self._adamw.state.values():
            state["step"].fill_(float(self.steps))

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer holds on the device beside parameters and gradients."""
        if not self._on_host:
            yield from (state[moment] for state in self._adamw.state.values() for moment in MOMENTS)

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget accumulated gradients."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`TrainingEngine.state` of a trained role: this optimizer's own storage by name, and the steps taken."""

    @abstractmethod
    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Continue from the values written into the tensors of `state`, after the number of steps in `meta`."""

    @abstractmethod
    def _norm(self) -> Tensor:
        """The norm of all gradients of all ranks, 0-d."""

    @abstractmethod
    def _clipped(self) -> Iterable[Tensor]:
        """Tensors with the gradients that are scaled."""

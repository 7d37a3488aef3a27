"""AdamW over one flat vector.

All trainable parameters live end to end in one fp32 vector, their gradients in a second one. So one all-reduce, one
norm and one fused AdamW kernel serve the whole model, whatever the number of its tensors. Parameters in fp32 are views
of the vector and their `.grad` are views of the gradient vector: nothing is copied. Parameters of lower precision keep
their own storage; their gradients are added into the fp32 vector as soon as each is ready (so they never accumulate in
low precision), and after a step they are rounded from the fp32 master values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.settings import LearningRateSchedule, OptimizerConfig

SCHEDULES = {
    LearningRateSchedule.constant: "constant_with_warmup",
    LearningRateSchedule.linear: "linear",
    LearningRateSchedule.cosine: "cosine",
}
"""Their names in transformers."""


class FlatAdamW:
    """AdamW with clipping and a learning-rate schedule over `parameters`, which it re-homes.

    Args:
        parameters: (name, parameter) pairs, each once; all on one device.
        total_steps: optimizer steps of the whole run, for schedules that end.

    Raises:
        ValueError: there is no trainable parameter.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int
    ) -> None:
        self._parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no trainable parameter; set requires_grad on what is to be trained")
        device = self._parameters[0][1].device
        size = sum(parameter.numel() for _, parameter in self._parameters)
        self.flat = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        self._low_precision: list[tuple[nn.Parameter, Tensor]] = []
        self._adopt()
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            [self.flat],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._adamw.state[self.flat] = {  # as torch makes them at the first step; a checkpoint may be read before it
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self.flat),
            "exp_avg_sq": torch.zeros_like(self.flat),
        }
        self._schedule = get_scheduler(
            SCHEDULES[config.schedule],
            self._adamw,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=total_steps,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._adamw.param_groups[0]["lr"])

    def masters(self) -> list[Tensor]:
        """The parameters' fp32 master values, in the order given; views."""
        return [view for _, view in self._views(self.flat)]

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self.grad.zero_()

    def step(self) -> StepOutcome:
        """Clip, update, advance the schedule. A gradient that is not finite changes nothing."""
        lr = self.lr
        limit = self._max_grad_norm if self._max_grad_norm > 0.0 else float("inf")
        norm = float(nn.utils.clip_grad_norm_([self.flat], limit))
        applied = norm < float("inf")  # False for nan too
        if applied:
            self._adamw.step()
            self._schedule.step()
            self._round_low_precision()
        return StepOutcome(norm, lr, applied)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`TrainingEngine.state`: views of master values and moments by parameter, and the steps taken."""
        moments = self._adamw.state[self.flat]
        vectors = {"weights": self.flat, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
        tensors = {f"{kind}.{name}": view for kind, vector in vectors.items() for name, view in self._views(vector)}
        return tensors, {"step": int(moments["step"])}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Go on from what was written into the tensors of `state`, after the steps that `meta` says."""
        self._adamw.state[self.flat]["step"].fill_(meta["step"])
        # Every step taken moved the schedule too. The rates are the config's, which may have changed since.
        schedule = self._schedule
        schedule.last_epoch = meta["step"]
        for group, lr, factor in zip(self._adamw.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = lr * factor(schedule.last_epoch)
        self._round_low_precision()

    def _views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parameters' parts of a vector as long as `flat`, by name, in the order given."""
        parts = torch.split(vector.detach(), [parameter.numel() for _, parameter in self._parameters])
        for part, (name, parameter) in zip(parts, self._parameters, strict=True):
            yield name, part.view_as(parameter)

    def _adopt(self) -> None:
        """Move every parameter's values into the flat vector and have its gradient arrive in the other one."""
        start = 0
        for _, parameter in self._parameters:
            end = start + parameter.numel()
            master, grad = self.flat.data[start:end].view_as(parameter), self.grad[start:end].view_as(parameter)
            master.copy_(parameter.data)
            if parameter.dtype == torch.float32:
                parameter.data, parameter.grad = master, grad
            else:
                self._low_precision.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(_Widen(grad))  # type: ignore[no-untyped-call]
            start = end

    @torch.no_grad()
    def _round_low_precision(self) -> None:
        for parameter, master in self._low_precision:
            parameter.copy_(master)


class _Widen:
    """Adds a low-precision gradient into its fp32 place and frees it."""

    def __init__(self, destination: Tensor) -> None:
        self._destination = destination

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._destination.add_(parameter.grad)
        parameter.grad = None

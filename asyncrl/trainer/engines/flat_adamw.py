"""AdamW over one flat vector.

All trainable parameters live end to end in one fp32 vector, their gradients in a second one. So one all-reduce, one
norm and one fused AdamW kernel serve the whole model, whatever the number of its tensors. Parameters in fp32 are views
of the vector and their `.grad` are views of the gradient vector: nothing is copied. Parameters of lower precision keep
their own storage; their gradients are added into the fp32 vector as soon as each is ready (so they never accumulate in
low precision), and after a step they are rounded from the fp32 master values.

What weight decay acts on (`decay_groups`) lies before what it leaves alone, so that AdamW sees two tensors at most. A
checkpoint says in which order its vectors hold the parameters and is taken over name by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.engines.decay_groups import decay_groups
from asyncrl.trainer.settings import LearningRateSchedule, OptimizerConfig

SCHEDULES = {
    LearningRateSchedule.constant: "constant_with_warmup",
    LearningRateSchedule.linear: "linear",
    LearningRateSchedule.cosine: "cosine",
}
"""Their names in transformers."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Their names in the state of torch's AdamW, and in checkpoints."""


class FlatAdamW:
    """AdamW with clipping and a learning-rate schedule over `parameters`, which it re-homes.

    Args:
        parameters: (name, parameter) pairs, each once; all on one device.
        total_steps: optimizer steps of the whole run, for schedules that end.
        undecayed: names of parameters that weight decay leaves alone, besides norms and biases.

    Raises:
        ValueError: there is no trainable parameter.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        total_steps: int,
        undecayed: Collection[str] = (),
    ) -> None:
        given = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        if not given:
            raise ValueError("the model has no trainable parameter; set requires_grad on what is to be trained")
        groups = decay_groups(given, undecayed).with_decay(config.weight_decay)
        self._given = [name for name, _ in given]
        self._parameters = [named for group, _ in groups for named in group]
        device = given[0][1].device
        sizes = [sum(parameter.numel() for _, parameter in group) for group, _ in groups]
        self.flat = nn.Parameter(torch.empty(sum(sizes), dtype=torch.float32, device=device))
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        self._low_precision: list[tuple[nn.Parameter, Tensor]] = []
        self._adopt()
        self._max_grad_norm = config.max_grad_norm
        self._moments = {key: torch.zeros_like(self.grad) for key in MOMENTS}
        self._parts = [nn.Parameter(part) for part in torch.split(self.flat.data, sizes)]
        for part, grad in zip(self._parts, torch.split(self.grad, sizes), strict=True):
            part.grad = grad
        self._adamw = torch.optim.AdamW(
            [{"params": [part], "weight_decay": decay} for part, (_, decay) in zip(self._parts, groups, strict=True)],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for i, part in enumerate(self._parts):  # as AdamW's own first step would make it, but in one vector for all
            moments = {key: torch.split(vector, sizes)[i] for key, vector in self._moments.items()}
            self._adamw.state[part] = {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}
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
        views = self._views(self.flat.detach())
        return [views[name] for name in self._given]

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
        vectors = {"weights": self.flat.detach(), **self._moments}
        tensors = {
            f"{kind}.{name}": view for kind, vector in vectors.items() for name, view in self._views(vector).items()
        }
        return tensors, {"step": int(self._adamw.state[self._parts[0]]["step"])}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Go on from what was written into the tensors of `state`, after the steps that `meta` says."""
        for part in self._parts:
            self._adamw.state[part]["step"].fill_(meta["step"])
        resume_schedule(self._schedule, self._adamw, int(meta["step"]))
        self._round_low_precision()

    def _views(self, vector: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a vector, in its shape."""
        parts = torch.split(vector, [parameter.numel() for _, parameter in self._parameters])
        named = zip(self._parameters, parts, strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in named}

    def _adopt(self) -> None:
        """Move every parameter's values into the flat vector and have its gradient arrive in the other one."""
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


def resume_schedule(schedule: LambdaLR, optimizer: Optimizer, step: int) -> None:
    """Set the schedule behind `step` optimizer steps; the rates are the config's, which may have changed since."""
    schedule.last_epoch = step
    for group, lr, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = lr * factor(step)


class _Widen:
    """Adds a low-precision gradient into its fp32 place and frees it."""

    def __init__(self, destination: Tensor) -> None:
        self._destination = destination

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._destination.add_(parameter.grad)
        parameter.grad = None

"""AdamW with clipping and a learning-rate schedule: what both engines' optimizers share.

Theirs is where parameters and moments lie; here is torch's fused kernel over them, its groups by weight decay, the
schedule, and what of both a checkpoint needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.engines.decay_groups import NamedParameter
from asyncrl.trainer.settings import LearningRateSchedule, OptimizerConfig

SCHEDULES = {
    LearningRateSchedule.constant: "constant_with_warmup",
    LearningRateSchedule.linear: "linear",
    LearningRateSchedule.cosine: "cosine",
}
"""Their names in transformers."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Their names in the state of torch's AdamW, and in checkpoints."""

Moments = Mapping[str, Tensor]
"""Of one parameter, by the names of `MOMENTS`."""


def trainable(parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
    """Those that have a gradient.

    Raises:
        ValueError: there is none.
    """
    found = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not found:
        raise ValueError("the model has no trainable parameter; set requires_grad on what is to be trained")
    return found


class ScheduledAdamW(ABC):
    """AdamW over groups of parameters.

    Args:
        groups: the parameters of each group, each with its moments, and the group's weight decay. They are there from
            the start, so that a checkpoint has where to load to.
        total_steps: optimizer steps of the whole run, for schedules that end.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[tuple[nn.Parameter, Moments]], float]],
        config: OptimizerConfig,
        total_steps: int,
    ) -> None:
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
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

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(next(iter(self._adamw.state.values()))["step"])

    def step(self) -> StepOutcome:
        """Clip, update, advance the schedule. A gradient that is not finite changes nothing."""
        lr, norm_0 = self.lr, self._norm()
        norm = float(norm_0)
        applied = norm < float("inf")  # False for nan too
        if applied:
            if self._max_grad_norm > 0.0:
                nn.utils.clip_grads_with_norm_(self._clipped(), self._max_grad_norm, norm_0)
            self._adamw.step()
            self._schedule.step()
        return StepOutcome(norm, lr, applied)

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Go on after the steps that `meta` says. The rates are the config's, which may have changed since."""
        step = int(meta["step"])
        for state in self._adamw.state.values():
            state["step"].fill_(float(step))
        self._schedule.last_epoch = step
        factors = self._schedule.lr_lambdas
        for group, lr, factor in zip(self._adamw.param_groups, self._schedule.base_lrs, factors, strict=True):
            group["lr"] = lr * factor(step)

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget accumulated gradients."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`TrainingEngine.state` of a trained role: this optimizer's own storage by name, and the steps taken."""

    @abstractmethod
    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Go on from what was written into the tensors of `state`, after the steps that `meta` says."""

    @abstractmethod
    def _norm(self) -> Tensor:
        """The norm of all gradients of all ranks, 0-d."""

    @abstractmethod
    def _clipped(self) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are scaled."""

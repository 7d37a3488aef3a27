"""AdamW over a stage's sharded parameters: torch's fused kernel on each rank's own parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.engines.decay_groups import decay_groups
from asyncrl.trainer.engines.flat_adamw import MOMENTS, SCHEDULES, resume_schedule
from asyncrl.trainer.settings import OptimizerConfig


class ShardedAdamW:
    """AdamW with clipping and a learning-rate schedule.

    Args:
        parameters: (name in the model folder, parameter) pairs of this rank's stage; DTensors on one mesh.
        counted: of these, the names whose gradients count in the norm: a parameter of two stages counts once.
        pipeline: over whose ranks the norm is summed; None where there is one stage.
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
        *,
        counted: frozenset[str],
        pipeline: dist.ProcessGroup | None,
        undecayed: Collection[str] = (),
    ) -> None:
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        if not self._parameters:
            raise ValueError("the model has no trainable parameter; set requires_grad on what is to be trained")
        self._counted, self._pipeline = counted, pipeline
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            [
                {"params": [parameter for _, parameter in named], "weight_decay": decay}
                for named, decay in decay_groups(self._parameters.items(), undecayed).with_decay(config.weight_decay)
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for parameter in self._parameters.values():  # there from the start, so that a checkpoint has where to load to
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
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

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._adamw.zero_grad()

    def step(self) -> StepOutcome:
        """Clip, update, advance the schedule. A gradient that is not finite changes nothing."""
        lr = self.lr
        norm_0 = self._norm()
        norm = float(norm_0)
        applied = norm < float("inf")  # False for nan too
        if applied:
            if self._max_grad_norm > 0.0:
                nn.utils.clip_grads_with_norm_(self._parameters.values(), self._max_grad_norm, norm_0)
            self._adamw.step()
            self._schedule.step()
        return StepOutcome(norm, lr, applied)

    def _norm(self) -> Tensor:
        """The norm of all gradients of all ranks, 0-d."""
        grads = [p.grad for name, p in self._parameters.items() if name in self._counted and p.grad is not None]
        device = next(iter(self._parameters.values())).device
        square = torch.zeros((), device=device)
        if grads:
            norm = nn.utils.get_total_norm(grads)
            square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self._pipeline is not None:
            dist.all_reduce(square, group=self._pipeline)
        return square.sqrt()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Master values and moments by name, which are this optimizer's own storage, and JSON-able data."""
        tensors = {f"weights.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = self._adamw.state[parameter][moment]
        step = next(iter(self._adamw.state.values()))["step"]
        return tensors, {"step": int(step)}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Go on where `meta` says; the tensors have been loaded in place."""
        for state in self._adamw.state.values():
            state["step"].fill_(float(meta["step"]))
        resume_schedule(self._schedule, self._adamw, int(meta["step"]))

"""AdamW over a stage's sharded parameters: torch's fused kernel on each rank's own parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.trainer.engines.decay_groups import NamedParameter, decay_groups
from asyncrl.trainer.engines.host_offload import local
from asyncrl.trainer.engines.optimizer import EngineOptimizer, trainable, zero_moments
from asyncrl.trainer.engines.sharded.gathering import whole
from asyncrl.trainer.settings import OptimizerConfig


class ShardedAdamW(EngineOptimizer):
    """AdamW over parts.

    Args:
        parameters: (name in the model folder, parameter) pairs of this rank's stage; DTensors on one mesh.
        counted: names of the parameters that count in the norm; a parameter of two stages counts once.
        pipeline: ranks over which the norm is summed; None if there is one stage.
        undecayed: names of parameters without weight decay, besides norms and biases.

    Raises:
        ValueError: there is no trainable parameter.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        config: OptimizerConfig,
        *,
        counted: frozenset[str],
        pipeline: dist.ProcessGroup | None,
        undecayed: Collection[str] = (),
    ) -> None:
        self._parameters = dict(trainable(parameters))
        self._counted, self._pipeline = counted, pipeline
        self._moments = {name: zero_moments(parameter, config) for name, parameter in self._parameters.items()}
        groups = decay_groups(self._parameters.items(), undecayed).with_decay(config.weight_decay)
        super().__init__(
            [([(parameter, self._moments[name]) for name, parameter in named], decay) for named, decay in groups],
            config,
        )

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"weights.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, moments in self._moments.items():
            tensors |= {f"{moment}.{name}": kept for moment, kept in moments.items()}
        return tensors, {"step": self.steps}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        self.resume(meta)

    def _norm(self) -> Tensor:
        grads = [p.grad for name, p in self._parameters.items() if name in self._counted and p.grad is not None]
        device = next(iter(self._parameters.values())).device
        square = torch.zeros((), device=device)
        if grads:
            norm = nn.utils.get_total_norm(grads)
            square = whole(norm) ** 2
        if self._pipeline is not None:
            dist.all_reduce(square, group=self._pipeline)
        return square.sqrt()

    def _clipped(self) -> Iterable[Tensor]:
        """This rank's own parts, for the reason of `_AdamW`."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                part = local(parameter.detach())
                part.grad = local(parameter.grad)
                yield part

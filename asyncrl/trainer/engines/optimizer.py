"""The common part of both engines' optimizers: decayed parameters, clipping, torch's AdamW and Muon, their state.

An engine's optimizer decides where parameters and moments are stored, as torch's cannot: in one fp32 vector beside
weights of lower precision (flat), or in shards. The steps are torch's own, on tensors of this rank. The caller gives
each step its learning rate.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) orthogonalises the updates of whole matrices, which
no rank of a sharded engine has. It is made for the matrices of layers; embeddings, heads and norms use AdamW.

Weight decay
------------
Decay pulls towards 0. That regularises a matrix; a norm's scale is not neutral there and a bias has nothing to
regularise, so both are left out, as in minGPT, Megatron-LM and transformers' Trainer. Shape and name decide; they are
the same for a sharded module and for a stage of a pipeline. Parameters without decay are

- those with at most one dimension: norms, biases, the per-channel parameters of recurrent layers,
- those called a bias (the biases of a layer of experts are a matrix),
- those of a norm (Cohere's have one row per head),
- those that the caller names, such as `embedding_names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.adamw import adamw
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.models.host_copies import host_buffer
from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.settings import KeptOn, OptimizerConfig

NamedParameter = tuple[str, nn.Parameter]


class DecayGroups(NamedTuple):
    """Parameters with and without weight decay, with their names, in the order given."""

    decayed: list[NamedParameter]
    undecayed: list[NamedParameter]

    def with_decay(self, weight_decay: float) -> list[tuple[list[NamedParameter], float]]:
        """Return the groups that are not empty, each with its weight decay."""
        groups = [(self.decayed, weight_decay), (self.undecayed, 0.0)]
        return [(parameters, decay) for parameters, decay in groups if parameters]


def decay_groups(named_parameters: Iterable[NamedParameter], undecayed: Collection[str] = ()) -> DecayGroups:
    """Sort parameters by whether weight decay acts on them.

        groups = decay_groups(model.named_parameters()).with_decay(0.1)
        AdamW([{"params": [p for _, p in named], "weight_decay": decay} for named, decay in groups])

    Args:
        undecayed: names of further parameters without weight decay.
    """
    groups = DecayGroups([], [])
    for name, parameter in named_parameters:
        decays = name not in undecayed and _is_weight_matrix(name, parameter)
        (groups.decayed if decays else groups.undecayed).append((name, parameter))
    return groups


def embedding_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the embeddings' weights in `module.named_parameters()`; a tied weight is the head's too."""
    return frozenset(
        f"{path}.weight" if path else "weight"
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding)
    )


def _is_weight_matrix(name: str, parameter: nn.Parameter) -> bool:
    *owners, own = name.lower().split(".")
    owner = owners[-1] if owners else ""
    return parameter.ndim > 1 and "bias" not in own and "norm" not in owner and "norm" not in own


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in the state of torch's AdamW, and in checkpoints. The first is Muon's momentum too."""
PIECE = 1 << 24
"""Values of a moment that are on the device at a time, where moments are in host memory: 64 MiB each of two."""

Moments = Mapping[str, Tensor]
"""Optimizer moments of one parameter, by the names in `MOMENTS`."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view; all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_on_host(like: Tensor) -> Tensor:
    """Return zeros of the type, shape and placement of `like` in host memory, pinned if `like` is on a GPU."""
    mine = local(like)
    zeros = host_buffer(mine.shape, like.dtype, mine.device).zero_()
    if not isinstance(like, DTensor):
        return zeros
    # As FSDP2 makes the parameters that it off-loads; DTensor.from_local would move them to the mesh's device.
    return DTensor(zeros, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


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


def matrices_of_layers(module: nn.Module) -> frozenset[str]:
    """Return the names of the matrices in the layers of `module`, which are Muon's."""
    return frozenset(
        f"{path}.{name}"
        for path, layer in module.named_modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    )


class _AdamW(torch.optim.AdamW):
    """torch's AdamW over this rank's own parts, with moments on the device or in host memory.

    Given lists of DTensors, torch would first search for the placements of the results, which takes seconds in each new
    process. Moments in host memory, which torch's AdamW does not know, pass through the device piece by piece.
    """

    on_host = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.AdamW`."""
        devices = set()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.on_host:
                for parameter in parameters:
                    self._update_on_host(parameter, group)
                devices |= {parameter.device for parameter in parameters}
                continue
            states = [self.state[parameter] for parameter in parameters]
            averages, squares = ([local(state[moment]) for state in states] for moment in MOMENTS)
            grads = [local(cast(Tensor, parameter.grad)) for parameter in parameters]
            steps = [state["step"] for state in states]
            _update(group, [local(parameter) for parameter in parameters], grads, averages, squares, steps)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the moments are next read on the host

    def _update_on_host(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
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


class EngineOptimizer(ABC):
    """AdamW over groups of parameters, and Muon over matrices.

    Args:
        groups: the parameters of each group with their moments, and the group's weight decay. Moments exist from the
            start, so that a checkpoint can be loaded into them.
        matrices: Muon's parameters with their moments; they decay too.

    Attributes:
        steps: steps taken, counted on the host: AdamW counts on the device, and reading that count waits for its
            copies.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[tuple[nn.Parameter, Moments]], float]],
        config: OptimizerConfig,
        matrices: Sequence[tuple[nn.Parameter, Moments]] = (),
    ) -> None:
        self.steps = 0
        self._max_grad_norm = config.max_grad_norm
        self._on_host = config.moments_on == KeptOn.host
        self._adamw = _AdamW(
            [{"params": [parameter for parameter, _ in group], "weight_decay": decay} for group, decay in groups],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._adamw.on_host = self._on_host
        for group, _ in groups:
            for parameter, moments in group:  # as AdamW's own first step would make it
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self._adamw.state[parameter] = {"step": step, **moments}
        self._muon: Muon | None = None
        if matrices:
            self._muon_share = 1.0 if config.muon_lr is None else config.muon_lr / config.lr if config.lr else 0.0
            self._muon = Muon(
                [parameter for parameter, _ in matrices],
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",  # so that its steps are of the size of AdamW's
            )
            for parameter, moments in matrices:
                self._muon.state[parameter]["momentum_buffer"] = moments[MOMENTS[0]]

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
            if self._muon is not None:
                self._muon.param_groups[0]["lr"] = lr * self._muon_share
                self._muon.step()  # type: ignore[no-untyped-call]
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

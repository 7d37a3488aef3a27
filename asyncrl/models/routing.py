"""Record the experts that a model's routers choose, and replay recorded choices.

"Rollout routing replay" (R3, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv
2510.11370): the generating engine chose the experts I of a token. The trainer gives expert i in I the weight
exp(s_i) / sum over j in I of exp(s_j), where s are the logits of the *trainer's* router. So the choice is the engine's,
and the weights and their gradient are the trainer's.

A router here is a module whose forward calls `topk` once, on logits or on probabilities, and turns the resulting values
into weights. Choices are recorded and replaced at this one call: it returns the values of the given experts, and the
model continues with them as usual. Mixtral and Qwen3-MoE (`norm_topk_prob`) divide them by their sum, and GPT-OSS takes
their softmax; both equal the formula above. A model that does not renormalise its probabilities does not do so in
a replay either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncrl.api.trajectory import Trajectory, unrecorded
from asyncrl.models.model_config import ROUTERS, UNRECORDED, RoutingShape
from asyncrl.models.parity import UnsupportedModelError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _OneTopK(TorchFunctionMode):
    """Intercepts the calls of `topk`, and answers them with `given` [T, k] if that is set."""

    def __init__(self, given: Tensor | None) -> None:
        super().__init__()
        self._given = given
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        own = func(*args, **(kwargs or {}))
        if self._given is None:
            self.chosen.append(own.indices)
            return own
        chosen = torch.where(self._given == UNRECORDED, own.indices, self._given.to(own.indices.dtype))
        self.chosen.append(chosen)
        scores: Tensor = args[0]
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class Routers:
    """The routers of a transformers model, or of its trunk; by default they compute as usual.

    Args:
        model_type: transformers' name of the architecture.

    Raises:
        UnsupportedModelError: the model has no routers of that architecture.
    """

    def __init__(self, model: nn.Module, model_type: str) -> None:
        kind = ROUTERS.get(model_type)
        found = {name: module for name, module in model.named_modules() if type(module).__name__ == kind}
        self._name = type(model).__name__
        if not found:
            raise UnsupportedModelError(
                f"{self._name} has no routers whose choices can be replayed, as {', '.join(ROUTERS)} have; set "
                "moe.replay_routing=false"
            )
        self._layers: set[int] = set()
        self._given: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        for name, module in found.items():
            layer = _LAYER.search(name)
            if layer is None:
                raise UnsupportedModelError(f"{self._name} has a router in no layer of a list: {name}")
            self._layers.add(int(layer[1]))
            self._tap(module, int(layer[1]))

    def _tap(self, router: nn.Module, layer: int) -> None:
        original: Callable[..., Any] = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given_ILK, recorded = self._given, self._recorded
            if given_ILK is None and recorded is None:
                return original(*args, **kwargs)
            with _OneTopK(None if given_ILK is None else given_ILK[:, layer]) as seen:
                result = original(*args, **kwargs)
            if len(seen.chosen) != 1:
                raise UnsupportedModelError(
                    f"the router of layer {layer} of {self._name} calls topk {len(seen.chosen)} times, not once: its "
                    "choices cannot be replayed; set moe.replay_routing=false"
                )
            if recorded is not None:
                recorded[layer] = seen.chosen[0]
            return result

        router.forward = forward

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Within the block, a forward records each layer's choices, [its tokens, per_token], under the layer's number.

        Raises:
            UnsupportedModelError: at the end of the block, if a router was not called: other code computes its layer.
        """
        before, self._recorded = self._recorded, {}
        recorded = self._recorded
        try:
            yield recorded
        finally:
            self._recorded = before
        if silent := sorted(self._layers - recorded.keys()):
            raise UnsupportedModelError(
                f"the routers of layers {silent} of {self._name} were not asked, as where a kernel computes the whole "
                "layer: their choices cannot be replayed; set moe.replay_routing=false"
            )

    @contextmanager
    def router_replay(self, choices_ILK: Tensor | None) -> Iterator[None]:
        """Within the block, the routers choose as recorded.

        Args:
            choices_ILK: the choices for all tokens of the next forwards and all layers of the whole model; with
                `UNRECORDED` or None the router chooses itself.
        """
        before, self._given = self._given, choices_ILK
        try:
            yield
        finally:
            self._given = before

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint`: make the recomputation of the current forward replay the same choices."""
        return nullcontext(), self.router_replay(self._given)


def routing_fault(trajectory: Trajectory, shape: RoutingShape) -> str | None:
    """Return the fault of the expert choices in `trajectory`; None if they are complete.

    They are complete if every token that the model must read to compute the generated ones has experts that exist.
    """
    columns = trajectory.columns
    routing = columns.routing
    if routing is None:
        return (
            "does not tell which experts its tokens went through (moe.replay_routing): its agent has to build its "
            "samples by asyncrl.plugins.agents.sample_builder or the chat client, or to give them Sample.routing"
        )
    expected = (shape.layers, shape.per_token)
    if routing.dtype != shape.dtype or routing.shape[1:] != expected:
        return f"has a routing of {routing.dtype} {routing.shape[1:]}, the model makes {shape.dtype} {expected}"
    lowest_T, highest_T = routing.min((1, 2)), routing.max((1, 2))
    absent_T = lowest_T == unrecorded(shape.dtype)
    if (wrong_T := (highest_T >= shape.experts) & ~absent_T).any():
        return f"went through expert {int(highest_T[wrong_T][0])}, the model has {shape.experts} in a layer"
    # A sample's last generated token is the last scored token; the tokens before it go into the model.
    generated = np.flatnonzero(columns.loss_mask)
    seq_ids_T = np.repeat(np.arange(len(columns)), columns.lengths)
    last_S = np.full(len(columns), -1)
    np.maximum.at(last_S, seq_ids_T[generated], generated)
    needed_T = np.arange(len(seq_ids_T)) < last_S[seq_ids_T]
    if (missing := int((needed_T & absent_T).sum())) > 0:
        return f"does not tell the experts of {missing} tokens that lie before a generated one"
    return None

"""Recompute a layer's activations in the backward pass instead of keeping them.

Only one hidden state per layer and token is kept. The price is one more forward pass of the layers, a third of a step's
work. A layer is a module that transformers derives from `GradientCheckpointingLayer`. Its `forward` itself is replaced,
so hooks around it, such as those that gather a sharded layer's weights, run outside of the recomputed part.
transformers' own switch acts in `model.train()` only, which would turn dropout on too. This one acts whenever gradients
are recorded, and costs nothing otherwise. The hidden states may wait in host memory (`host_activations`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.models.routing import Routers
from asyncrl.trainer.model.host_activations import HostActivations


def checkpoint_layers(trunk: nn.Module, routers: Routers | None = None, *, on_host: bool = False) -> int:
    """Have every layer of `trunk`, which computes without dropout, recompute its activations; returns their number.

    Args:
        routers: routers of `trunk` that replay expert choices. A recomputed layer, perhaps after another micro-batch,
            replays its own choices again.
        on_host: keep the layers' inputs in host memory until the backward pass.

    Raises:
        NotImplementedError: transformers marks none of its modules as such a layer.
    """
    layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    outermost = [layer for layer in layers if layer not in inner]
    if not outermost:
        raise NotImplementedError(
            f"trainer.gradient_checkpointing=true: transformers marks no layer of {type(trunk).__name__} as one that "
            "can be recomputed; set it to false"
        )
    replayed: dict[str, Any] = {} if routers is None else {"context_fn": routers.again}
    for layer in outermost:
        # Nothing random happens in a layer, so there is no random state to restore.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **replayed)
    if on_host:
        inputs = HostActivations()
        for layer in outermost:
            layer.forward = partial(_saving_to, inputs, layer.forward)
    return len(outermost)


def _saving_to(inputs: HostActivations, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, whose `checkpoint` has autograd save its positional arguments and nothing else."""
    with inputs.moving():
        return forward(*args, **kwargs)

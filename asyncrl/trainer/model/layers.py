"""Ways to compute a model's layers: recomputed in the backward pass, their inputs on the host, and parts compiled.

Recomputed layers
-----------------
A layer's activations are recomputed in the backward pass instead of kept (`trainer.gradient_checkpointing`).
Only one hidden state per layer and token is kept. The price is one more forward pass of the layers, a third of a step's
work. A layer is a module that transformers derives from `GradientCheckpointingLayer`. Its `forward` itself is replaced,
so hooks around it, such as those that gather a sharded layer's weights, run outside of the recomputed part.
transformers' own switch acts in `model.train()` only, which would turn dropout on too. This one acts whenever gradients
are recorded, and costs nothing otherwise.

The hidden states, which are the layers' inputs, may wait in host memory between the passes (`HostActivations`):

    forward    layer i begins     its input is copied to the host (pinned, beside the layer's own work),
                                  and the input of layer i - 1 leaves the device
    backward   layer i is due     its input is back on the device; that of layer i - 1 is on its way

So a device holds two inputs at a time instead of one per layer. Copies have the same bits, so losses and gradients do
not change. On a CPU the host is the device: the same happens, without a benefit. Masks and positions, which all layers
share and which need no gradients, stay.

Compiled parts
--------------
With `trainer.compile` those parts of a model's layers that work token by token are compiled: norms and feed-forward.

transformers' modules are written for clarity, as many small operations. On a GPU each operation is a launch and a pass
over memory, and for training each keeps its result. `torch.compile` makes one or two kernels of a norm, and of the
operations between the matrices of a feed-forward. It compiles once, for any number of tokens.

Attention is not compiled: the layout of sequences, in Python objects, differs with every micro-batch, so each would be
compiled again. Its kernels are fused already. Experts choose tokens by their values and stay as they are.

A model is checked at load with its compiled parts against transformers' own forward without them
(`asyncrl.trainer.model.layout_parity`, `as_written`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.models.host_copies import HostCopies, host_like
from asyncrl.models.routing import Routers


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
    """Call `forward`; its `checkpoint` makes autograd save only the positional arguments."""
    with inputs.moving():
        return forward(*args, **kwargs)


class HostActivations:
    """Moves the tensors that autograd saves within `moving()`. One object serves all layers, in forward order."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._newest: weakref.ref[_Moved] | None = None

    def moving(self) -> saved_tensors_hooks:
        """Return a context within which saved tensors that need gradients go to host memory."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Moved:
        if not tensor.requires_grad:
            return tensor
        before = None if self._newest is None else self._newest()
        if before is not None:
            before.leave()
        moved = _Moved(tensor.detach(), self._copies, self._newest)
        self._newest = weakref.ref(moved)
        return moved

    def _unpack(self, packed: Tensor | _Moved) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.back()


class _Moved:
    """One tensor on the host. Autograd owns it, so it ends with the graph; nothing else may keep it alive.

    Args:
        tensor: tensor on the device.
        before: the tensor that was moved before this one, which the backward pass needs next.
    """

    def __init__(self, tensor: Tensor, copies: HostCopies, before: weakref.ref[_Moved] | None) -> None:
        self._here: Tensor | None = tensor
        self._device, self._version = tensor.device, tensor._version
        self._copies, self._before = copies, before
        self._host = host_like(tensor)
        self._copy = copies.begin([(self._host, tensor)])

    def leave(self) -> None:
        """Free the tensor on the device once its copy has ended; the device waits for that, not the host."""
        if self._here is None:
            return
        if self._here._version != self._version:
            raise RuntimeError(
                "trainer.activations_on=host: a layer has changed its input, which may have been copied to the host by "
                "then; use trainer.activations_on=device"
            )
        self._copy.wait_on_device()
        self._here = None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device, unless it is already there."""
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device)
            self._version = self._here._version
            self._copy = self._copies.begin([(self._here, self._host)])

    def back(self) -> Tensor:
        """Return the tensor on the device, and begin to fetch the one before it."""
        self.fetch()
        tensor = self._here
        assert tensor is not None
        self._copy.wait_on_device()
        self._here = None
        if self._before is not None and (before := self._before()) is not None:
            before.fetch()
        return tensor


TOKENWISE = ("RMSNorm", "LayerNorm", "MLP")
"""Endings of the names of transformers' classes that work token by token, in any model."""
BACKEND: str | Callable[..., Any] = "inductor"
"""torch's name of the compiler, or a function that stands for it."""
_COMPILATIONS = 64
"""Most compilations of one function. It is compiled for each type, with and without gradients, for sizes of one and of
more, of all models of the process."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, at its first call and once for all sizes of its inputs; a part of it that cannot be
    compiled is computed as written.
    """
    # torch's own limit is 8; beyond it everything is computed as written, without an error
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    return torch.compile(function, dynamic=True, backend=BACKEND)


def compile_layers(trunk: nn.Module) -> int:
    """Compile the norms and feed-forward of every layer of `trunk`, at their first call; returns their number.

    Raises:
        NotImplementedError: no layer has a norm or feed-forward with a known class name.
    """
    layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
    parts = (named for layer in layers for named in layer.named_modules())
    found = dict.fromkeys(part for name, part in parts if _is_tokenwise(name, part))
    if not found:
        raise NotImplementedError(
            f"trainer.compile=true: no layer of {type(trunk).__name__} has a norm or feed-forward whose class ends "
            f"with {', '.join(TOKENWISE)}; set it to false"
        )
    for module in found:
        # Not `Module.compile`: torch counts compilations by the called code, which would be the same for all.
        module.forward = compiled(module.forward)
    return len(found)


@contextmanager
def as_written() -> Iterator[None]:
    """Within this block nothing is computed by compiled code."""
    with cast(Any, torch.compiler).set_stance("force_eager"):
        yield


def _is_tokenwise(name: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith(TOKENWISE) and "experts" not in name.split(".")

"""Compile functions for a GPU, and those parts of a model's layers that work token by token: norms and feed-forward
(`trainer.compile`).

transformers' modules are written for clarity, as many small operations. On a GPU each operation is a launch and a pass
over memory, and for training each keeps its result. `torch.compile` makes one or two kernels of a norm, and of the
operations between the matrices of a feed-forward. It compiles once, for any number of tokens.

Attention is not compiled: the layout of sequences, in Python objects, differs with every micro-batch, so each would be
compiled again. Its kernels are fused already. Experts choose tokens by their values and stay as they are.

A model is checked at load with its compiled parts against transformers' own forward without them
(`asyncrl.trainer.model.layout_parity`, `as_written`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

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

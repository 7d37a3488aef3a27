"""Stands in for SGLang's compiled kernels on a machine without a GPU.

SGLang imports names ending in `_cpu` from `sgl_kernel` when it starts, for speculative decoding and moving KV pages.
Plain generation with the torch back ends never calls them, so a name is enough; a call that does happen fails and says
which. `launchers/install_sglang_cpu.sh` puts this module into the environment that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"  # what sglang 0.5.23 pins; it compares versions at start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' (stand-in for a machine without a GPU) has no attribute {name!r}")

    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this is the stand-in for a machine without a GPU")

    return absent

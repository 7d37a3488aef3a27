"""Imports of big libraries without the garbage collector, which finds nothing in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Exclude everything that is imported in this block, and all earlier objects, from garbage collection for good.

    Of torch and transformers the collector goes through hundreds of thousands of objects again and again while they
    are made, and once more in each full collection afterwards: 0.8 of the 4.4 s of processor time until a model can be
    loaded, and 0.2 s of a pause in each full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

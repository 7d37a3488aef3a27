"""Import big libraries without garbage collection, which would find nothing in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Exclude everything that is imported in this block, and all earlier objects, from garbage collection for good.

    While torch and transformers are imported, the collector scans hundreds of thousands of objects again and again, and
    once more in each full collection afterwards. That costs 0.8 of the 4.4 s of CPU time until a model can be loaded,
    and a pause of 0.2 s in each full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

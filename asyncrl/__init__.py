"""Asynchronous reinforcement learning of language models: generation never waits for training, training never for
generation.

`asyncrl.run` and `asyncrl.load_run` start and read runs from Python (`asyncrl.launch.notebook`).
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`run` and `load_run`, which are imported when they are asked for: processes of a run need neither."""
    if name in ("load_run", "run"):
        return getattr(importlib.import_module("asyncrl.launch.notebook"), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")

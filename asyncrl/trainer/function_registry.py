"""Finds a model function by its registered name or its import path.

The built-in ones are registered by `asyncrl.trainer.calls.model_function` when their module in `functions/` is
imported; a new file there needs no mention here.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from asyncrl.config.import_paths import load_plugin
from asyncrl.config.setting import modules_in
from asyncrl.trainer import functions
from asyncrl.trainer.calls import REGISTERED, ModelFunction


def find_function(name: str) -> ModelFunction:
    """The registered function `name`, or the one at the import path `name`.

    Raises:
        PluginError: the import path leads nowhere.
        ValueError: no function is registered under `name`.
    """
    if ":" in name:
        function: ModelFunction = load_plugin(name)
        return function
    for folder in functions.__path__:
        for module in modules_in(Path(folder)):
            importlib.import_module(f"{functions.__name__}.{module}")
    if name not in REGISTERED:
        known = ", ".join(sorted(REGISTERED))
        raise ValueError(f"no model function {name!r}; known: {known}; your own: package.module:function")
    return REGISTERED[name]

"""Changes to modules of asyncrl in the processes of a benchmark's run, made right after they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

Changes = Mapping[str, Callable[[ModuleType], None]]
HERE = Path(__file__).parent


def python_path(folder: Path) -> str:
    """Return PYTHONPATH with which Python runs `sitecustomize.py` of `folder` when it begins."""
    return os.pathsep.join(filter(None, (str(folder), str(HERE), os.environ.get("PYTHONPATH"))))


def after_import(changes: Changes) -> None:
    """Call the function of each named module with the module as soon as this process has imported it."""
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._changes[name](module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

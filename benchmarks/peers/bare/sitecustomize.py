"""First on PYTHONPATH: a run without its ledger, to measure what it costs (`overlap.py --cost`).

Python imports a module of this name when it begins. There is no setting for this, as no run should be without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _without_ledger(module: ModuleType) -> None:
    """Nothing is written and nothing encoded; the lines are added up."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    for name in ("_seal", "close", "write", "_hand_over"):
        getattr(module.Ledger, name)  # it is what is to be left out
        setattr(module.Ledger, name, nothing)
    module.Ledger.begin = nothing
    module.Ledger._add = lambda self, line: self.recorded.take(line)
    module.Ledger.lines_written = lambda self: 0
    module.Ledger.saved = lambda self, version, books: {"line": 0, "lineage": 0}


_BARE: dict[str, Callable[[ModuleType], None]] = {
    "asyncrl.master.books.ledger": _without_ledger,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the modules above right after they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _BARE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _BARE[name](module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())

"""First on PYTHONPATH: a run without its ledger, to measure what it costs (`overlap.py --cost`).

Python imports a module of this name when it begins. There is no setting for this, as no run should be without it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from after_import import after_import


def _without_ledger(module: ModuleType) -> None:
    """Nothing is written and nothing encoded; the lines are added up."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    for name in ("open", "append", "next_if_full", "hand_over", "begin_sync", "sync", "close"):
        getattr(module.LedgerFiles, name)  # it is what is to be left out
        setattr(module.LedgerFiles, name, nothing)
    module.Ledger._seal = nothing
    module.Ledger.begin = nothing
    module.Ledger._add = lambda self, line: self.recorded.take(line)
    module.Ledger.lines_written = lambda self: 0
    module.Ledger.saved = lambda self, version, books: {"line": 0, "lineage": 0}


after_import({"asyncrl.master.books.ledger": _without_ledger})

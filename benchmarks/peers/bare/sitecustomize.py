"""First on PYTHONPATH: a run without its ledger, to measure what it costs (`overlap.py --cost`).

Python imports a module of this name when it begins. There is no setting for this, as no run should be without it.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import ModuleType
from typing import Any

from after_import import after_import


def _without_ledger(module: ModuleType) -> None:
    """Nothing is written and nothing encoded."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def at_once(self: Any, *args: Any, **kwargs: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    for name, instead in {
        "open": nothing,
        "append": nothing,
        "close": nothing,
        "write": at_once,
        "sync": at_once,
    }.items():
        getattr(module.LedgerFiles, name)  # it is what is to be left out
        setattr(module.LedgerFiles, name, instead)
    for name in ("add", "step", "end", "_seal"):
        getattr(module.Ledger, name)
        setattr(module.Ledger, name, nothing)


after_import({"asyncrl.manager.rollouts.ledger": _without_ledger})

"""A request's life."""

from __future__ import annotations

from enum import StrEnum, auto


class Phase(StrEnum):
    """Where a request is."""

    pending = auto()
    running = auto()
    calling_tools = auto()
    completed = auto()
    failed = auto()

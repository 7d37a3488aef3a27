"""Interface between a GenerationServer process and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

BASE_VERSION: Final = "0"
"""Label of the weights that an engine starts with: policy version 0 is the initial model."""


class EngineStartError(RuntimeError):
    """An engine did not become ready."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that takes requests. `pid` is None if this process did not start it."""

    url: str
    pid: int | None


class EngineHost(Protocol):
    """An engine behind SGLang's HTTP API: its start, failure and end.

    Attributes:
        shortage: what happened and the settings to lower, if the engine failed for lack of memory.
    """

    shortage: tuple[str, str] | None

    async def start(self) -> ServedEngine:
        """Start it with the initial model under label `BASE_VERSION`; may be called again after `failed`.

        Raises:
            EngineStartError: it did not start; the message has the reason.
        """

    async def failed(self) -> str:
        """Wait until the engine is gone; return the reason."""

    async def stop(self) -> None:
        """Release the engine, and end it if it was started here. May be repeated."""

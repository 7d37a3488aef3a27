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
    """An engine that takes requests. `pid` is None where its process is not ours."""

    url: str
    pid: int | None


class EngineHost(Protocol):
    """An engine behind SGLang's HTTP API, with the verbs of its life."""

    async def start(self) -> ServedEngine:
        """Bring it up with the initial model under label `BASE_VERSION`; may be called again after `failed`.

        Raises:
            EngineStartError: it did not come up; the message holds the reason.
        """

    async def failed(self) -> str:
        """Wait until it is gone; returns the reason."""

    async def stop(self) -> None:
        """Let go of it; what was started here ends here. Idempotent."""

"""The newest figures of an engine, for `observed/`."""

from __future__ import annotations

import asyncio
from typing import Never

from asyncrl.comm.http.calls import HttpError
from asyncrl.inference.client import GenerationServerClient
from asyncrl.observe.observer import EVERY_S

TIMEOUT_S = 5.0


class EngineFigures:
    """The newest figures of one engine; `follow` keeps them up to date."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}

    def __call__(self) -> dict[str, float]:
        """Return the newest figures; none while the engine does not answer."""
        return self.newest

    async def follow(self, client: GenerationServerClient) -> Never:
        """Ask the engine at intervals until cancelled."""
        limits: dict[str, float] = {}
        try:
            while True:
                try:
                    limits = limits or await client.limits(timeout_s=TIMEOUT_S)
                    self.newest = limits | await client.figures(timeout_s=TIMEOUT_S)
                except (HttpError, ValueError):
                    self.newest = {"silent": 1.0}
                await asyncio.sleep(EVERY_S)
        finally:
            self.newest = {}

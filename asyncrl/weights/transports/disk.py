"""Servers read the version's folder. Any engine can, at any distance that a file system spans.

    manager ── update_weights_from_disk(folder) ──▶ server

The trainer's end is writing the folder (`weights.publishing`). The server's is SGLang's own, or `weights.loading` in
the embedded engine, which reads and checks everything before it touches the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from asyncrl.weights.transports.base import ManagerEnd, Publisher, TrainerEnd, WeightTransport

if TYPE_CHECKING:
    import torch

    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.inference.client import GenerationServerClient


class DiskTransport(WeightTransport):
    """See the module's docstring."""

    needs_folders: ClassVar[bool] = True
    needs_sglang: ClassVar[bool] = False

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """Works with every engine."""
        return iter(())

    def manager_end(self, publisher: Publisher) -> ManagerEnd:
        """See `WeightTransport`; the publisher has nothing to do."""
        return DiskManagerEnd()

    def trainer_end(self, config: ExperimentConfig, token: str | None, device: torch.device) -> TrainerEnd:
        """See `WeightTransport`; nothing is held."""
        return TrainerEnd()


class DiskManagerEnd:
    """Tells a server the folder."""

    async def bring(
        self,
        client: GenerationServerClient,
        server: int,
        version: int,
        path: str,
        *,
        keep_cache: bool,
        timeout_s: float,
    ) -> None:
        await client.update_weights(path, version, keep_cache=keep_cache, timeout_s=timeout_s)

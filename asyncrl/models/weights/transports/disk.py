"""Servers read the version's folder. This works with any engine, wherever the file system is shared.

    manager ── update_weights_from_disk(folder) ──▶ server

The trainer writes the folder (`weights.versions.publishing`). An SGLang server reads it by SGLang's own code. The
embedded engine reads it by `weights.model_files.loading`, which checks everything before it touches the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerationServerClient
from asyncrl.models.weights.transports.base import ManagerEnd, TrainerEnd, WeightTransport
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.messages import SendWeights

if TYPE_CHECKING:
    import torch


class DiskTransport(WeightTransport):
    """Lets servers read the weights from the version's folder."""

    needs_folders: ClassVar[bool] = True

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """Yield nothing: this transport works with every engine."""
        return iter(())

    def manager_end(self, publisher: PublisherClient) -> ManagerEnd:
        """See `WeightTransport`; the publisher has nothing to do."""
        return DiskManagerEnd()

    def trainer_end(self, config: ExperimentConfig, security: HttpSecurity | None, device: torch.device) -> TrainerEnd:
        """See `WeightTransport`; nothing is held."""
        return TrainerEnd()


class DiskManagerEnd(ManagerEnd):
    """Sends a server the path of the folder."""

    async def bring(
        self, client: GenerationServerClient, order: SendWeights, path: str, sending: Callable[[], None]
    ) -> None:
        await client.update_weights(path, order.version, keep_cache=order.keep_cache, timeout_s=math.inf)
